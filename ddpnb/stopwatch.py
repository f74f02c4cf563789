"""How a rank spends its steps: waiting for data, computing, waiting for the others.

The training helpers say what they know: the loader how long a batch took, whoever calls a collective how long that held
it, and who ends a step that it is over. What comes of it, medians over the newest steps, is told as `Paced`.

All ranks of a training step end it together, so wall time names nobody. The one that is slow is the one that waits
least for the others.

Runs in: worker (and in the kernel for a run in place)
"""

from __future__ import annotations

import os
import sys
from collections import deque
from statistics import median
from time import monotonic
from typing import NamedTuple

from .messages import Paced
from .world import World

NUM_TIMED = 20
"""Newest steps that medians are taken over, at least."""
SECONDS_TIMED = 2.0
"""Seconds of the newest steps, at least: where they are short, more are taken. On a busy machine the scheduler may hold
up the same process for some tenths of a second."""
_MOST_TIMED = 256
_PAUSE = 0.7
"""Least seconds between two words of the steps: every other flush of the session has one."""
_MEMORY_PAUSE = 2.0
"""Least seconds between two words where no step was made, of the memory alone."""


class _Lap(NamedTuple):
    """One step, in seconds."""

    step: float
    data: float
    wait: float | None
    """None where it cannot be seen."""
    samples: int | None


class Stopwatch:
    """One process's. Fed by the thread that trains, in microseconds; read by the session's.

    Args:
        place: where this process stands.
        device: `str(torch.device)` that it computes on.
    """

    def __init__(self, place: World, device: str) -> None:
        self._rank = place.rank
        self._device = device
        # A GPU goes on by itself while the host runs ahead: the host's times say nothing of it.
        self._sees_waits = place.world_size > 1 and device == "cpu"
        self._laps: deque[_Lap] = deque(maxlen=_MOST_TIMED)
        self._num_steps = 0
        self._began: float | None = None
        self._fetched_until = 0.0
        self._data = self._wait = self._left_out = 0.0  # seconds of the present step
        self._samples: int | None = None
        self._told: Paced | None = None

    # ---- what the training says

    def fetched(self, began: float, num_samples: int | None) -> None:
        """A batch is here, waited for since `began`. Where one loader is read through another the inner one counts."""
        if began < self._fetched_until:
            return
        self._fetched_until = monotonic()
        self._data += self._fetched_until - began
        if num_samples is not None:
            self._samples = num_samples + (self._samples or 0)

    def waited(self, began: float) -> None:
        """A collective is over that needed all ranks, called at `began`."""
        self._wait += monotonic() - began

    def leave_out(self, seconds: float) -> None:
        """So much of the present step was a pause."""
        self._left_out += seconds

    def end_step(self, ready: float | None = None) -> None:
        """A step is over, and the next one begins.

        Args:
            ready: when this rank's own last gradient was there, whose reduction is over now; None where nobody has
                seen that.
        """
        now = monotonic()
        if self._began is not None:
            step = max(0.0, now - self._began - self._left_out)
            wait = min(step, self._wait + now - ready) if ready is not None and self._sees_waits else None
            self._laps.append(_Lap(step, min(step, self._data), wait, self._samples))
            self._num_steps += 1
        self._began = now
        self._clear()

    def _clear(self) -> None:
        self._data = self._wait = self._left_out = 0.0
        self._samples = None

    # ---- what is told

    def news(self, *, last: bool = False) -> Paced | None:
        """What is to be told now; None where nothing is new, or something was told just now.

        Args:
            last: what is new is told at once.
        """
        told = self._told
        if told is not None:
            has_new_steps = self._num_steps > told.num_steps
            since = monotonic() - told.time
            if since < (_PAUSE if has_new_steps else _MEMORY_PAUSE) and not (last and has_new_steps):
                return None
            if not has_new_steps and _is_close(_memory(self._device), told.memory):
                return None
        self._told = self.paced()
        return self._told

    def paced(self) -> Paced:
        """How it is now."""
        laps, num_steps = self._newest(), self._num_steps
        waits = [lap.wait for lap in laps if lap.wait is not None]
        speeds = [lap.samples / lap.step for lap in laps if lap.samples is not None and lap.step]
        return Paced(
            rank=self._rank,
            time=monotonic(),
            num_steps=num_steps,
            step=median(lap.step for lap in laps) if laps else 0.0,
            data=median(lap.data for lap in laps) if laps else 0.0,
            wait=median(waits) if 2 * len(waits) > len(laps) else None,
            samples=median(speeds) if speeds else None,
            memory=_memory(self._device),
        )

    def _newest(self) -> list[_Lap]:
        newest: list[_Lap] = []
        seconds = 0.0
        for lap in reversed(tuple(self._laps)):  # of a copy: the training goes on
            if len(newest) >= NUM_TIMED and seconds >= SECONDS_TIMED:
                break
            newest.append(lap)
            seconds += lap.step
        return newest


def _is_close(memory: int | None, told: int | None) -> bool:
    """To within a hundredth: not worth a word."""
    return memory == told or (memory is not None and told is not None and abs(memory - told) < 0.01 * told)


def _memory(device: str) -> int | None:
    """Bytes held now: of the device by tensors, or of the machine by this process."""
    if device != "cpu":
        torch = sys.modules.get("torch")
        return torch.cuda.memory_allocated(device) if torch is not None else None
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None  # not Linux
