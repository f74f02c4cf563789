"""What a curve shows, before it is drawn: the lines, their mean, the axes' round numbers, where the labels go.

Names that differ in a word such as train, val or test alone ("loss", "val_loss", "test/loss") measure the same thing:
the others are drawn beside the one that was chosen, in the same axes.

SVG and matplotlib draw from the same `Curve`, so that the live picture and the saved one say the same.

A line is a row of *strokes*: each stands for consecutive points and reaches from their least to their greatest, so
that no spike is lost however few strokes there are.

Runs in: kernel
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil, floor, inf, isfinite, log10
from statistics import fmean
from typing import NamedTuple

import numpy as np

from ..series import Bucket, Series
from ..state import RunState
from .lens import PLAIN, Lens
from .marks import Mark, marks
from .words import cut, number, tick

MOST_LINES = 8
"""More ranks than this are drawn as a band."""

MOST_COMPANIONS = 3
"""Other names drawn beside the one that was chosen, at most."""

_NAME_LENGTH = 11
"""Characters of a name beside a line's end."""
_SPLITS = frozenset(["train", "training", "val", "valid", "validation", "test", "eval", "evaluation", "dev"])

_SETTINGS = frozenset(["lr", "learning_rate"])
"""Names of settings, whether or not the run has offered them; the others are those that it has."""

_HUGE = 1e100
"""Values are drawn no farther out than this, and as 0 within its inverse: differences must be doubles that can be
divided."""


Points = tuple[tuple[float, float], ...]
"""(place, value), oldest first."""


class Stroke(NamedTuple):
    """Consecutive points of one rank."""

    first: float
    """Place of the first of them along the axis: its step, or its second."""
    last: float
    low: float
    high: float
    mean: float

    @property
    def place(self) -> float:
        """The middle of their places."""
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
    hidden: bool = False
    """Some values have no logarithm."""
    trend: tuple[Points, ...] = ()
    """The parts smoothed; empty where nothing is."""

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
    """From the least to the greatest of all ranks: (place, low, high), oldest first."""

    edges: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, slots=True)
class Companion:
    """Another name that measures the same thing: the mean of its ranks."""

    name: str
    points: Points
    """At least one."""
    newest: float


@dataclass(frozen=True, slots=True)
class Label:
    """What stands at the end of a line."""

    text: str
    place: float
    value: float
    """Where the line ends."""
    rank: int | None
    """Whose colour it has; None for a colour of its own."""
    is_mean: bool = False
    companion: int | None = None
    """Which of the companions it names."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One name's values on all ranks."""

    name: str
    lines: tuple[Line, ...]
    """By rank, at least one; with a `band` they are there to be read, not to be drawn."""
    band: Band | None
    """In place of the lines of more than `MOST_LINES` ranks."""
    mean: Points
    """Where every rank has a value; empty for a single rank."""
    trend: Points = ()
    """The mean smoothed; empty where nothing is."""
    companions: tuple[Companion, ...] = ()
    marks: tuple[Mark, ...] = ()
    """Within the axis, in order."""
    lens: Lens = PLAIN
    """How it is drawn; not as it was asked for where that cannot be."""
    trouble: str | None = None
    """What the lens hides, in words."""
    is_held: bool = False
    """Between two points the value stays what it was: a setting, and no measurement."""

    @property
    def is_empty(self) -> bool:
        """No value is finite: there is nothing to draw."""
        return not any(line.parts for line in self.lines)

    @property
    def newest(self) -> float:
        """Mean of the ranks' last values."""
        return mean([line.newest for line in self.lines])

    @property
    def span(self) -> tuple[float, float]:
        """First and last place drawn."""
        ends = [place for line in self.lines if line.parts for place in (line.parts[0][0].first, line.end.last)]
        ends += [place for other in self.companions for place in (other.points[0][0], other.points[-1][0])]
        return min(ends), max(ends)

    @property
    def values(self) -> tuple[float, float]:
        """Least and greatest value drawn."""
        strokes = [stroke for line in self.lines for stroke in line.strokes]
        others = [value for other in self.companions for _, value in other.points]
        low, high = (stroke.low for stroke in strokes), (stroke.high for stroke in strokes)
        return min(chain(low, others)), max(chain(high, others))


