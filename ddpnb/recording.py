"""A run that is not this kernel's, as its folder tells it: finished, interrupted, or still going on elsewhere.

Nothing is executed and no pickle is read: the journal's messages are folded as they were while the run went on.

Runs in: kernel
"""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path

from . import lock
from .draw import words
from .folder import JOURNAL, absolute, describe, is_run, output_of, runs_in
from .journal import Reader
from .messages import AnyMessage, Interrupted, Noted, Output, RankMessage, Recalled
from .state import OUTPUT_LIMIT, RunState, fold, new_state


def find(path: str | os.PathLike[str]) -> Path:
    """The folder of a run: `path` itself, or that of the newest run in it.

    Raises:
        FileNotFoundError: there is none.
    """
    found = absolute(path)
    if is_run(found):
        return found
    runs = runs_in(found)
    if not runs:
        what = "is no run's folder, and there is none in it: no run.json" if found.exists() else "does not exist"
        raise FileNotFoundError(f"{os.fspath(path)!r} {what}")
    return runs[0]


def read_state(run: Path) -> RunState:
    """The state of a recorded run, as far as its folder tells.

    Raises:
        ValueError, OSError: as `describe`.
    """
    description = describe(run)
    age = time.time() - datetime.fromisoformat(description["started"]).timestamp()
    started = time.monotonic() - age
    ranks = description["ranks"]
    state = new_state(
        description["name"],
        description["world_size"],
        backend=description["backend"],
        started=started,
        cells=description["cells"],
        here=range(ranks[0], ranks[-1] + 1),
        folder=str(run),
    )
    held = lock.holder(run)  # before the journal is read: a run that ends meanwhile is not taken for interrupted
    state, last = _replayed(state, run)
    for rank in state.ranks:
        _add_output(state, run, rank.rank)
    if state.ended is not None:
        return state
    if held is not None and held.may_live:
        return _noted(state, f"a snapshot: it goes on in {held}")
    if held is not None:
        state = _noted(state, "its kernel is gone, its workers are still saving")
    return fold(state, Interrupted(time=last))


def _replayed(state: RunState, run: Path) -> tuple[RunState, float]:
    """The state after all messages of the journal, and the time of the last."""
    reader = Reader(run / JOURNAL, state.started)
    last, num_strange = state.started, 0
    try:
        for message in reader:
            if _is_of(state, message):
                state, last = fold(state, message), max(last, message.time)
            else:
                num_strange += 1
    except OSError as error:
        return _noted(state, f"{words.path(run / JOURNAL)} cannot be read: {error.strerror}"), last
    if reader.num_skipped or num_strange:
        skipped = words.count(reader.num_skipped + num_strange, "line")
        state = _noted(state, f"{skipped} of {words.path(run / JOURNAL)} skipped: damaged, or of another version")
    return state, last


def _is_of(state: RunState, message: AnyMessage) -> bool:
    """Whether the message is about a rank that the state has; what was recalled may be of others."""
    if not isinstance(message, RankMessage) or isinstance(message, Recalled):
        return True
    return state.ranks[0].rank <= message.rank <= state.ranks[-1].rank


def _add_output(state: RunState, run: Path, rank: int) -> None:
    path = output_of(run, rank)
    try:
        with open(path, "rb") as file:
            begin = max(0, os.fstat(file.fileno()).st_size - OUTPUT_LIMIT)
            file.seek(begin)
            text = file.read().decode(errors="replace")
    except OSError:
        return  # it printed nothing
    fold(state, Output(rank=rank, time=state.started, text=text))
    state.rank(rank).output.num_dropped += begin


def _noted(state: RunState, text: str) -> RunState:
    return fold(state, Noted(time=state.started, text=text))
