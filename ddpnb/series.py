"""A logged value over time: append-only, bounded, and cheap to draw at any length.

A `Series` keeps its points in three columns and, beside them, an *envelope*: at most `2 * BUCKETS` buckets, each with
the minimum, maximum and mean of consecutive points. A curve is drawn from the envelope, so that it costs the same
after a thousand points and after a million, and no spike is lost.

One thread appends; any thread may read.

Runs in: kernel
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from math import inf, isfinite
from typing import NamedTuple, TypeVar

T = TypeVar("T", int, float)

BUCKETS = 150
"""Fewest buckets kept once there are so many points; with a least and a greatest value each, a curve 600 pixels wide
shows no more."""

LIMIT = 1_000_000
"""Points kept in memory; beyond it every second point of the older half goes."""


class Bucket(NamedTuple):
    """Consecutive points drawn as one stroke."""

    first_step: int
    last_step: int
    minimum: float
    """Least finite value; inf where no value is finite."""
    maximum: float
    """Greatest finite value; -inf where no value is finite."""
    total: float
    """Sum of the finite values."""
    num_finite: int
    """Number of finite values."""
    num_bad: int
    """Number of values that are nan or infinite."""
    first_time: float
    """Monotonic time of the first of them."""
    last_time: float

    def merge(self, later: Bucket) -> Bucket:
        """One bucket for both."""
        return Bucket(
            self.first_step,
            later.last_step,
            min(self.minimum, later.minimum),
            max(self.maximum, later.maximum),
            self.total + later.total,
            self.num_finite + later.num_finite,
            self.num_bad + later.num_bad,
            self.first_time,
            later.last_time,
        )


class Series:
    """The points of one name on one rank."""

    def __init__(self) -> None:
        self._columns = (array("q"), array("d"), array("d"))  # steps, values, times
        self._buckets: list[Bucket] = []
        self._width = 1  # points a full bucket stands for
        self._fill = 0  # points in the last bucket
        self.num_points = 0
        """Points ever added; more than `len()` once the limit was passed."""
        self.num_recalled = 0
        """How many of them an earlier run had logged, from whose checkpoint this one goes on."""

    def __len__(self) -> int:
        return len(self._columns[2])

    def extend(self, steps: bytes, values: bytes, times: bytes) -> None:
        """Append a batch: int64 steps, float64 values, float64 monotonic times, of equal length."""
        new_steps, new_values, new_times = array("q", steps), array("d", values), array("d", times)
        self._columns[0].extend(new_steps)
        self._columns[1].extend(new_values)
        self._columns[2].extend(new_times)
        self.num_points += len(new_values)
        self._add_to_envelope(new_steps, new_values.tolist(), new_times)
        if len(self) > LIMIT:
            self._thin()

    def columns(self) -> tuple[array[int], array[float], array[float]]:
        """Steps, values and times, copied: three columns of equal length."""
        steps, values, times = self._columns
        # Slicing is one step under the GIL; the writer fills `times` last, so the others are at least as long.
        times = times[:]
        return steps[: len(times)], values[: len(times)], times

    def tail(self, count: int) -> tuple[array[int], array[float], array[float]]:
        """The last `count` points, as `columns` gives them."""
        steps, values, times = self._columns
        end = len(times)
        begin = max(0, end - count)
        return steps[begin:end], values[begin:end], times[begin:end]

    @property
    def last(self) -> tuple[int, float, float] | None:
        """The newest point (step, value, time); None where there is none yet."""
        points = list(zip(*self.tail(1), strict=True))
        return points[0] if points else None

    @property
    def buckets(self) -> list[Bucket]:
        """The envelope, oldest first; at most `2 * BUCKETS`."""
        return self._buckets[:]

    def _add_to_envelope(self, steps: array[int], values: list[float], times: array[float]) -> None:
        begin, num_points = 0, len(values)
        while begin < num_points:
            if self._fill == self._width or not self._buckets:
                if len(self._buckets) >= 2 * BUCKETS:
                    self._halve()
                    continue
                self._fill = 0
            end = min(begin + self._width - self._fill, num_points)
            ends = steps[begin], steps[end - 1], times[begin], times[end - 1]
            bucket = _bucket(ends, values[begin:end])
            if self._fill:
                self._buckets[-1] = self._buckets[-1].merge(bucket)
            else:
                self._buckets.append(bucket)
            self._fill += end - begin
            begin = end

    def _halve(self) -> None:
        """Merge neighbours: half as many buckets, each twice as wide. Their number is even, and all are full."""
        pairs: Iterator[Bucket] = iter(self._buckets)
        self._buckets = [earlier.merge(later) for earlier, later in zip(pairs, pairs, strict=True)]
        self._width *= 2
        self._fill = self._width

    def _thin(self) -> None:
        def thin(column: array[T]) -> array[T]:
            half = len(column) // 2
            return column[:half:2] + column[half:]

        steps, values, times = self._columns
        # One assignment: a reader has the old columns or the new ones, never some of each.
        self._columns = (thin(steps), thin(values), thin(times))


def _bucket(ends: tuple[int, int, float, float], values: list[float]) -> Bucket:
    first_step, last_step, first_time, last_time = ends
    # A sum that is finite holds no nan and no infinity: the usual batch is checked in one C call.
    total, num_points = sum(values), len(values)
    if not isfinite(total):
        values = list(filter(isfinite, values))
        if not values:
            return Bucket(first_step, last_step, inf, -inf, 0.0, 0, num_points, first_time, last_time)
        total = sum(values)
    low, high, num_finite = min(values), max(values), len(values)
    return Bucket(first_step, last_step, low, high, total, num_finite, num_points - num_finite, first_time, last_time)
