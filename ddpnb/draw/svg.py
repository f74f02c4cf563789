"""A curve as inline SVG.

Colours and line widths are in `STYLE`, which the card brings once; in the SVG there are only classes and points. So a
refresh is small, and the page's theme decides.

Runs in: kernel
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from math import log10

from .curves import Band, Companion, Curve, Label, Line, columns, corners, labels, rows, spread
from .marks import Mark, written
from .palette import DASHES, LIGHT, look
from .words import NAME_LENGTH, count, cut, number, tick

STROKES = 150
"""Strokes drawn of each rank: with two points each, and some ten bytes a point, four ranks are 13 kB."""

COMPANION_DASHES = ("5 3", "1.5 2.5", "8 3 2 3")
"""One for each companion; they have the ink's colour, which no rank has."""

_WIDTH, _HEIGHT = 760, 274
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 108, 38, 26  # of the plot, to the edges of the picture
_LINE_HEIGHT = 14
_LETTER = 6.1
"""Width of a letter of a mark, about."""
_MOST_DOTS = 40
"""A companion with more points has no dots on its line."""

STYLE = "".join(
    [
        ".ddpnb svg{display:block;width:100%;height:auto;overflow:visible}",
        ".ddpnb svg text{font-size:11.5px;fill:var(--ddpnb-soft);font-variant-numeric:tabular-nums}",
        ".ddpnb svg .n{fill:var(--ddpnb-ink);font-weight:600}.ddpnb svg .i{fill:var(--ddpnb-ink)}",
        ".ddpnb svg path{fill:none;stroke-linejoin:round;vector-effect:non-scaling-stroke}",
        ".ddpnb svg .g{stroke:var(--ddpnb-grid);stroke-width:1}",
        ".ddpnb svg .r{stroke-width:1.15;opacity:.75}",
        ".ddpnb svg .o{stroke-width:1.8;opacity:1;stroke-dasharray:none}",
        ".ddpnb svg .m{stroke:var(--ddpnb-ink);stroke-width:2.2}",
        ".ddpnb svg .b{fill:var(--ddpnb-h0);opacity:.2}",
        ".ddpnb svg .f{stroke-width:1;opacity:.3;stroke-dasharray:none}",  # what was smoothed
        ".ddpnb svg path.mf{stroke:var(--ddpnb-ink)}",
        *(
            f".ddpnb svg .c{place}{{stroke:var(--ddpnb-ink);stroke-width:1.5;stroke-dasharray:{dash}}}"
            for place, dash in enumerate(COMPANION_DASHES)
        ),
        ".ddpnb svg .c{fill:var(--ddpnb-page-now);stroke:var(--ddpnb-ink);stroke-width:1.3}",
        ".ddpnb svg .epoch,.ddpnb svg .resumed{stroke:var(--ddpnb-soft);stroke-width:1;stroke-dasharray:2 3}",
        ".ddpnb svg .resumed{stroke-dasharray:6 3}",
        ".ddpnb svg .setting{stroke:var(--ddpnb-bar);stroke-width:1.3}",
        ".ddpnb svg path.saved{fill:var(--ddpnb-soft)}",
        ".ddpnb svg .k{paint-order:stroke;stroke:var(--ddpnb-page-now);stroke-width:3px;stroke-linejoin:round}",
        *(f".ddpnb svg path.h{hue}{{fill:none;stroke:var(--ddpnb-h{hue})}}" for hue in range(len(LIGHT))),
        *(f".ddpnb svg .h{hue}{{fill:var(--ddpnb-h{hue})}}" for hue in range(len(LIGHT))),
        *(
            f".ddpnb svg .d{place}{{stroke-dasharray:{' '.join(map(str, dash))}}}"
            for place, dash in enumerate(DASHES)
            if dash
        ),
    ]
)


@dataclass(frozen=True, slots=True)
class _Axes:
    """Where places and values are in the picture."""

    span: tuple[float, float]
    values: tuple[float, float]
    is_log: bool

    def x(self, place: float) -> float:
        first, last = self.span
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * ((place - first) / (last - first) if last > first else 0.0)

    def y(self, value: float) -> float:
        low, high = self.values
        if self.is_log:
            low, high, value = log10(low), log10(high), log10(value)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (value - low) / (high - low)


def svg(curve: Curve) -> str:
    """The curve's picture, which says in words too what it shows; `curve` is not empty."""
    heights = rows(curve, 5)
    axes = _Axes(curve.span, (heights[0], heights[-1]), curve.lens.log)
    return "".join(
        [
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">',
            *_words(curve),
            f'<text class="n" x="{_LEFT}" y="13">{escape(cut(curve.name, NAME_LENGTH))}</text>',
            *_grid(curve, axes, heights),
            *_marks(curve.marks, axes),
            *_lines(curve, axes),
            *(_companion(place, other, axes) for place, other in enumerate(curve.companions)),
            *([f'<path class="m" d="{_path(curve.trend or curve.mean, axes)}"/>'] if curve.mean else []),
            *_ends(labels(curve), axes),
            *_names(curve.marks, axes),
            "</svg>",
        ]
    )


def _words(curve: Curve) -> Iterable[str]:
    (first, last), (low, high) = curve.span, curve.values
    unit = "second" if curve.lens.by_time else "step"
    yield f"<title>{escape(cut(curve.name, NAME_LENGTH))} of {count(len(curve.lines), 'rank')}</title>"
    ends = ", ".join(label.text for label in labels(curve))
    span = f"from {unit} {first:,.0f} on between {number(low)} and {number(high)}"
    marks = "".join(f"; {mark.text}" for mark in curve.marks if mark.kind != "epoch")
    yield f"<desc>{escape(ends)} at {unit} {last:,.0f}; {span}{escape(marks)}</desc>"


