"""What a curve shows, before it is drawn: the lines, their mean, the axes' round numbers, where the labels go.

SVG and matplotlib draw from the same `Curve`, so that the live picture and the saved one say the same.

A line is a row of *strokes*: each stands for consecutive points and reaches from their least to their greatest, so
that no spike is lost however few strokes there are.

Runs in: kernel
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, inf, isfinite, log10
from statistics import fmean
from typing import NamedTuple

import numpy as np

from ..series import Bucket, Series
from ..state import RunState
from .words import number, tick

MOST_LINES = 8
"""More ranks than this are drawn as a band."""

_HUGE = 1e100
"""Values are drawn no farther out than this, and as 0 within its inverse: differences must be doubles that can be
divided."""


class Stroke(NamedTuple):
    """Consecutive points of one rank."""

    first: float
    """Step of the first of them."""
    last: float
    low: float
    high: float
    mean: float

    @property
    def step(self) -> float:
        """The middle of their steps."""
        return (self.first + self.last) / 2


@dataclass(frozen=True, slots=True)
class Line:
    """One rank's values, oldest first."""

    rank: int
    parts: tuple[tuple[Stroke, ...], ...]
    """Strokes without a gap between; a gap is where no value was finite."""
    newest: float
    """The last value, nan and infinity included."""
    bad: int
    """How many values are nan or infinite."""

    @property
    def strokes(self) -> list[Stroke]:
        """All strokes, the gaps left out."""
        return [stroke for part in self.parts for stroke in part]

    @property
    def end(self) -> Stroke:
        """The last stroke; there is one."""
        return self.parts[-1][-1]


@dataclass(frozen=True, slots=True)
class Band:
    """From the least to the greatest of all ranks: (step, low, high), oldest first."""

    edges: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, slots=True)
class Label:
    """What stands at the end of a line."""

    text: str
    step: float
    value: float
    """Where the line ends."""
    rank: int | None
    """Whose colour it has; None for a colour of its own."""
    is_mean: bool = False


@dataclass(frozen=True, slots=True)
class Curve:
    """One name's values on all ranks."""

    name: str
    lines: tuple[Line, ...]
    """By rank, at least one; with a `band` they are there to be read, not to be drawn."""
    band: Band | None
    """In place of the lines of more than `MOST_LINES` ranks."""
    mean: tuple[tuple[float, float], ...]
    """(step, value) where every rank has one; empty for a single rank."""

    @property
    def is_empty(self) -> bool:
        """No value is finite: there is nothing to draw."""
        return not any(line.parts for line in self.lines)

    @property
    def newest(self) -> float:
        """Mean of the ranks' last values."""
        return mean([line.newest for line in self.lines])

    @property
    def steps(self) -> tuple[float, float]:
        """First and last step drawn."""
        ends = [step for line in self.lines if line.parts for step in (line.parts[0][0].first, line.parts[-1][-1].last)]
        return min(ends), max(ends)

    @property
    def values(self) -> tuple[float, float]:
        """Least and greatest value drawn."""
        strokes = [stroke for line in self.lines for stroke in line.strokes]
        return min(stroke.low for stroke in strokes), max(stroke.high for stroke in strokes)


def mean(values: Sequence[float]) -> float:
    """The mean of any values, nan, infinity and the greatest double included."""
    return sum(value / len(values) for value in values)


def main_name(state: RunState) -> str | None:
    """The name whose curve is drawn large: "loss", else the first that speaks of a loss, else the first."""
    names = list(state.history)
    losses = [name for name in names if "loss" in name.lower()]
    return next(iter(["loss"] if "loss" in names else losses or names), None)


def curve(state: RunState, name: str, limit: int) -> Curve:
    """The curve of `name`, with at most `limit` strokes a rank."""
    # A copy in one step: the folding thread may add a rank meanwhile.
    history = dict(state.history[name])
    lines = tuple(_line(rank, history[rank], limit) for rank in sorted(history))
    drawn = [line for line in lines if line.parts]
    band = _band(drawn) if len(drawn) > MOST_LINES else None
    return Curve(name, lines, band, _mean_line(drawn) if len(drawn) > 1 else ())


def labels(shown: Curve) -> list[Label]:
    """What stands at the ends of the lines; of a band, the ranks that end lowest and highest."""
    drawn = [line for line in shown.lines if line.parts]
    if len(drawn) == 1:
        return [_label(drawn[0], number(drawn[0].newest), drawn[0].rank)]
    if shown.band:
        by_end = sorted(drawn, key=lambda line: line.end.mean)
        found = [_label(line, f"rank {line.rank} {number(line.newest)}", None) for line in (by_end[0], by_end[-1])]
    else:
        found = [_label(line, f"rank {line.rank} {number(line.newest)}", line.rank) for line in drawn]
    return found + [Label(f"mean {number(shown.newest)}", *end, None, is_mean=True) for end in shown.mean[-1:]]


