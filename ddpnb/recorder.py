"""Writes a run into its folder while it goes on: the journal, and what the ranks print.

A thread of its own writes, so that a slow disk, or one that hangs, holds up nobody who has to notice a death. Lines go
to the operating system as soon as they are there: a kernel that is killed takes nothing along that was said before.

When a run goes on from a checkpoint, the curve goes on from there too: what the earlier run had logged up to that step
is read from its journal, told, and written into this one's, which is complete by itself then.

Runs in: kernel
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from . import journal
from .draw import words
from .folder import JOURNAL, encoded, note_resumed, output_of
from .messages import AnyMessage, Ended, Met, Metrics, Noted, Output, Recalled, Resumed, Started
from .series import Series
from .state import RunState, fold, new_state

OUTPUT_LIMIT = 100_000_000
"""Characters kept of what a rank prints."""
_PATIENCE = 10.0
"""Seconds that the end of a run waits for the disk."""


class Recorder:
    """The thread that writes one run down, from its making until `close`.

    Args:
        run: the run's folder.
        state: the run's, before any message.
        say: takes what the recorder has to say itself, in its own thread; it has written it already.
    """

    def __init__(self, run: Path, state: RunState, say: Callable[[AnyMessage], None]) -> None:
        self._run = run
        self._started = state.started
        self._ranks: Sequence[int] = [each.rank for each in state.ranks]
        self._say = say
        self._queue: queue.SimpleQueue[AnyMessage | None] = queue.SimpleQueue()
        self._num_printed: dict[int, int] = {}  # {rank: characters told}
        self._files: dict[Path, _File] = {}
        self._has_failed = False
        self._has_recalled = False
        self.tell(*(Noted(time=state.started, text=note) for note in state.notes))
        self._thread = threading.Thread(target=self._write_all, name=f"ddpnb-record-{state.name}", daemon=True)
        self._thread.start()

    def tell(self, *messages: AnyMessage) -> None:
        """Have the messages written; never waits."""
        for message in messages:
            kept = self._within_limit(message) if isinstance(message, Output) else message
            if kept is not None:
                self._queue.put(kept)

    def _within_limit(self, message: Output) -> Output | None:
        # Counted here, and not in the thread: what waits for a disk that hangs is bounded as well.
        before = self._num_printed.get(message.rank, 0)
        self._num_printed[message.rank] = before + len(message.text)
        room = OUTPUT_LIMIT - before
        if room >= len(message.text):
            return message
        if room <= 0:
            return None
        note = f"\n[the rest is not kept: more than {OUTPUT_LIMIT:,} characters]\n"
        return replace(message, text=message.text[:room] + note)

    def close(self, last: Ended) -> None:
        """Write what is left, and let go of the files; the thread is gone then, unless the disk hangs."""
        self._queue.put(last)
        self._queue.put(None)
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            self._note(f"{words.path(self._run)} could not be written within {_PATIENCE:.0f} s: its end is missing")

    # ---- in the thread

    def _write_all(self) -> None:
        batch: list[AnyMessage | None] = []
        while None not in batch:
            batch = self._next()
            self._write([message for message in batch if message is not None])
        for file in self._files.values():
            file.close()

    def _next(self) -> list[AnyMessage | None]:
        """All that has been told and not been written; waits for the first."""
        batch = [self._queue.get()]
        while not self._queue.empty():
            batch.append(self._queue.get())
        return batch

    def _write(self, messages: Iterable[AnyMessage]) -> None:
        lines: list[str] = []
        printed: dict[int, list[str]] = {}  # {rank: texts}
        for message in messages:
            if isinstance(message, Output):
                printed.setdefault(message.rank, []).append(message.text)
                continue
            lines.extend(journal.lines(message, self._started))
            if isinstance(message, Met):
                self._ranks = range(message.first_rank, message.first_rank + message.num_ranks)
            if isinstance(message, Resumed) and not self._has_recalled:
                self._has_recalled = True
                lines.extend(self._recall(message))
        self._append(self._run / JOURNAL, "".join(lines))
        for rank, texts in printed.items():
            self._append(output_of(self._run, rank), "".join(texts))

    def _append(self, path: Path, text: str) -> None:
        if not text:
            return
        try:
            if path not in self._files:
                self._files[path] = _File(path)
            self._files[path].append(encoded(text))
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        # What comes next is tried all the same: there may be room again.
        if not self._has_failed:
            self._has_failed = True
            reason = error.strerror or error
            self._note(f"{words.path(self._run)} cannot be written: {reason}. The run goes on, its record has gaps")

    def _note(self, text: str) -> Noted:
        note = Noted(time=time.monotonic(), text=text)
        self._say(note)
        return note

    # ---- going on from an earlier run

    def _recall(self, resumed: Resumed) -> Iterator[str]:
        """Tell what the earlier run had logged, and the lines that say so."""
        try:
            note_resumed(self._run, resumed.path)
        except (OSError, ValueError) as error:
            self._fail(error if isinstance(error, OSError) else OSError(str(error)))
        earlier = Path(resumed.path).parent.parent / JOURNAL
        reader = journal.Reader(earlier, 0.0)
        try:
            # Steps are counted from 0: after so many, the last one's number is one less.
            found = list(recalled(reader, resumed.step - 1, self._ranks, self._started))
        except OSError as error:
            yield self._noted_line(f"the curve begins here: {words.path(earlier)} cannot be read: {error.strerror}")
            return
        if reader.num_skipped:
            skipped = words.count(reader.num_skipped, "line")
            yield self._noted_line(f"{skipped} of {words.path(earlier)} skipped: damaged, or of another version")
        for message in found:
            self._say(message)
            yield from journal.lines(message, self._started)

    def _noted_line(self, text: str) -> str:
        return "".join(journal.lines(self._note(text), self._started))


class _File:
    """A file that is only ever appended to, in whole lines even after an append that failed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._is_torn = False

    def append(self, data: bytes) -> None:
        """Hand the data to the operating system.

        Raises:
            OSError: the disk is full, or the file has been removed.
        """
        if not os.fstat(self._file.fileno()).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "it has been removed", os.fspath(self._path))
        rest = memoryview(b"\n" + data if self._is_torn else data)
        self._is_torn = True
        while rest:
            rest = rest[self._file.write(rest) :]
        self._is_torn = False

    def close(self) -> None:
        """Let go of it."""
        self._file.close()