def _grid(curve: Curve, axes: _Axes, heights: Sequence[float]) -> Iterable[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    yield f'<path class="g" d="{"".join(f"M{_LEFT} {axes.y(row):.1f}H{right}" for row in heights)}"/>'
    for row in heights:
        yield f'<text x="{_LEFT - 7}" y="{axes.y(row) + 4:.1f}" text-anchor="end">{tick(row)}</text>'
    for place, words in columns(curve, 5):
        yield f'<text x="{axes.x(place):.1f}" y="{bottom + 17}" text-anchor="middle">{words}</text>'


def _marks(marks: Sequence[Mark], axes: _Axes) -> Iterable[str]:
    """A line from top to bottom each; a checkpoint is a sign below the axis."""
    bottom = _HEIGHT - _BOTTOM
    for mark in marks:
        x = axes.x(mark.place)
        if mark.kind == "saved":
            yield f'<path class="saved" d="M{x:.1f} {bottom}l-4 7h8Z"><title>saved</title></path>'
        else:
            yield f'<path class="{mark.kind}" d="M{x:.1f} {_TOP}V{bottom}"/>'


def _names(marks: Sequence[Mark], axes: _Axes) -> Iterable[str]:
    """The marks' words where there is room: epochs above the curve, which ends low as a rule, all else in its top."""
    named = (mark for mark in marks if mark.kind != "saved")
    for mark, side in written(named, axes.x, _LETTER, _WIDTH - _RIGHT):
        if side:
            away, y = (0, _TOP - 6) if mark.kind == "epoch" else (4, _TOP + 12)
            x = axes.x(mark.place) + (away if side == "right" else -away)
            anchor = "start" if side == "right" else "end"
            yield f'<text class="k" x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(mark.text)}</text>'


def _lines(curve: Curve, axes: _Axes) -> Iterable[str]:
    if curve.band:
        yield _area(curve.band, axes)
        if curve.trend:
            yield f'<path class="mf f" d="{_path(curve.mean, axes)}"/>'
        return
    for line in curve.lines:
        yield _thin(line, axes, len(curve.lines))


def _area(band: Band, axes: _Axes) -> str:
    over = [(place, high) for place, _, high in band.edges]
    under = [(place, low) for place, low, _ in reversed(band.edges)]
    return f'<path class="b" d="{_path(over + under, axes)}Z"/>'


def _thin(line: Line, axes: _Axes, num_lines: int) -> str:
    own = look(line.rank)
    shape = "".join(_path(corners(part), axes) for part in line.parts)
    raw = f'<path class="f h{own.hue}" d="{shape}"/>' if line.trend else ""
    if line.trend:
        shape = "".join(_path(part, axes) for part in line.trend)
    alone = " o" if num_lines == 1 else ""
    return f'{raw}<path class="r h{own.hue} d{DASHES.index(own.dash)}{alone}" d="{shape}"/>'


def _companion(place: int, other: Companion, axes: _Axes) -> str:
    dots = other.points if len(other.points) <= _MOST_DOTS else ()
    drawn = (f'<circle class="c" cx="{axes.x(at):.1f}" cy="{axes.y(value):.1f}" r="2.6"/>' for at, value in dots)
    return f'<path class="c{place}" d="{_path(other.points, axes)}"/>{"".join(drawn)}'


def _ends(ends: Sequence[Label], axes: _Axes) -> Iterable[str]:
    wanted = [axes.y(label.value) for label in ends]
    placed = spread(wanted, _LINE_HEIGHT, _TOP, _HEIGHT - _BOTTOM)
    for label, end, y in zip(ends, wanted, placed, strict=True):
        hue = "n" if label.is_mean else "" if label.rank is None else f"h{look(label.rank).hue}"
        if hue:
            yield f'<circle class="{hue}" cx="{axes.x(label.place):.1f}" cy="{end:.1f}" r="2.6"/>'
        own = "i" if label.companion is not None else hue
        yield f'<text class="{own}" x="{_WIDTH - _RIGHT + 12}" y="{y + 4:.1f}">{escape(label.text)}</text>'


def _path(points: Iterable[tuple[float, float]], axes: _Axes) -> str:
    # Both axes are linear, if need be after the logarithm: two numbers each, not two calls a point.
    left, bottom = axes.x(axes.span[0]), axes.y(axes.values[0])
    wide, high = axes.x(axes.span[1]) - left, axes.y(axes.values[1]) - bottom
    (first, last), (low, top) = axes.span, axes.values
    if axes.is_log:
        points = [(place, log10(value)) for place, value in points]
        low, top = log10(low), log10(top)
    across, up = wide / (last - first) if last > first else 0.0, high / (top - low)
    pairs = ((left + (place - first) * across, bottom + (value - low) * up) for place, value in points)
    flat = tuple(chain.from_iterable(pairs))
    # A point alone between two gaps would be a line without length, which nobody sees.
    rest = "L" + "%.1f %.1f " * (len(flat) // 2 - 1) if len(flat) > 2 else "h2.5"
    return ("M%.1f %.1f" + rest).rstrip() % flat  # in one go: half the time of a string for each