def mean(values: Sequence[float]) -> float:
    """The mean of any values, nan, infinity and the greatest double included."""
    return sum(value / len(values) for value in values)


def main_name(state: RunState) -> str | None:
    """The name whose curve is drawn large: "loss", else the first that speaks of a loss, else the first."""
    names = list(state.history)
    losses = [name for name in names if "loss" in name.lower()]
    return next(iter(["loss"] if "loss" in names else losses or names), None)


def chosen_name(state: RunState, lens: Lens) -> str | None:
    """The name that a lens shows: its own where that was logged, else the main one."""
    return lens.name if lens.name in state.history else main_name(state)


def curve(state: RunState, name: str, limit: int, lens: Lens = PLAIN) -> Curve:
    """The curve of `name`, with at most `limit` strokes a rank; the lens's own name does not matter."""
    shown = _curve(state, name, limit, lens)
    if lens.log and shown.is_empty:
        plain = _curve(state, name, limit, replace(lens, log=False))
        return plain if plain.is_empty else replace(plain, trouble="no value is above 0: there are no logarithms")
    return shown


def _curve(state: RunState, name: str, limit: int, lens: Lens) -> Curve:
    # A copy in one step: the folding thread may add a rank meanwhile.
    history = dict(state.history[name])
    origin = _origin(state, history.values()) if lens.by_time else None
    is_held = _is_held(state, name)
    lens = replace(lens, smoothing=0.0) if is_held else lens
    lines = tuple(_line(rank, history[rank], limit, lens, origin) for rank in sorted(history))
    drawn = [line for line in lines if line.parts]
    middle = _mean_line(drawn) if len(drawn) > 1 else ()
    if is_held:
        end = _end(state, origin)
        lines = tuple(_stairs(line, end) for line in lines)
        drawn, middle = [line for line in lines if line.parts], tuple(_stair_points(middle, end))
    shown = Curve(
        name,
        lines,
        band=_band(drawn) if len(drawn) > MOST_LINES else None,
        mean=middle,
        trend=next(iter(_smoothed([middle], lens.smoothing))) if middle and lens.smoothing else (),
        companions=tuple(_companions(state, name, limit, lens, origin)) if drawn else (),
        lens=lens,
        trouble="values of 0 and below have no logarithm" if any(line.hidden for line in lines) else None,
        is_held=is_held,
    )
    if shown.is_empty:
        return shown
    first, last = shown.span
    within = sorted((mark for mark in marks(state, origin) if first <= mark.place <= last), key=lambda it: it.place)
    return replace(shown, marks=tuple(within))


def labels(shown: Curve) -> list[Label]:
    """What stands at the ends of the lines; of a band, the ranks that end lowest and highest."""
    drawn = [line for line in shown.lines if line.parts]
    others = [
        Label(f"{cut(other.name, _NAME_LENGTH)} {number(other.newest)}", *other.points[-1], None, companion=place)
        for place, other in enumerate(shown.companions)
    ]
    if len(drawn) == 1:
        name = f"{cut(shown.name, _NAME_LENGTH)} " if others else ""
        return [_label(drawn[0], name + number(drawn[0].newest), drawn[0].rank), *others]
    if shown.band:
        by_end = sorted(drawn, key=lambda line: line.end.mean)
        found = [_label(line, f"rank {line.rank} {number(line.newest)}", None) for line in (by_end[0], by_end[-1])]
    else:
        found = [_label(line, f"rank {line.rank} {number(line.newest)}", line.rank) for line in drawn]
    ends = (shown.trend or shown.mean)[-1:]
    return [*found, *(Label(f"mean {number(shown.newest)}", *end, None, is_mean=True) for end in ends), *others]


def corners(part: Sequence[Stroke]) -> list[tuple[float, float]]:
    """The points that draw a part of a line: both ends of every stroke, the nearer to the one before it first."""
    points: list[tuple[float, float]] = []
    before = part[0].low
    for first, last, low, high, _ in part:
        near, far = (low, high) if before + before <= low + high else (high, low)
        points.append((first, near))
        if near != far:
            points.append((last, far))
        before = far
    return points


