"""Stopping all ranks of a node at the same step, without a collective and without a system call.

Kernel and workers share one page of memory. At each check a rank *first* counts it, *then* looks at `hold`, and at last
reads `stop_at`. To stop, the kernel raises `hold`, waits until that is seen everywhere, writes `stop_at` = the highest
count + 1, waits again, and lowers `hold`. Whatever a rank does meanwhile, it cannot race:

- its count was seen: then `stop_at` lies behind this check, and it meets it at a later one like all the others;
- its count was not seen: then it was written after `hold` was raised, the rank saw that, and waits for `stop_at`.

"Seen everywhere" needs no fence in the rank, only time in the kernel: a core shows its writes to the others within
microseconds, and `_SETTLE` is milliseconds. A rank that is stopped by SIGSTOP or dies holds up nobody.

The page carries a few more numbers: how often the kernel has asked for a checkpoint, which one rank reads and tells the
others, and those of each rank that must outlive it.

Runs in: both
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import time

_STOP_AT, _HOLD, _SAVES = 0, 1, 2  # indices of the kernel's numbers; 0 there: nobody is to stop, wait, or save
_SHARED = 3
_CHECKS, _INTERVAL, _MEMORY, _OWN = 0, 1, 2, 3  # each rank's numbers, and how many they are

_NOTE_EVERY = 8
"""Checks between two measurements of a rank's interval; the first few are measured each, they may be slow ones."""
_SETTLE = 0.002
"""Seconds after which what one process wrote on the page is seen by all: a thousand times what any core takes."""
_WAIT = 0.0005
"""Seconds between two looks of a rank that waits for `hold` to be lowered."""


class Page:
    """The shared page of one run. Numbers are int64; each rank writes its own, the kernel writes the shared ones.

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
        numbers, own = self._numbers, _SHARED + local_rank * _OWN
        numbers[own] = count = numbers[own] + 1
        while numbers[_HOLD]:  # looked at after the count was written: this order is what the kernel relies on
            time.sleep(_WAIT)
        if count < _NOTE_EVERY or not count % _NOTE_EVERY:
            self._note_interval(own, count)
        return 0 < numbers[_STOP_AT] <= count

    def _note_interval(self, own: int, count: int) -> None:
        now = time.monotonic()
        last_count, last = self._last_noted
        if 0 < last_count < count:
            self._numbers[own + _INTERVAL] = int((now - last) / (count - last_count) * 1e6)
        self._last_noted = count, now

    def num_checks(self, local_rank: int) -> int:
        """How often this rank has asked; 0 for a function that never does."""
        return self._numbers[self._own(local_rank) + _CHECKS]

    def num_saves_asked(self) -> int:
        """How often the kernel has asked for a checkpoint. Ranks may see it at different steps: one reads for all."""
        return self._numbers[_SAVES]

    def take_over(self) -> None:
        """Stop all ranks in the kernel's place, which is gone, perhaps in the middle of asking. Several ranks may."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
        try:
            self.ask_to_stop()
        finally:
            self._numbers[_HOLD] = 0
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    def note_memory(self, local_rank: int, peak: int) -> None:
        """Leave word of the most bytes this rank has held, for whoever finds it killed."""
        self._numbers[self._own(local_rank) + _MEMORY] = peak

    # ---- the kernel's side

    def ask_to_stop(self) -> None:
        """Make every rank's next common check say stop; takes a few milliseconds. Again: no effect."""
        numbers = self._numbers
        if numbers[_STOP_AT]:
            return
        numbers[_HOLD] = 1
        try:
            time.sleep(_SETTLE)
            numbers[_STOP_AT] = 1 + max(map(self.num_checks, range(self.num_ranks)))
            time.sleep(_SETTLE)
        finally:
            numbers[_HOLD] = 0

    def ask_to_save(self) -> None:
        """Ask for one more checkpoint."""
        self._numbers[_SAVES] += 1

    def check_interval(self, local_rank: int) -> float | None:
        """Mean seconds between this rank's last checks; None before the second."""
        return self._numbers[self._own(local_rank) + _INTERVAL] / 1e6 or None

    def memory(self, local_rank: int) -> int | None:
        """Most bytes this rank had held when it last left word; None where it never did."""
        return self._numbers[self._own(local_rank) + _MEMORY] or None

    def _own(self, local_rank: int) -> int:
        return _SHARED + local_rank * _OWN


def anonymous_file(name: str) -> int:
    """Open a file that no path leads to, in memory on Linux, else an unlinked temporary one; its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    descriptor, path = tempfile.mkstemp(prefix=f"{name}-")
    os.unlink(path)
    return descriptor


def _size(num_ranks: int) -> int:
    return 8 * (_SHARED + num_ranks * _OWN)
