"""A curve as inline SVG.

Colours and line widths are in `STYLE`, which the card brings once; in the SVG there are only classes and points. So a
refresh is small, and the page's theme decides.

Runs in: kernel
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from .curves import Band, Curve, Label, Line, corners, labels, spread, step_ticks, step_words, ticks
from .palette import DASHES, LIGHT, look
from .words import count, number, tick

STROKES = 150
"""Strokes drawn of each rank: with two points each, and some ten bytes a point, four ranks are 13 kB."""

_WIDTH, _HEIGHT = 760, 262
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 104, 26, 26  # of the plot, to the edges of the picture
_LINE_HEIGHT = 14

STYLE = "".join(
    [
        ".ddpnb svg{display:block;width:100%;height:auto;overflow:visible}",
        ".ddpnb svg text{font-size:11.5px;fill:var(--ddpnb-soft);font-variant-numeric:tabular-nums}",
        ".ddpnb svg .n{fill:var(--ddpnb-ink);font-weight:600}",
        ".ddpnb svg path{fill:none;stroke-linejoin:round;vector-effect:non-scaling-stroke}",
        ".ddpnb svg .g{stroke:var(--ddpnb-grid);stroke-width:1}",
        ".ddpnb svg .r{stroke-width:1.15;opacity:.75}",
        ".ddpnb svg .o{stroke-width:1.8;opacity:1;stroke-dasharray:none}",
        ".ddpnb svg .m{stroke:var(--ddpnb-ink);stroke-width:2.2}",
        ".ddpnb svg .b{fill:var(--ddpnb-h0);opacity:.2}",
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
    """Where steps and values are in the picture."""

    steps: tuple[float, float]
    values: tuple[float, float]

    def x(self, step: float) -> float:
        first, last = self.steps
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * ((step - first) / (last - first) if last > first else 0.0)

    def y(self, value: float) -> float:
        low, high = self.values
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (value - low) / (high - low)


def svg(curve: Curve) -> str:
    """The curve's picture, which says in words too what it shows; `curve` is not empty."""
    rows = ticks(*curve.values, 5)
    axes = _Axes(curve.steps, (rows[0], rows[-1]))
    return "".join(
        [
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">',
            *_words(curve),
            f'<text class="n" x="{_LEFT}" y="13">{escape(curve.name)}</text>',
            *_grid(axes, rows),
            *(
                [_area(curve.band, axes)]
                if curve.band
                else (_thin(line, axes, len(curve.lines)) for line in curve.lines)
            ),
            *([f'<path class="m" d="{_path(curve.mean, axes)}"/>'] if curve.mean else []),
            *_ends(labels(curve), axes),
            "</svg>",
        ]
    )


def _words(curve: Curve) -> Iterable[str]:
    (first, last), (low, high) = curve.steps, curve.values
    yield f"<title>{escape(curve.name)} of {count(len(curve.lines), 'rank')}</title>"
    ends = ", ".join(label.text for label in labels(curve))
    span = f"from step {first:,.0f} on between {number(low)} and {number(high)}"
    yield f"<desc>{escape(ends)} at step {last:,.0f}; {span}</desc>"


def _grid(axes: _Axes, rows: Sequence[float]) -> Iterable[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    yield f'<path class="g" d="{"".join(f"M{_LEFT} {axes.y(row):.1f}H{right}" for row in rows)}"/>'
    for row in rows:
        yield f'<text x="{_LEFT - 7}" y="{axes.y(row) + 4:.1f}" text-anchor="end">{tick(row)}</text>'
    columns = step_ticks(*axes.steps, 5)
    for step, words in zip(columns, step_words(columns), strict=True):
        yield f'<text x="{axes.x(step):.1f}" y="{bottom + 17}" text-anchor="middle">{words}</text>'


def _area(band: Band, axes: _Axes) -> str:
    over = [(step, high) for step, _, high in band.edges]
    under = [(step, low) for step, low, _ in reversed(band.edges)]
    return f'<path class="b" d="{_path(over + under, axes)}Z"/>'


def _thin(line: Line, axes: _Axes, num_lines: int) -> str:
    own = look(line.rank)
    shape = "".join(_path(corners(part), axes) for part in line.parts)
    alone = " o" if num_lines == 1 else ""
    return f'<path class="r h{own.hue} d{DASHES.index(own.dash)}{alone}" d="{shape}"/>'


def _ends(ends: Sequence[Label], axes: _Axes) -> Iterable[str]:
    wanted = [axes.y(label.value) for label in ends]
    placed = spread(wanted, _LINE_HEIGHT, _TOP, _HEIGHT - _BOTTOM)
    for label, end, y in zip(ends, wanted, placed, strict=True):
        hue = "n" if label.is_mean else "" if label.rank is None else f"h{look(label.rank).hue}"
        if hue:
            yield f'<circle class="{hue}" cx="{axes.x(label.step):.1f}" cy="{end:.1f}" r="2.6"/>'
        yield f'<text class="{hue}" x="{_WIDTH - _RIGHT + 12}" y="{y + 4:.1f}">{escape(label.text)}</text>'


def _path(points: Iterable[tuple[float, float]], axes: _Axes) -> str:
    # Both axes are linear: two numbers each, not two calls a point.
    left, bottom = axes.x(axes.steps[0]), axes.y(axes.values[0])
    wide, high = axes.x(axes.steps[1]) - left, axes.y(axes.values[1]) - bottom
    (first, last), (low, top) = axes.steps, axes.values
    across, up = wide / (last - first) if last > first else 0.0, high / (top - low)
    drawn = [f"{left + (step - first) * across:.1f} {bottom + (value - low) * up:.1f}" for step, value in points]
    # A point alone between two gaps would be a line without length, which nobody sees.
    return f"M{drawn[0]}" + ("L" + " ".join(drawn[1:]) if len(drawn) > 1 else "h2.5")
