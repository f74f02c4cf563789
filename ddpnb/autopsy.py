"""What is known of a failure: the rank to blame, its traceback, what the others did, its last values, cause and cure.

Pure: state -> an `Autopsy`, in parts that a view can lay out; `report` is their text. Cells are named as IPython names
them, `Cell In[3], line 4`.

Runs in: kernel
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

from .cures import Cure, likely_cause
from .messages import Exited, Lost, PhaseName, Raised
from .series import Series
from .stacks import Standing, place, ranks_text, stack_text, standing, with_cells
from .state import Failure, RankState, RunState

_OUTPUT_LINES = 5
_DUMP_LINES = 110  # faulthandler writes at most 100 frames, and a few lines around them
_SOURCE_OF_TORCH = re.compile(r"^\[/[^\]]*\.cc:\d+\] ")
"""Where in the library a message was made, which gloo begins with."""
_GUESS_OF_GLOO = " This is typically caused by a remote worker hanging"


@dataclass(frozen=True, slots=True, kw_only=True)
class Autopsy:
    """A failure in parts."""

    rank: int | None
    """Global rank to blame; None where the run could not be launched, or not looked after."""
    headline: str
    """One line: who, what, where."""
    place: str | None
    """"Cell In[7], line 12", of the innermost line that is the user's; None where that is not known."""
    source: str | None
    """That line itself."""
    details: str
    """The traceback in full; of a death without a word what is known of it, and the rank's last output."""
    others: tuple[str, ...]
    """What the other ranks were doing, those that did the same together: "rank 0: stood in barrier(), …"."""
    values: tuple[str, ...]
    """What was logged last, a name each: "loss 0.31 at step 40; nan from step 41 on, first on rank 1"."""
    cure: Cure | None
    """None where the kind is not known."""


def autopsy(state: RunState) -> Autopsy:
    """What is known of the failure.

    Raises:
        ValueError: the run has not failed.
    """
    failure = state.first_failure
    if state.problem is not None or failure is None:
        return _of_launch(state)
    where, source = _failing_line(state, failure)
    return Autopsy(
        rank=failure.rank,
        headline=headline(state),
        place=where,
        source=source,
        details=_details(state, failure),
        others=tuple(_others(state, failure)),
        values=tuple(last_values(state, failure.rank)),
        cure=likely_cause(state, failure),
    )


def headline(state: RunState) -> str:
    """One line: the rank to blame, what happened, and where."""
    failure = state.first_failure
    if failure is None:
        return state.problem or ""
    match failure.witness:
        case Raised() as raised:
            where = f" in {place(state.cells, raised.location)}" if raised.location else _PHASES.get(raised.phase, "")
            said = first_line(raised)
            return f"rank {raised.rank} raised {raised.type_name}{where}" + (f": {said}" if said else "")
        case Exited() as exited:
            return f"rank {exited.rank} {_death(exited)}"
        case Lost() as lost:
            return f"failed on node {lost.node_rank}: {lost.text}"


_PHASES: dict[PhaseName, str] = {
    "unpacking": " while the function was being unpacked",
    "rendezvous": " while the process group was being made",
}


def first_line(raised: Raised) -> str:
    """What an exception says, in one line."""
    said = _SOURCE_OF_TORCH.sub("", raised.text.strip().partition("\n")[0])
    return said.partition(_GUESS_OF_GLOO)[0]


def _of_launch(state: RunState) -> Autopsy:
    if state.problem is None:
        raise ValueError(f"{state.name} has not failed")
    has_begun = any(rank.pid is not None for rank in state.ranks)
    what = "the workers of {} could not be looked after" if has_begun else "{} could not be launched"
    said = f"{what.format(state.name)}: {state.problem}"
    return Autopsy(rank=None, headline=said, place=None, source=None, details="", others=(), values=(), cure=None)


# ---- the rank to blame


def _failing_line(state: RunState, failure: Failure) -> tuple[str | None, str | None]:
    match failure.witness:
        case Raised(location=str(location)) as raised:
            return place(state.cells, location), _source_in(raised.traceback, location)
        case Exited() as exited:
            _, dump = _last_words(state.rank(exited.rank))
            stands = standing(state, state.rank(exited.rank), dump)
            return stands.place, stands.source
        case _:
            return None, None


def _source_in(traceback: str, location: str) -> str | None:
    """The line as the traceback shows it: the rank had its text, whoever reads a folder has not."""
    file, _, number = location.rpartition(":")
    found = re.findall(rf'File "{re.escape(file)}", line {number}\b.*\n +(\S.*)', traceback)
    return found[-1].rstrip() if found else None


