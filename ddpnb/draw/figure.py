"""A run as a matplotlib figure: what `Run.plot()` gives and a saved notebook keeps.

Never pyplot: its list of open figures belongs to the user's cells, and it is not safe in the threads of a kernel.
Source: jupyterlab#19719, ipympl#610.

Runs in: kernel
"""

from __future__ import annotations

import re
import struct
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from textwrap import wrap
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from ..state import RunState
from . import summary
from .curves import Companion, Curve, Line, chosen_name, columns, corners, curve, labels, rows, spread
from .lens import PLAIN, Lens
from .marks import Mark, written
from .palette import look
from .svg import COMPANION_DASHES
from .words import NAME_LENGTH, NOTE_LENGTH, cut, number, tick, whole

_STROKES = 300
_NUM_NOTES = 3
_FOOT_WIDTH = 130  # characters
_HEAD_WIDTH = 120
_NUM_PANELS = 3
_INCHES = (7.6, 3.1)
_DPI = 100  # at which a pixel of the figure is one of the page
_SHARP = 2  # pixels of the picture to a pixel of the page
_MOST_DOTS = 40
_LETTER = 5.0  # pixels, of a mark
_SMALL_NAME = 24  # characters, of a small panel's name
_COLOURS = 64  # thin lines on white need no more, and it makes a third of the bytes

# Of the figure: left, bottom, width, height.
_ALONE = (0.062, 0.105, 0.895, 0.67)  # less what the labels at the lines' ends take
_BESIDE = (0.062, 0.105, 0.53, 0.67)
_PANELS = (0.755, 0.105, 0.23, 0.67)
_PANEL_GAP = 0.13
_LABEL_HEIGHT = 0.068  # of the main axes
_LABEL_WIDTH = 0.0095  # of the figure, for each character
_ROW_INCHES = 0.157
_HEAD_INCHES = 0.59

_INK, _SOFT, _LINE, _BAD, _SET = "#1f1f1f", "#616161", "#e4e4e4", "#c62828", "#1976d2"

# A name in Chinese is drawn as boxes; that is seen, and needs no warning in the user's cell for each letter.
warnings.filterwarnings("ignore", r"(?s)Glyph \d+ .*missing from", UserWarning, re.escape(__name__))

# Pictures are made in the views' thread and in cells, and matplotlib's caches know no threads.
_one_at_a_time = threading.Lock()


class RunFigure(Figure):
    """A figure that a notebook shows: without pyplot nobody has told IPython how."""

    def _repr_png_(self) -> tuple[bytes, dict[str, object]]:
        picture = _picture(self)
        return picture, display_metadata(picture)


def figure(state: RunState, now: float | None = None, lens: Lens = PLAIN) -> Figure:
    """The curves of all ranks and their mean, opaque, on white; words where there is nothing to draw.

    Args:
        state: What is known of the run.
        now: Monotonic time, for what has elapsed; None reads the clock.
        lens: What is drawn large, and how.
    """
    drawn = _drawn(state, time.monotonic() if now is None else now, lens)
    for text in drawn.findobj(Text):
        text.set_text(whole(text.get_text()))
    return drawn


def _drawn(state: RunState, now: float, lens: Lens) -> Figure:
    shown = _curves(state, lens)
    said, foot = ([], _foot(state)) if shown else (_said(state), [])
    width, height = _INCHES
    size = (width, height + _ROW_INCHES * len(foot) if shown else _HEAD_INCHES + _ROW_INCHES * (len(said) + 0.5))
    drawn = RunFigure(figsize=size, dpi=_DPI, facecolor="white")
    _head(drawn, state, now)
    if not shown:
        _say(drawn, state, said)
        return drawn
    main, *others = shown
    _plot_main(drawn.add_axes(_above(drawn, _BESIDE if others else _alone(main))), main)
    left, bottom, width, height = _PANELS
    part = (height + _PANEL_GAP) / (len(others) or 1)
    for place, other in enumerate(reversed(others)):
        box = left, bottom + place * part, width, part - _PANEL_GAP
        _plot_small(drawn.add_axes(_above(drawn, box)), other, main.span)
    below = (_ROW_INCHES * (len(foot) + 0.2)) / drawn.get_size_inches()[1]
    drawn.text(0.012, below, "\n".join(foot), size=7.5, color=_SOFT, va="top", linespacing=1.4, parse_math=False)
    return drawn


def png(state: RunState, now: float | None = None, lens: Lens = PLAIN) -> bytes:
    """The figure as PNG, with twice the pixels that `display_metadata()` says, for sharp screens."""
    return _picture(figure(state, now, lens))


