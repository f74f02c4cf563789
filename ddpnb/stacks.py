"""Where a rank stands, read from what `faulthandler` wrote of its stack: the user's line, and what it waits for there.

Pure: text -> frames -> a `Standing`. Cells are named as IPython names them, `Cell In[3], line 4`.

Runs in: kernel
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Literal

from .state import RankState, RunState

HEADER = re.compile(r"^.*\(most recent call first\):$", re.MULTILINE)
"""The first line of each dump."""

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]*)", line (?P<line>\d+)(?:,)? in (?P<name>.+)$', re.MULTILINE)
_LIBRARY = re.compile(r"site-packages|/lib/python3|<frozen|<string>")
_OURS = os.path.dirname(__file__)
_LOADER = "torch/utils/data/"
_COLLECTIVE = re.compile(r"torch/distributed/|torch/nn/parallel/distributed")
_MOST_NAMED = 6  # ranks in a sentence
_MODULE = "torch/nn/modules/module.py"
_WRAPPERS = ("wrapper", "inner", "decorate_context", "_wrapped_call_impl", "_call_impl")
_LOADER_WORKER = "_worker_loop"
_BACKWARD = "_engine_run_backward"
_A_HANDLE = re.compile(r"\.wait\(")

Kind = Literal["waits", "loader", "halted", "busy", "silent"]
"""In a collective or its backward, as if for other ranks; in the DataLoader; stopped from outside; at a line of its
own; nothing is known."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One call on a stack."""

    file: str
    line: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where one process stands."""

    kind: Kind
    call: str | None = None
    """What the user's line has called, as "all_reduce"; None where the line itself is what goes on."""
    place: str | None = None
    """"Cell In[7], line 12", of the innermost line that is the user's; None where there is none."""
    function: str | None = None
    """Name of the function that this line is in."""
    source: str | None = None
    """The line itself, where its text is at hand."""
    workers: tuple[Standing, ...] = ()
    """Its DataLoader workers that are at a line of the user's."""

    @property
    def where(self) -> str:
        """Place and function in words."""
        if self.place is None:
            return f"{self.call}()" if self.call else "an unknown place"
        return f"{self.place}, in {self.function}"

    @property
    def lines(self) -> str:
        """As `where`, with the source line on one of its own below."""
        return f"{self.where}\n      {self.source}" if self.source else self.where


def standing(state: RunState, rank: RankState, stack: str | None = None) -> Standing:
    """Where a rank stood when it was last asked, or as another stack of it has it."""
    own, *others = split(stack or rank.stack or "") or [""]
    found = _standing(stack_frames(own), state.cells) if own else Standing(kind="silent")
    workers = tuple(_standing(_worker_frames(dump), state.cells) for dump in others)
    kind = found.kind
    if rank.halted:
        kind = "halted"
    elif kind == "waits" and state.world_size == 1:
        kind = "busy"  # there is nobody to wait for
    return replace(found, kind=kind, workers=tuple(worker for worker in workers if worker.place is not None))


def _standing(frames: list[Frame], cells: Mapping[str, str]) -> Standing:
    own = next((frame for frame in frames if not _LIBRARY.search(frame.file)), None)
    inner = frames if own is None else frames[: frames.index(own)]
    source = linecache.getline(own.file, own.line).strip() if own else ""
    return Standing(
        kind=_kind(frames, inner, source),
        call=_call(inner),
        place=place(cells, f"{own.file}:{own.line}") if own else None,
        function=own.name if own else None,
        source=source or None,
    )


def _kind(frames: list[Frame], inner: list[Frame], source: str) -> Kind:
    # A model within DDP computes by itself: what counts is what its innermost module does.
    innermost = list(takewhile(lambda frame: not frame.file.endswith(_MODULE), inner))
    if any(_COLLECTIVE.search(frame.file) for frame in innermost) or (inner and inner[0].name == _BACKWARD):
        return "waits"
    if any(_LOADER in frame.file for frame in frames):
        return "loader"
    return "waits" if not inner and _A_HANDLE.search(source) else "busy"


def _call(inner: list[Frame]) -> str | None:
    """What the user's line called, as far as the stack tells; wrappers of torch are passed over."""
    names = [frame.name for frame in inner if frame.name not in _WRAPPERS]
    return names[-1] if names else None


# ---- dumps


def split(text: str) -> list[str]:
    """The dumps in a text: the rank's own, and after it those of its DataLoader workers."""
    starts = [found.start() for found in HEADER.finditer(text)]
    return [text[start:end] for start, end in pairwise([*starts, len(text)])]


def is_in_loader(dump: str) -> bool:
    """Whether the process waits for batches of a DataLoader's workers, or is one of these."""
    return any(_LOADER in frame.file for frame in stack_frames(dump))


def is_of_worker(dump: str) -> bool:
    """Whether a DataLoader worker wrote it, whose stack begins with the rank's own up to the fork."""
    return f" in {_LOADER_WORKER}\n" in dump


def stack_frames(stack: str) -> list[Frame]:
    """The frames of a faulthandler dump, innermost first, without those of ddpnb and of the process's start."""
    frames = _frames(stack)
    own = [index for index, frame in enumerate(frames) if frame.file.startswith(_OURS)]
    # The last of ours called the function; what comes after it started the process.
    kept = frames[: own[-1]] if own else frames
    return [frame for frame in kept if not frame.file.startswith(_OURS)] or frames[:1]


def _worker_frames(dump: str) -> list[Frame]:
    """Those of a DataLoader worker inside of its loop; what comes after them is how it was forked."""
    frames = _frames(dump)
    end = next((index for index, frame in enumerate(frames) if frame.name == _LOADER_WORKER), len(frames))
    return [frame for frame in frames[:end] if not frame.file.startswith(_OURS)]


def _frames(stack: str) -> list[Frame]:
    return [Frame(found["file"], int(found["line"]), found["name"]) for found in _FRAME.finditer(stack)]


def stack_text(stack: str, cells: Mapping[str, str]) -> str:
    """A rank's dumps as tracebacks: outermost call first, with source lines, cells by name."""
    own, *others = split(stack) or [stack]
    parts = [_traceback(stack_frames(own), cells)]
    parts += [f"its DataLoader worker\n{_traceback(_worker_frames(dump), cells)}" for dump in others]
    return "\n".join(parts)


def _traceback(frames: list[Frame], cells: Mapping[str, str]) -> str:
    lines = []
    for frame in reversed(frames):
        lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.name}')
        source = linecache.getline(frame.file, frame.line).strip()
        if source:
            lines.append(f"    {source}")
    return with_cells("\n".join(lines), cells)


# ---- words


def with_cells(text: str, cells: Mapping[str, str]) -> str:
    """`text` with the file names of cells replaced: `File "/tmp/…/123.py", line 4` → `Cell In[3], line 4`."""
    for file, cell in cells.items():
        text = text.replace(f'File "{file}"', cell).replace(f"{file}:", f"{cell}, line ")
    return text


def ranks_text(ranks: list[int]) -> str:
    """ "rank 1", "ranks 0, 2", "ranks 0, 1, 2 and 13 more"."""
    named = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {named}{more}"


def place(cells: Mapping[str, str], location: str) -> str:
    """A "file:line" in words: "Cell In[3], line 4"."""
    file, _, line = location.rpartition(":")
    return f"{cells.get(file, os.path.basename(file))}, line {line}"
