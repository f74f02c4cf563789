"""A failed run in words, for the moment of failure: which rank, what happened, where, and what the others were doing.

Pure: state -> text. Cells are named as IPython names them, `Cell In[3], line 4`.

Runs in: kernel
"""

from __future__ import annotations

import linecache
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from .messages import Exited, Lost, Raised
from .state import Failure, RankState, RunState

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]*)", line (?P<line>\d+)(?:,)? in (?P<name>.+)$', re.MULTILINE)
_LIBRARY = re.compile(r"site-packages|/lib/python3|<frozen|<string>")
_OURS = os.path.dirname(__file__)
_OUTPUT_LINES = 5
_DUMP_LINES = 110  # faulthandler writes at most 100 frames, and a few lines around them


@dataclass(frozen=True, slots=True)
class Frame:
    """One call on a stack."""

    file: str
    line: int
    name: str


def report(state: RunState) -> str:
    """The whole text of a failed run; its first line is enough to know what happened.

    Raises:
        ValueError: the run has not failed.
    """
    if state.problem is not None:
        has_begun = any(rank.pid is not None for rank in state.ranks)
        what = "the workers of {} could not be looked after" if has_begun else "{} could not be launched"
        return f"{what.format(state.name)}: {state.problem}"
    failure = state.first_failure
    if failure is None:
        raise ValueError(f"{state.name} has not failed")
    parts = [headline(state), _details(state, failure), _others(state, failure)]
    return "\n\n".join(part for part in parts if part)


def headline(state: RunState) -> str:
    """One line: the rank to blame, what happened, and where."""
    failure = state.first_failure
    if failure is None:
        return state.problem or ""
    match failure.witness:
        case Raised() as raised:
            where = f" in {_place(state, raised.location)}" if raised.location else _PHASES.get(raised.phase, "")
            said = raised.text.strip().partition("\n")[0]
            return f"rank {raised.rank} raised {raised.type_name}{where}" + (f": {said}" if said else "")
        case Exited() as exited:
            return f"rank {exited.rank} {_death(exited)}"
        case Lost() as lost:
            return f"failed on node {lost.node_rank}: {lost.text}"


_PHASES = {
    "unpacking": " while the function was being unpacked",
    "rendezvous": " while the process group was being made",
}


def _details(state: RunState, failure: Failure) -> str:
    match failure.witness:
        case Raised() as raised:
            return with_cells(raised.traceback.rstrip(), state.cells) + _early_leavers(state, failure)
        case Exited() as exited:
            lines, dump = _last_words(state.rank(exited.rank))
            said = "\n".join(f"    {line}" for line in lines)
            stood = stack_text(dump, state.cells)
            stack = f"\n\nIt stood at:\n{stood}" if stood else ""
            last = f"\n\nIts last output:\n{with_cells(said, state.cells)}" if lines else ""
            return _explain(exited) + stack + last
        case Lost():
            return "The run on that node has the whole report."


def _last_words(rank: RankState) -> tuple[list[str], str]:
    """The last lines that a dead rank printed, and the stack that `faulthandler` wrote after them in a crash."""
    lines = rank.output.lines(_OUTPUT_LINES + _DUMP_LINES)
    crash = next((index for index, line in enumerate(lines) if line.startswith("Fatal Python error")), len(lines))
    return lines[max(0, crash - _OUTPUT_LINES) : crash], "\n".join(lines[crash:])


def _death(exited: Exited) -> str:
    code = exited.exitcode
    if code >= 0:
        return f"ended with exit code {code} before the function returned"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "an unknown signal"
    return f"was killed by {name} (signal {-code})"


def _explain(exited: Exited) -> str:
    held = f" It had held up to {_size(exited.memory)} of memory." if exited.memory else ""
    match -exited.exitcode:
        case signal.SIGKILL if exited.oom_kills:
            return f"The system's out-of-memory killer ended it: memory ran out.{held} {_LESS_MEMORY}"
        case signal.SIGKILL:
            return f"Somebody killed it, or memory ran out and the system did.{held} {_LESS_MEMORY}"
        case signal.SIGSEGV | signal.SIGBUS | signal.SIGABRT | signal.SIGFPE | signal.SIGILL:
            return f"The process crashed in compiled code.{held}"
        case code if code > 0:
            return f"Nothing in ddpnb sent that signal.{held}"
        case _:
            return "The process left without a word: os._exit(), or a library that ends the process."