def recalled(
    messages: Iterable[AnyMessage], last_step: int, ranks: Sequence[int], launched: float
) -> Iterator[Recalled]:
    """What an earlier run had logged up to a step, for the run that goes on from there.

    Times are moved so that the last of them falls on the new run's launch: the curve has no gap for the time between.
    Where the ranks are others than they were, each of them goes on from the mean of those that there were.

    Args:
        messages: of the earlier run.
        last_step: number of the last step before the checkpoint; what was logged after it will be logged again.
        ranks: of the new run.
        launched: monotonic time of the new run's launch.
    """
    state, before = new_state("", 1, backend=None, started=0.0), set()
    for message in messages:
        if isinstance(message, Metrics | Recalled):
            state = fold(state, message)
        elif isinstance(message, Started):
            before.add(message.rank)
    found = {
        (name, rank): points
        for name, series in state.history.items()
        for rank, points in _on_ranks(ranks, before, {rank: _until(last_step, own) for rank, own in series.items()})
        if len(points.steps)
    }
    ends = [points.times.max() for points in found.values()]
    for (name, rank), points in found.items():
        yield Recalled(
            rank=rank,
            time=launched,
            name=name,
            steps=points.steps.tobytes(),
            values=points.values.tobytes(),
            times=(points.times + (launched - max(ends))).tobytes(),
        )


class _Points(NamedTuple):
    steps: npt.NDArray[np.int64]  # (points,)
    values: npt.NDArray[np.float64]  # (points,)
    times: npt.NDArray[np.float64]  # (points,)


def _until(last_step: int, series: Series) -> _Points:
    steps, values, times = map(np.asarray, series.columns())
    kept = steps <= last_step
    return _Points(steps[kept], values[kept], times[kept])


def _on_ranks(ranks: Sequence[int], before: set[int], points: Mapping[int, _Points]) -> Iterable[tuple[int, _Points]]:
    if before == set(ranks) or len(points) == 1:
        return points.items()
    mean = _mean(list(points.values()))
    return [(rank, mean) for rank in ranks]


def _mean(parts: Sequence[_Points]) -> _Points:
    """At each step the mean over the ranks that logged it there."""
    steps, where = np.unique(np.concatenate([part.steps for part in parts]), return_inverse=True)
    num = np.bincount(where)
    values, times = (np.concatenate([part[column] for part in parts]) for column in (1, 2))
    return _Points(steps, np.bincount(where, values) / num, np.bincount(where, times) / num)
