"""Stopping all ranks of a node at the same step, without a collective.

Kernel and workers share one page of memory and one lock per rank, a byte range of the page's own descriptor. At each
check a rank, under its lock, counts the check and reads `stop_at`. To stop, the kernel takes *all* locks, writes
`stop_at` = the highest count + 1 and lets go: no rank has passed that check, and each sees the value when it gets
there. It cannot race, and costs a rank two system calls.

Record locks belong to a process and are freed by the operating system with it, a SIGKILL included: nothing is left
behind and a dead rank blocks nobody. The page carries a few more numbers of each rank that must outlive it.

Runs in: both
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, lockf

_STOP_AT, _HOLD = 0, 1  # indices of the kernel's numbers; 0 there: nobody is to stop, nobody is to wait
_SHARED = 2
_CHECKS, _INTERVAL, _MEMORY, _OWN = 0, 1, 2, 3  # each rank's numbers, and how many they are

_NOTE_EVERY = 8
"""Checks between two measurements of a rank's interval; the first few are measured each, they may be slow ones."""
_LOCK_PATIENCE = 1.0
"""Seconds the kernel waits for one rank's lock; a rank holds it for microseconds, unless it was stopped by SIGSTOP."""
_YIELD = 0.001
"""Seconds that a rank leaves its lock alone while the kernel wants it: one that asks in a tight loop always has it."""


class Page:
    """The shared page of one run. Numbers are int64; one rank writes its own, the kernel writes `stop_at`.

    Args:
        descriptor: an open file of at least `size(world_size)` bytes, owned by the page.
        num_ranks: how many ranks share it.
    """

    def __init__(self, descriptor: int, num_ranks: int) -> None:
        self.descriptor = descriptor
        self.num_ranks = num_ranks
        self._map = mmap.mmap(descriptor, _size(num_ranks))
        self._numbers = memoryview(self._map).cast("q")
        self._last_noted = (0, 0.0)  # (check, its time), from which the interval is measured

    @classmethod
    def create(cls, num_ranks: int) -> Page:
        """A new page, all zeros, in memory that no path leads to."""
        descriptor = anonymous_file("ddpnb-page")
        os.ftruncate(descriptor, _size(num_ranks))
        return cls(descriptor, num_ranks)

    def close(self) -> None:
        """Let go of the memory and the descriptor."""
        self._numbers.release()
        self._map.close()
        os.close(self.descriptor)

    # ---- a rank's side

    def check(self, local_rank: int) -> bool:
        """Count one check of this rank; whether all ranks are to stop at it (or were at an earlier one)."""
        # Between two training steps all this code is cold, and every line of it costs.
        own, numbers, descriptor = _SHARED + local_rank * _OWN, self._numbers, self.descriptor
        if numbers[_HOLD]:
            time.sleep(_YIELD)
        lockf(descriptor, LOCK_EX, 1, local_rank)
        numbers[own] = count = numbers[own] + 1
        stop_at = numbers[_STOP_AT]
        lockf(descriptor, LOCK_UN, 1, local_rank)
        if count < _NOTE_EVERY or not count % _NOTE_EVERY:
            self._note_interval(own, count)
        return 0 < stop_at <= count

    def _note_interval(self, own: int, count: int) -> None:
        now = time.monotonic()
        last_count, last = self._last_noted
        if 0 < last_count < count:
            self._numbers[own + _INTERVAL] = int((now - last) / (count - last_count) * 1e6)
        self._last_noted = count, now

    def num_checks(self, local_rank: int) -> int:
        """How often this rank has asked; 0 for a function that never does."""
        return self._numbers[self._own(local_rank) + _CHECKS]

    def note_memory(self, local_rank: int, peak: int) -> None:
        """Leave word of the most bytes this rank has held, for whoever finds it killed."""
        self._numbers[self._own(local_rank) + _MEMORY] = peak

    # ---- the kernel's side

    def ask_to_stop(self) -> None:
        """Make every rank's next common check say stop. Again: no effect."""
        if self._numbers[_STOP_AT]:
            return
        self._numbers[_HOLD] = 1
        locked = [rank for rank in range(self.num_ranks) if self._lock(rank)]
        try:
            counts = [self._numbers[self._own(rank) + _CHECKS] for rank in range(self.num_ranks)]
            # A rank whose lock could not be had stands still within its check, which may or may not be counted yet.
            self._numbers[_STOP_AT] = max(counts) + (1 if len(locked) == self.num_ranks else 2)
        finally:
            self._numbers[_HOLD] = 0
            for rank in locked:
                lockf(self.descriptor, LOCK_UN, 1, rank)

    def check_interval(self, local_rank: int) -> float | None:
        """Mean seconds between this rank's last checks; None before the second."""
        return self._numbers[self._own(local_rank) + _INTERVAL] / 1e6 or None

    def memory(self, local_rank: int) -> int | None:
        """Most bytes this rank had held when it last left word; None where it never did."""
        return self._numbers[self._own(local_rank) + _MEMORY] or None

    def _own(self, local_rank: int) -> int:
        return _SHARED + local_rank * _OWN

    def _lock(self, local_rank: int) -> bool:
        deadline = time.monotonic() + _LOCK_PATIENCE
        while True:
            try:
                lockf(self.descriptor, LOCK_EX | LOCK_NB, 1, local_rank)
            except OSError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(_YIELD / 10)
            else:
                return True


def anonymous_file(name: str) -> int:
    """Open a file that no path leads to, in memory on Linux, else an unlinked temporary one; its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    descriptor, path = tempfile.mkstemp(prefix=f"{name}-")
    os.unlink(path)
    return descriptor


def _size(num_ranks: int) -> int:
    return 8 * (_SHARED + num_ranks * _OWN)