def display_metadata(picture: bytes) -> dict[str, object]:
    """How a page is to show a picture of ours: at half its pixels, so that it is sharp, and on white."""
    width, height = struct.unpack(">II", picture[16:24])  # PNG's first chunk, IHDR, has them there
    return {"needs_background": "light", "width": width // _SHARP, "height": height // _SHARP}


def _picture(drawn: Figure) -> bytes:
    pixels = BytesIO()
    with _one_at_a_time:
        drawn.savefig(pixels, format="raw", dpi=_DPI * _SHARP, facecolor="white")
    width, height = (int(inches * _DPI * _SHARP) for inches in drawn.get_size_inches())
    image = Image.frombuffer("RGBA", (width, height), pixels.getvalue()).convert("RGB")
    small = image.quantize(_COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    # The octree makes white a shade darker, which shows on a white page.
    small.putpalette([255 if shade >= 252 else shade for shade in small.getpalette() or []])
    picture = BytesIO()
    small.save(picture, "png")
    return picture.getvalue()


def _curves(state: RunState, lens: Lens) -> list[Curve]:
    """The curves that have something to show, the main one first."""
    main = chosen_name(state, lens)
    names = [main, *(name for name in list(state.history) if name != main)] if main else []
    drawn = [shown for name in names if not (shown := curve(state, name, _STROKES, lens)).is_empty]
    beside = {other.name for other in drawn[0].companions} if drawn else set()
    # A value logged once, such as a learning rate, needs no panel.
    others = [shown for shown in drawn[1:] if shown.name not in beside and _changes(shown)]
    return [*drawn[:1], *(replace(shown, companions=(), marks=()) for shown in others[:_NUM_PANELS])]


def _changes(shown: Curve) -> bool:
    low, high = shown.values if shown.is_held else shown.span
    return low < high


def _head(drawn: Figure, state: RunState, now: float) -> None:
    failed = state.first_failure or state.problem
    kept = [] if state.resumed is None else [f"resumed from step {state.resumed.step:,}"]
    kept += [] if state.saved is None else [f"saved at step {state.saved.step:,}"]
    status_is, facts = summary.status(state), summary.facts(state, now)
    # What is said elsewhere too gives way first: the time must not be cut off.
    rows = ([status_is, *said, *facts] for said in ([*summary.place(state), *kept], kept, []))
    whole = [row for each in rows if len(row := " · ".join(each)) <= _HEAD_WIDTH] or [" · ".join([status_is, *facts])]
    name, status = _below_top(drawn, 0.08), _below_top(drawn, 0.3)
    drawn.text(0.012, name, cut(state.name, 60), size=10, weight="bold", color=_INK, va="top", parse_math=False)
    drawn.text(
        0.012, status, cut(whole[0], _HEAD_WIDTH), size=7.5, color=_BAD if failed else _SOFT, va="top", parse_math=False
    )


def _foot(state: RunState) -> list[str]:
    """What the curves do not tell, each in a line or two."""
    return [
        line for note in state.notes[-_NUM_NOTES:] for line in wrap(f"note: {cut(note, NOTE_LENGTH)}", _FOOT_WIDTH)[:2]
    ]


def _above(drawn: Figure, box: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
    """Where axes stand in a figure that is higher than usual: as far below its top, in the usual size."""
    left, bottom, width, height = box
    share = _INCHES[1] / drawn.get_size_inches()[1]
    return left, 1 - share + bottom * share, width, height * share


def _said(state: RunState) -> list[str]:
    """What there is to read, in place of axes with nothing in them."""
    failure = summary.failure(state)
    if failure:
        return failure.splitlines()[:16]
    return [f"{rank}│ {line}" for rank, line in summary.last_lines(state, 12).lines] or ["no values were logged"]


def _say(drawn: Figure, state: RunState, said: list[str]) -> None:
    text = "\n".join(cut(row, 112) for row in said)
    hue, top = _BAD if summary.failure(state) else _INK, _below_top(drawn, _HEAD_INCHES)
    drawn.text(0.012, top, text, size=7.5, color=hue, va="top", family="monospace", linespacing=1.5, parse_math=False)


def _below_top(drawn: Figure, inches: float) -> float:
    return float(1 - inches / drawn.get_size_inches()[1])


def _alone(shown: Curve) -> tuple[float, float, float, float]:
    """Where the axes stand that have the figure to themselves, with room for the longest label beside them."""
    left, bottom, width, height = _ALONE
    return left, bottom, width - _LABEL_WIDTH * max(len(label.text) for label in labels(shown)), height


def _plot_main(axes: Axes, shown: Curve) -> None:
    _frame(axes, shown, shown.span, num_ticks=5, title=cut(shown.name, NAME_LENGTH))
    right, _ = axes.transAxes.transform((1, 0))
    for mark, side in written(shown.marks, lambda place: axes.transData.transform((place, 1))[0], _LETTER, right):
        _draw_mark(axes, mark, side)
    for other, dash in zip(shown.companions, COMPANION_DASHES, strict=False):
        _draw_companion(axes, other, dash)
    _draw(axes, shown, scale=1.0)
    ends = labels(shown)
    wanted = [axes.transAxes.inverted().transform(axes.transData.transform((0, label.value)))[1] for label in ends]
    for label, height in zip(ends, spread(wanted, _LABEL_HEIGHT, 0.0, 1.0), strict=True):
        hue = _SOFT if label.rank is None else look(label.rank).light
        hue = _INK if label.is_mean or label.companion is not None else hue
        weight = "bold" if label.is_mean else "normal"
        beside = axes.text(1.025, height, label.text, size=7.5, color=hue, weight=weight, va="center", parse_math=False)
        beside.set_transform(axes.transAxes)
        if label.is_mean or label.rank is not None:
            axes.plot(label.place, label.value, "o", color=hue, markersize=2.8, clip_on=False, zorder=4)


def _draw_mark(axes: Axes, mark: Mark, side: Literal["left", "right"] | None) -> None:
    if mark.kind == "saved":
        axes.plot(mark.place, 0, "^", color=_SOFT, markersize=4, clip_on=False, transform=axes.get_xaxis_transform())
        return
    is_set, is_epoch, is_right = mark.kind == "setting", mark.kind == "epoch", side == "right"
    axes.axvline(mark.place, color=_SET if is_set else _SOFT, linewidth=0.8, linestyle="-" if is_set else ":", zorder=1)
    if side:
        axes.annotate(
            mark.text,
            (mark.place, 1.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, 3) if is_epoch else (3 if is_right else -3, -9),
            textcoords="offset points",
            ha="left" if is_right else "right",
            size=6,
            color=_SOFT,
            parse_math=False,
        )


def _draw_companion(axes: Axes, other: Companion, dash: str) -> None:
    style = (0, tuple(map(float, dash.split())))
    marker = "o" if len(other.points) <= _MOST_DOTS else ""
    places, values = zip(*other.points, strict=True)
    axes.plot(places, values, color=_INK, linewidth=1.0, linestyle=style, marker=marker, markersize=3, mfc="white")


def _plot_small(axes: Axes, shown: Curve, span: tuple[float, float]) -> None:
    _frame(axes, shown, span, num_ticks=2, title=f"{cut(shown.name, _SMALL_NAME)}  {number(shown.newest)}")
    _draw(axes, shown, scale=0.75)


def _frame(axes: Axes, shown: Curve, span: tuple[float, float], *, num_ticks: int, title: str) -> None:
    """Grid, round numbers and title; every colour by name, since the user's matplotlib style may be a dark one."""
    (first, last), heights = span, rows(shown, num_ticks)
    below = columns(shown, num_ticks, span)
    axes.set_facecolor("white")
    axes.set_yscale("log" if shown.lens.log else "linear")
    axes.set_xlim(first, last if last > first else first + 1)
    axes.set_ylim(heights[0], heights[-1])
    axes.set_yticks(heights, labels=[tick(row) for row in heights])
    axes.set_yticks([], minor=True)
    axes.set_xticks([place for place, _ in below], labels=[words for _, words in below])
    axes.tick_params(length=0, labelsize=7, labelcolor=_SOFT, pad=4)
    axes.grid(visible=True, axis="y", color=_LINE, linewidth=0.7, linestyle="-")
    axes.grid(visible=False, axis="x")
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    bad = summary.bad_values(shown) or shown.trouble
    title = cut(title, 30 if num_ticks < 5 else 60)
    words = f"{title}   ({bad})" if bad else title
    pad = 12 if any(mark.kind == "epoch" for mark in shown.marks) else 6  # points; epochs are named below the title
    axes.set_title(words, loc="left", size=8, weight="bold", color=_BAD if bad else _INK, pad=pad, parse_math=False)


def _draw(axes: Axes, shown: Curve, *, scale: float) -> None:
    if shown.band:
        places, low, high = zip(*shown.band.edges, strict=True)
        axes.fill_between(places, low, high, color=look(0).light, alpha=0.2, linewidth=0)
    else:
        for line in shown.lines:
            _draw_line(axes, line, width=scale * (0.8 if shown.mean else 1.3), is_alone=not shown.mean)
    if shown.band and shown.trend:
        axes.plot(*zip(*shown.mean, strict=True), color=_INK, linewidth=0.7 * scale, alpha=0.35)
    middle = shown.trend or shown.mean
    if middle:
        places, values = zip(*middle, strict=True)
        width = 1.6 * scale
        axes.plot(places, values, color=_INK, linewidth=width, solid_capstyle="round", marker=_dot(middle))


def _draw_line(axes: Axes, line: Line, *, width: float, is_alone: bool) -> None:
    """A rank's line; where it is smoothed, what it was before faintly behind."""
    own = look(line.rank)
    style = (0, own.dash) if own.dash and not is_alone else "-"
    for part in line.parts:
        points, faint = corners(part), bool(line.trend)
        axes.plot(
            *zip(*points, strict=True),
            color=own.light,
            linewidth=0.6 if faint else width,
            linestyle="-" if faint else style,
            alpha=0.3 if faint else 0.85,
            marker=_dot(points),
        )
    for trend in line.trend:
        axes.plot(*zip(*trend, strict=True), color=own.light, linewidth=width, linestyle=style, alpha=0.85)


def _dot(points: Sequence[object]) -> str:
    """The marker: a line of a single point is none to be seen."""
    return "o" if len(points) == 1 else ""