def corners(part: Sequence[Stroke]) -> list[tuple[float, float]]:
    """The points that draw a part of a line: both ends of every stroke, the nearer to the one before it first."""
    points: list[tuple[float, float]] = []
    before = part[0].low
    for first, last, low, high, _ in part:
        near, far = (low, high) if abs(before - low) <= abs(before - high) else (high, low)
        points.append((first, near))
        if near != far:
            points.append((last, far))
        before = far
    return points


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers around `low` … `high`, some `about` of them; the first and the last enclose it."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = (low - abs(low) / 10, high + abs(high) / 10) if low else (0.0, 1.0)
    rough = (high - low) / about
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    # A hair's breadth is left out, or 0.1 + 0.2 would ask for one tick more.
    first, last = floor(low / step + 1e-6), ceil(high / step - 1e-6)
    return [place * step for place in range(first, last + 1)]


def step_ticks(first: float, last: float, about: int) -> list[float]:
    """Round steps within `first` … `last`; steps are whole."""
    return [step for step in ticks(first, last, about) if first <= step <= last and step == round(step)] or [first]


def step_words(columns: Sequence[float]) -> list[str]:
    """What stands below the axis: the last of the numbers says what they count."""
    words = [tick(column) for column in columns]
    return [*words[:-1], *(f"step {word}" for word in words[-1:])]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions in the order of `wanted`, as near to it as can be, each at least `gap` from the next.

    Without the gaps (each position moved back by its place) this is a regression by a rising function, whose
    solution averages neighbours that are out of order until none is.
    """
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    blocks: list[list[float]] = []
    for place, index in enumerate(order):
        blocks.append([wanted[index] - place * gap])
        while len(blocks) > 1 and fmean(blocks[-2]) > fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    levels = [fmean(block) for block in blocks for _ in block]
    top = max(low, high - gap * (len(wanted) - 1))
    placed = {
        index: min(max(level, low), top) + place * gap
        for place, (index, level) in enumerate(zip(order, levels, strict=True))
    }
    return [placed[index] for index in range(len(wanted))]


def _label(line: Line, text: str, rank: int | None) -> Label:
    # The newest value, as the text has it, so that labels stand in the order of their numbers.
    value = _within(line.newest) if isfinite(line.newest) else line.end.mean
    return Label(text, line.end.last, value, rank)


def _line(rank: int, series: Series, limit: int) -> Line:
    buckets = series.buckets
    width = ceil(len(buckets) / limit) or 1
    parts: list[list[Stroke]] = [[]]
    for begin in range(0, len(buckets), width):
        stroke = _stroke(buckets[begin : begin + width])
        if stroke:
            parts[-1].append(stroke)
        elif parts[-1]:
            parts.append([])
    newest = series.last
    return Line(
        rank,
        tuple(tuple(part) for part in parts if part),
        newest[1] if newest else float("nan"),
        sum(bucket.num_bad for bucket in buckets),
    )


def _stroke(group: list[Bucket]) -> Stroke | None:
    # One plain loop: a view of eight ranks comes here a thousand times a drawing.
    count, total, low, high = 0, 0.0, inf, -inf
    for _, _, minimum, maximum, part, num_finite, _ in group:
        count += num_finite
        total += part
        if minimum < low:
            low = minimum
        if maximum > high:
            high = maximum
    if not count:
        return None
    mean = total / count
    if not (low > 1 / _HUGE and high < _HUGE):  # as losses are, nearly always
        low, high, mean = _within(low), _within(high), _within(mean)
    return Stroke(group[0].first_step, group[-1].last_step, low, high, mean)


def _within(value: float) -> float:
    return max(-_HUGE, min(_HUGE, value)) if abs(value) * _HUGE > 1 else 0.0


def _mean_line(lines: list[Line]) -> tuple[tuple[float, float], ...]:
    strokes = [line.strokes for line in lines]
    first, last = max(own[0].step for own in strokes), min(own[-1].step for own in strokes)
    grid = [stroke.step for stroke in max(strokes, key=len) if first <= stroke.step <= last]
    if not grid:
        return ()
    rows = [np.interp(grid, [stroke.step for stroke in own], [stroke.mean for stroke in own]) for own in strokes]
    return tuple(zip(grid, np.mean(rows, axis=0).tolist(), strict=True))


def _band(lines: list[Line]) -> Band:
    """Every stroke of every rank falls into one of some columns: the height of the band there."""
    strokes = np.array([stroke for line in lines for stroke in line.strokes])  # (strokes, fields of Stroke)
    steps = (strokes[:, 0] + strokes[:, 1]) / 2
    num_columns = max(len(line.strokes) for line in lines)
    columns = np.rint((steps - steps.min()) / max(np.ptp(steps), 1) * (num_columns - 1)).astype(int)
    low, high = np.full(num_columns, np.inf), np.full(num_columns, -np.inf)
    np.minimum.at(low, columns, strokes[:, 2])
    np.maximum.at(high, columns, strokes[:, 3])
    known = low <= high
    middles = np.linspace(steps.min(), steps.max(), num_columns)[known]
    return Band(tuple(zip(middles.tolist(), low[known].tolist(), high[known].tolist(), strict=True)))