def _details(state: RunState, failure: Failure) -> str:
    match failure.witness:
        case Raised() as raised:
            return with_cells(raised.traceback.rstrip(), state.cells)
        case Exited() as exited:
            lines, dump = _last_words(state.rank(exited.rank))
            said = "\n".join(f"    {line}" for line in lines)
            stood = stack_text(dump, state.cells)
            stack = f"It stood at:\n{stood}" if stood else ""
            last = f"Its last output:\n{with_cells(said, state.cells)}" if lines else ""
            return "\n\n".join(part for part in (_explain(exited), stack, last) if part)
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
        case signal.SIGKILL:
            return f"Nothing in ddpnb sent that signal.{held}"
        case signal.SIGSEGV | signal.SIGBUS | signal.SIGABRT | signal.SIGFPE | signal.SIGILL:
            return f"The process crashed in compiled code.{held}"
        case code if code > 0:
            return f"Nothing in ddpnb sent that signal.{held}"
        case _:
            return "The process left without a word: os._exit(), or a library that ends the process."


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


# ---- the others


def _others(state: RunState, failure: Failure) -> Iterable[str]:
    groups: dict[str, list[int]] = {}  # {what they did: ranks}
    for rank in state.ranks:
        if rank.rank != failure.rank:
            groups.setdefault(doing(state, rank), []).append(rank.rank)
    return (f"{ranks_text(ranks)}: {words}" for words, ranks in groups.items())


def doing(state: RunState, rank: RankState) -> str:
    """What a rank was doing when last heard of."""
    if rank.raised:
        raised = rank.raised
        what = "raised in its wake" if raised.is_echo else "raised as well"
        where = f" in {place(state.cells, raised.location)}" if raised.location else ""
        return f"{what} {raised.type_name}{where}: {first_line(raised)}"
    if rank.returned:
        return "had returned"
    if rank.exited and not rank.exited.ended_by_us:
        return _death(rank.exited)
    if rank.stack:
        return _stood(standing(state, rank))
    return f"was {BUSY[rank.phase]}" + ("; it did not say where" if rank.phase == "running" else "")


BUSY: dict[PhaseName, str] = {
    "starting": "starting",
    "unpacking": "unpacking the function",
    "rendezvous": "making the process group",
    "running": "in the function",
    "threads": "waiting for threads that the function had left",
    "leaving": "leaving",
}
"""What a rank is busy with."""


def _stood(stands: Standing) -> str:
    if stands.place is None:
        return f"stood in {stands.where}"
    inside = f"{stands.call}(), " if stands.call else ""
    return f"stood in {inside}{stands.lines}"


# ---- the last values


def last_values(state: RunState, rank: int) -> Iterable[str]:
    """The loss as it was logged last, and whatever ceased to be a number, with the step at which it did."""
    history = {name: dict(ranks) for name, ranks in list(state.history.items())}
    main = max(history, key=lambda name: ("loss" in name, _num_points(history[name])), default=None)
    for name, ranks in history.items():
        begun = {each: first for each, series in ranks.items() if (first := _first_bad(series)) is not None}
        if name == main or begun:
            own = ranks.get(rank) or next(iter(ranks.values()))
            yield f"{name} {'; '.join([*_newest_finite(own), *_since(begun, state.world_size)])}"


def _num_points(ranks: dict[int, Series]) -> int:
    return sum(series.num_points for series in ranks.values())


def _newest_finite(series: Series) -> Iterable[str]:
    steps, values, _ = series.tail(1) if not _has_bad(series) else series.columns()
    for step, value in zip(reversed(steps), reversed(values), strict=True):
        if isfinite(value):
            return [f"{value:.4g} at step {step:,}"]
    return []


def _since(begun: dict[int, tuple[int, float, bool]], world_size: int) -> Iterable[str]:
    """Where a value ceased to be finite, and on whom first; nothing where it never did."""
    if not begun:
        return
    step, value, stays = min(begun.values(), key=lambda first: first[0])
    ranks = [rank for rank, first in begun.items() if first[0] == step]
    whose = f", first on {ranks_text(ranks)}" if world_size > 1 else ""
    yield (f"{value} from step {step:,} on" if stays else f"{value} at step {step:,}") + whose


def _has_bad(series: Series) -> bool:
    return any(bucket.num_bad for bucket in series.buckets)


def _first_bad(series: Series) -> tuple[int, float, bool] | None:
    """The first step whose value is not finite, that value, and whether all later ones are none either."""
    if not _has_bad(series):
        return None
    steps, values, _ = series.columns()
    index = next((index for index, value in enumerate(values) if not isfinite(value)), None)
    if index is None:
        return None  # it was thinned out
    return steps[index], values[index], not any(map(isfinite, values[index:]))