def rows(shown: Curve, about: int) -> list[float]:
    """Round numbers beside a curve; the first and the last enclose it."""
    return log_ticks(*shown.values, about) if shown.lens.log else ticks(*shown.values, about)


def columns(shown: Curve, about: int, span: tuple[float, float] | None = None) -> list[tuple[float, str]]:
    """Round numbers below a curve, and their words: the last of them says what they count."""
    first, last = span or shown.span
    if not shown.lens.by_time:
        places = step_ticks(first, last, about)
        return list(zip(places, step_words(places), strict=True))
    unit, word = next((unit, word) for unit, word, most in _CLOCK if last - first <= most)
    whole = [count for count in ticks(first / unit, last / unit, about) if first / unit <= count <= last / unit]
    words = [tick(count) for count in whole]
    return list(
        zip([count * unit for count in whole], [*words[:-1], *(f"{it} {word}" for it in words[-1:])], strict=True)
    )


_CLOCK = ((1, "s", 180), (60, "min", 10_800), (3600, "h", inf))
"""(seconds, unit, the longest span it is used for)"""


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


def log_ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers around positive `low` … `high` for an axis of logarithms; the first and the last enclose it."""
    if high < low * 1.001:
        low, high = low / 2, high * 2
    first, last = floor(log10(low) + 1e-6), ceil(log10(high) - 1e-6)
    every, factors = ceil((last - first) / about), (1, 2, 5) if 2 * (last - first) < about else (1,)
    grid = [factor * 10.0**power for power in range(first, last + every, every) for factor in factors]
    below = [place for place in grid if place <= low * (1 + 1e-6)]
    above = [place for place in grid if place >= high * (1 - 1e-6)]
    return [place for place in grid if below[-1] <= place <= above[0]]


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
    if line.trend or value < line.end.low:  # the smoothed line ends elsewhere; a value without a logarithm nowhere
        value = line.trend[-1][-1][1] if line.trend else line.end.low
    return Label(text, line.end.last, value, rank)


def _origin(state: RunState, every: Iterable[Series]) -> float:
    """Where time is counted from: the launch, or the first value of the run that this one goes on from."""
    firsts = [buckets[0].first_time for series in every if (buckets := series.buckets)]
    return min(firsts, default=state.started) if state.resumed else state.started


def _line(rank: int, series: Series, limit: int, lens: Lens, origin: float | None) -> Line:
    buckets = series.buckets
    width = ceil(len(buckets) / limit) or 1
    parts: list[list[Stroke]] = [[]]
    for begin in range(0, len(buckets), width):
        stroke = _stroke(buckets[begin : begin + width], lens.log, origin)
        if stroke:
            parts[-1].append(stroke)
        elif parts[-1]:
            parts.append([])
    newest = series.last
    whole = tuple(tuple(part) for part in parts if part)
    means = ([(stroke.place, stroke.mean) for stroke in part] for part in whole)
    return Line(
        rank,
        whole,
        newest[1] if newest else float("nan"),
        sum([bucket.num_bad for bucket in buckets]),
        hidden=lens.log and any(bucket.minimum <= 0 for bucket in buckets),
        trend=tuple(_smoothed(means, lens.smoothing)) if lens.smoothing else (),
    )


def _is_held(state: RunState, name: str) -> bool:
    """Whether a name is that of a setting, which is logged only where it changes."""
    return name in _SETTINGS or name in state.offered or any(change.name == name for change in state.applied)


def _end(state: RunState, origin: float | None) -> float:
    """Where the run is now: its last point of any name."""
    every = [series.last for ranks in list(state.history.values()) for series in list(ranks.values())]
    return max(float(last[0]) if origin is None else last[2] - origin for last in every if last)


def _stairs(line: Line, end: float) -> Line:
    """The line of a value that stays what it was up to the next, and after the last up to the run's end."""
    parts = []
    for part in line.parts:
        stairs = [part[0]]
        for stroke in part[1:]:
            stairs += [_held(stairs[-1], stroke.first), stroke]
        parts.append(tuple(stairs))
    if parts and isfinite(line.newest) and line.end.last < end:
        parts[-1] += (_held(line.end, end),)
    return replace(line, parts=tuple(parts))


