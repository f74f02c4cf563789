"""Stopping, pausing and steering all ranks of a node at the same step, without a collective or a system call.

Kernel and workers share one page of memory. At each check a rank *first* counts it, *then* looks at `hold`, and at last
reads `look_at`, the first check at which it is to look further. To stop, the kernel raises `hold`, waits until that is
seen everywhere, writes `stop_at` = the highest count + 1, waits again, and lowers `hold`. Whatever a rank does
meanwhile, it cannot race:

- its count was seen: then `stop_at` lies behind this check, and it meets it at a later one like all the others;
- its count was not seen: then it was written after `hold` was raised, the rank saw that, and waits for `stop_at`.

"Seen everywhere" needs no fence in the rank, only time in the kernel: a core shows its writes to the others within
microseconds, and `_SETTLE` is milliseconds. A rank that is stopped by SIGSTOP or dies holds up nobody.

A pause and changed settings are asked for in the same way. In the check `pause_at` a rank waits until that is cleared,
so that nobody has passed it: as long as there is a pause, all that is asked counts from this very check. Settings are
bytes beside the numbers; they are written anew only when all ranks have taken those before.

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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# Indices of the kernel's numbers, one cache line of them; 0 there: nothing is asked.
_LOOK_AT, _HOLD, _SAVES, _STOP_AT, _PAUSE_AT, _SET_AT, _VERSION, _LENGTH = range(8)
_SHARED = 8
_CHECKS, _INTERVAL, _MEMORY, _TAKEN, _OWN = range(5)  # each rank's numbers, and how many they are

SETTINGS_ROOM = 8192
"""Bytes of settings that a page can hold."""

_NOTE_EVERY = 8
"""Checks between two measurements of a rank's interval; the first few are measured each, they may be slow ones."""
_SETTLE = 0.002
"""Seconds after which what one process wrote on the page is seen by all: a thousand times what any core takes."""
_WAIT = 0.0005
"""Seconds between two looks of a rank that waits for `hold` to be lowered."""
_REST = 0.01
"""Seconds between two looks of a rank that stands in a pause, which may last for hours."""


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
        """Count one check of this rank; whether the kernel has asked for something by now, the same on all ranks."""
        # Between two training steps all this code is cold, and every line of it costs.
        numbers, own = self._numbers, _SHARED + local_rank * _OWN
        numbers[own] = count = numbers[own] + 1
        while numbers[_HOLD]:  # looked at after the count was written: this order is what the kernel relies on
            time.sleep(_WAIT)
        if count < _NOTE_EVERY or not count % _NOTE_EVERY:
            self._note_interval(own, count)
        return 0 < numbers[_LOOK_AT] <= count

    def is_to_stop(self, local_rank: int) -> bool:
        """Whether all ranks are to stop at the check in which this one is (or were at an earlier one)."""
        return 0 < self._numbers[_STOP_AT] <= self.num_checks(local_rank)

    def is_to_pause(self, local_rank: int) -> bool:
        """Whether this rank is to stay in its check, as all do: nobody passes it before the pause is over."""
        return 0 < self._numbers[_PAUSE_AT] <= self.num_checks(local_rank) and not self.is_to_stop(local_rank)

    def rest(self, local_rank: int) -> None:
        """Wait a moment in a pause, which does not count as an interval between two checks."""
        time.sleep(_REST)
        self._last_noted = self.num_checks(local_rank), time.monotonic()

    def take_settings(self, local_rank: int) -> bytes | None:
        """The settings that hold from the check in which this rank is; None where it has taken them, or none do."""
        numbers, own = self._numbers, self._own(local_rank)
        version = numbers[_VERSION]  # before `set_at`, which the kernel clears before it writes another
        if version == numbers[own + _TAKEN] or not 0 < numbers[_SET_AT] <= numbers[own]:
            return None
        begin = _room(self.num_ranks)
        packed = self._map[begin : begin + numbers[_LENGTH]]
        numbers[own + _TAKEN] = version
        return packed

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
        """Make every rank's next common check say stop; takes a few milliseconds. Again: no effect.

        In a pause that check is the one in which the ranks stand: they make no step more.
        """
        if not self._numbers[_STOP_AT]:
            with self._deciding() as check:
                self._numbers[_STOP_AT] = check
        self.unpause()

    def ask_to_pause(self) -> None:
        """Make all ranks stay in their next common check; takes a few milliseconds. Again, or at a stop: no effect."""
        if not self._numbers[_STOP_AT] and not self._numbers[_PAUSE_AT]:
            with self._deciding() as check:
                self._numbers[_PAUSE_AT] = check

    def unpause(self) -> None:
        """Let all ranks go on."""
        self._numbers[_PAUSE_AT] = 0
        self._point()

    def offer_settings(self, packed: bytes, version: int) -> None:
        """Have all ranks take these bytes in their next common check; takes a few milliseconds.

        Those before must have been taken by all: a rank might read both mixed, or some earlier than others.

        Args:
            packed: at most `SETTINGS_ROOM` bytes.
            version: tells them from those before; from 1.
        """
        numbers, begin = self._numbers, _room(self.num_ranks)
        numbers[_SET_AT] = 0
        self._map[begin : begin + len(packed)] = packed
        numbers[_LENGTH], numbers[_VERSION] = len(packed), version
        with self._deciding() as check:
            numbers[_SET_AT] = check

    def have_taken(self, local_ranks: Iterable[int]) -> bool:
        """Whether these ranks have what was offered last. If so, nobody has to look for it any more."""
        numbers = self._numbers
        if any(numbers[self._own(each) + _TAKEN] != numbers[_VERSION] for each in local_ranks):
            return False
        numbers[_SET_AT] = 0
        self._point()
        return True

    @contextmanager
    def _deciding(self) -> Iterator[int]:
        """Hold the ranks while something is asked of them; gives their next common check, from which it counts."""
        numbers = self._numbers
        numbers[_HOLD] = 1
        try:
            time.sleep(_SETTLE)
            # In a pause it is the one of the pause: some may have come to it, nobody is behind it.
            yield numbers[_PAUSE_AT] or 1 + max(map(self.num_checks, range(self.num_ranks)))
            self._point()
            time.sleep(_SETTLE)
        finally:
            numbers[_HOLD] = 0

    def _point(self) -> None:
        """Have ranks look further from the first check on at which there is something."""
        numbers = self._numbers
        numbers[_LOOK_AT] = min(filter(None, (numbers[_STOP_AT], numbers[_PAUSE_AT], numbers[_SET_AT])), default=0)

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
    return _room(num_ranks) + SETTINGS_ROOM


def _room(num_ranks: int) -> int:
    """Where the room for settings begins: behind all numbers."""
    return 8 * (_SHARED + num_ranks * _OWN)