_LESS_MEMORY = "A smaller batch, fewer workers or fewer DataLoader workers need less."


def _early_leavers(state: RunState, failure: Failure) -> str:
    if not failure.is_echo:
        return ""
    gone = [str(rank.rank) for rank in state.ranks if rank.returned]
    if not gone:
        return ""
    who = f"Rank {gone[0]} has" if len(gone) == 1 else f"Ranks {', '.join(gone)} have"
    return (
        f"\n\n{who} already returned from the function, while rank {failure.rank} waited for all ranks in a "
        "collective: every rank must make the same collective calls."
    )


def _others(state: RunState, failure: Failure) -> str:
    lines = [f"  rank {rank.rank}: {_doing(state, rank)}" for rank in state.ranks if rank.rank != failure.rank]
    return "\n".join(("Meanwhile", *lines)) if lines else ""


def _doing(state: RunState, rank: RankState) -> str:
    if rank.raised:
        raised = rank.raised
        what = "raised in its wake" if raised.is_echo else "raised as well"
        where = f" in {_place(state, raised.location)}" if raised.location else ""
        return f"{what} {raised.type_name}{where}: {raised.text.strip().partition(chr(10))[0]}"
    if rank.returned:
        return "had returned"
    if rank.exited and not rank.exited.ended_by_us:
        return _death(rank.exited)
    if rank.stack:
        return _standing(state, rank.stack)
    return _BUSY[rank.phase]


_BUSY = {
    "starting": "was starting",
    "unpacking": "was unpacking the function",
    "rendezvous": "was making the process group",
    "running": "was in the function; it did not say where",
    "threads": "had finished the function and waited for its threads",
    "leaving": "was leaving",
}


def _standing(state: RunState, stack: str) -> str:
    frames = stack_frames(stack)
    innermost = frames[0]
    own = next((frame for frame in frames if not _LIBRARY.search(frame.file)), None)
    if own is None:
        return f"stood in {innermost.name}()"
    source = linecache.getline(own.file, own.line).strip()
    inside = "" if own is innermost else f"{_call(frames, own)}(), "
    code = f"\n      {source}" if source else ""
    return f"stood in {inside}{_place(state, f'{own.file}:{own.line}')}, in {own.name}{code}"


def _call(frames: list[Frame], own: Frame) -> str:
    """What the user's line called, as far as the stack tells; wrappers of torch are passed over."""
    called = frames[: frames.index(own)]
    names = [frame.name for frame in called if frame.name not in ("wrapper", "inner", "decorate_context")]
    return names[-1] if names else called[-1].name


def stack_frames(stack: str) -> list[Frame]:
    """The frames of a faulthandler dump, innermost first, without those of ddpnb and of the process's start."""
    frames = [Frame(found["file"], int(found["line"]), found["name"]) for found in _FRAME.finditer(stack)]
    own = [index for index, frame in enumerate(frames) if frame.file.startswith(_OURS)]
    # The last of ours called the function; what comes after it started the process.
    kept = frames[: own[-1]] if own else frames
    return [frame for frame in kept if not frame.file.startswith(_OURS)] or frames[:1]


def stack_text(stack: str, cells: Mapping[str, str]) -> str:
    """A faulthandler dump as a traceback: outermost call first, with source lines, cells by name."""
    lines = []
    for frame in reversed(stack_frames(stack)):
        lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.name}')
        source = linecache.getline(frame.file, frame.line).strip()
        if source:
            lines.append(f"    {source}")
    return with_cells("\n".join(lines), cells)


def with_cells(text: str, cells: Mapping[str, str]) -> str:
    """`text` with the file names of cells replaced: `File "/tmp/…/123.py", line 4` → `Cell In[3], line 4`."""
    for file, cell in cells.items():
        text = text.replace(f'File "{file}"', cell).replace(f"{file}:", f"{cell}, line ")
    return text


def _place(state: RunState, location: str | None) -> str:
    if location is None:
        return "an unknown place"
    file, _, line = location.rpartition(":")
    return f"{state.cells.get(file, os.path.basename(file))}, line {line}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
