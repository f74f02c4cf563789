"""A run as plain text: one stable line, one line of status, a card of a few lines.

Runs in: kernel
"""

from __future__ import annotations

import numpy as np

from ..state import RunState
from . import summary
from .curves import curve, main_name
from .words import NAME_LENGTH, NOTE_LENGTH, count, cut, number

_WIDTH = 40
_LEVELS = "▁▂▃▄▅▆▇█"


def label(name: str, world_size: int) -> str:
    """One line that stays the same from launch to end, so that a saved notebook can be compared with a new run."""
    return f"<ddpnb run {cut(name, NAME_LENGTH)!r}: {count(world_size, 'rank')}>"


def line(state: RunState, now: float) -> str:
    """All that is going on in one line."""
    name = main_name(state)
    value = [f"{cut(name, NAME_LENGTH)} {number(summary.newest(state, name))}"] if name else []
    return " · ".join([f"{cut(state.name, NAME_LENGTH)}: {summary.status(state)}", *summary.facts(state, now), *value])


def text_card(state: RunState, now: float) -> str:
    """The card for a terminal.

    ● train  running · 2 ranks · gloo · cpu
    ██████████████░░░░░░░░░░░░░░░░░░░░░░░░░░  epoch 2/5 · step 340/900 · 0:14 elapsed
    ▇▆▅▄▄▃▃▂▂▂▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁  loss 2.37 → 0.217
    saved at step 300 in runs/digits/2026-11-30_14-05-12_train/checkpoints/step-00000300
    0│ epoch 1 accuracy 0.912
    """
    done = summary.fraction(state)
    facts = " · ".join(summary.facts(state, now))
    name = main_name(state)
    rows = [f"● {cut(state.name, NAME_LENGTH)}  {' · '.join([summary.status(state), *summary.place(state)])}"]
    rows += [facts if done is None else f"{_bar(done)}  {facts}"]
    rows += _curve(state, name) if name else []
    others = summary.values(state, but=(name,))
    rows += [" · ".join(others)] if others else []
    kept = summary.kept(state)
    rows += [" · ".join(kept)] if kept else []
    rows += [f"{rank}│ {text}" for rank, text in summary.last_lines(state, 8).lines]
    rows += [f"note: {cut(note, NOTE_LENGTH)}" for note in state.notes]
    failure = summary.failure(state)
    return "\n".join([*rows, *([failure] if failure else [])])


def sparkline(values: list[float], width: int) -> str:
    """A curve in one line of block characters, at most `width` long."""
    low, high = min(values), max(values)
    places = np.linspace(0, len(values) - 1, min(width, len(values)))
    heights = (np.interp(places, range(len(values)), values) - low) / ((high - low) or 1)
    return "".join(_LEVELS[round(height * (len(_LEVELS) - 1))] for height in heights)


def _bar(done: float) -> str:
    full = round(done * _WIDTH)
    return "█" * full + "░" * (_WIDTH - full)


def _curve(state: RunState, name: str) -> list[str]:
    shown = curve(state, name, 4 * _WIDTH)
    bad = summary.bad_values(shown)
    rows = []
    if not shown.is_empty:
        means = [value for _, value in shown.mean] or [stroke.mean for stroke in shown.lines[0].strokes]
        words = f"{cut(name, NAME_LENGTH)} {number(means[0])} → {number(shown.newest)}" if means else ""
        rows = [f"{sparkline(means, _WIDTH):{_WIDTH}}  {words}"] if means else []
    return [*rows, *([bad] if bad else [])]