def _held(stroke: Stroke, place: float) -> Stroke:
    return Stroke(place, place, stroke.mean, stroke.mean, stroke.mean)


def _stair_points(points: Points, end: float) -> Iterable[tuple[float, float]]:
    for point, after in zip(points, [*(place for place, _ in points[1:]), end], strict=False):
        yield point
        if after > point[0]:
            yield after, point[1]


def _smoothed(parts: Iterable[Sequence[tuple[float, float]]], smoothing: float) -> Iterable[Points]:
    """A running mean over parts of one line, in which the newest point counts 1 - smoothing; as if there had been
    nothing before the first. Over strokes, not points: it smooths as much after a million points as after a hundred.

    Source: the correction is Adam's (Kingma and Ba 2015, arXiv:1412.6980), as in TensorBoard.
    """
    total = weight = 0.0
    for part in parts:
        points = []
        for place, value in part:
            total = smoothing * total + (1 - smoothing) * value
            weight = smoothing * weight + (1 - smoothing)
            points.append((place, total / weight))
        yield tuple(points)


def _companions(state: RunState, name: str, limit: int, lens: Lens, origin: float | None) -> Iterable[Companion]:
    kind = _kind(name)
    kin = [other for other in list(state.history) if other != name and _kind(other) == kind]
    for other in kin[:MOST_COMPANIONS]:
        history = dict(state.history[other])
        lines = [_line(rank, history[rank], limit, lens, origin) for rank in sorted(history)]
        drawn = [line for line in lines if line.parts]
        if drawn:
            points = _mean_line(drawn) if len(drawn) > 1 else ()
            points = points or tuple((stroke.place, stroke.mean) for stroke in drawn[0].strokes)
            yield Companion(other, points, mean([line.newest for line in lines]))


def _kind(name: str) -> tuple[str, ...]:
    """What a name measures: its words without those that say on which data."""
    words = re.split(r"[\W_]+", name.lower())
    return tuple(word for word in words if word not in _SPLITS) or tuple(words)


def _stroke(group: list[Bucket], is_log: bool, origin: float | None) -> Stroke | None:
    # One plain loop: a view of eight ranks comes here a thousand times a drawing.
    count, total, low, high = 0, 0.0, inf, -inf
    for _, _, minimum, maximum, part, num_finite, _, _, _ in group:
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
    if is_log and low <= 0:
        if high <= 0:
            return None
        # Of these points nothing more is known than their greatest, and their mean.
        mean = mean if mean > 0 else high
        low = min(mean, high)
    if origin is None:
        return Stroke(group[0].first_step, group[-1].last_step, low, high, mean)
    return Stroke(group[0].first_time - origin, group[-1].last_time - origin, low, high, mean)


def _within(value: float) -> float:
    return max(-_HUGE, min(_HUGE, value)) if abs(value) * _HUGE > 1 else 0.0


def _mean_line(lines: list[Line]) -> Points:
    strokes = [line.strokes for line in lines]
    first, last = max(own[0].place for own in strokes), min(own[-1].place for own in strokes)
    grid = [stroke.place for stroke in max(strokes, key=len) if first <= stroke.place <= last]
    if not grid:
        return ()
    rows = [np.interp(grid, [stroke.place for stroke in own], [stroke.mean for stroke in own]) for own in strokes]
    return tuple(zip(grid, np.mean(rows, axis=0).tolist(), strict=True))


def _band(lines: list[Line]) -> Band:
    """Every stroke of every rank falls into one of some columns: the height of the band there."""
    strokes = np.array([stroke for line in lines for stroke in line.strokes])  # (strokes, fields of Stroke)
    places = (strokes[:, 0] + strokes[:, 1]) / 2
    num_columns = max(len(line.strokes) for line in lines)
    columns = np.rint((places - places.min()) / (np.ptp(places) or 1) * (num_columns - 1)).astype(int)
    low, high = np.full(num_columns, np.inf), np.full(num_columns, -np.inf)
    np.minimum.at(low, columns, strokes[:, 2])
    np.maximum.at(high, columns, strokes[:, 3])
    known = low <= high
    middles = np.linspace(places.min(), places.max(), num_columns)[known]
    return Band(tuple(zip(middles.tolist(), low[known].tolist(), high[known].tolist(), strict=True)))
