"""A run as HTML: status, progress, and what its reader has chosen: curves, ranks, output, settings.

This is what changes. The style is `style.STYLE`, and what can be clicked are widgets between these parts
(`notebook/live.py`). Everything that a user wrote is escaped.

Runs in: kernel
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ..state import RunState
from . import summary
from .aspect import AT_FIRST, Aspect
from .autopsy import failure, hanging
from .curves import chosen_name, curve
from .output import last_lines, output_tab
from .ranks import ranks_below, ranks_tab
from .svg import STROKES, svg
from .words import NAME_LENGTH, NOTE_LENGTH, count, cut, setting, whole

_NUM_NOTES = 4
_NUM_CHANGES = 10
_SLOW_START = 1.5
"""Seconds after which a start is explained."""

_HUES = {
    "starting": "wait",
    "running": "good",
    "paused": "wait",
    "stopping": "wait",
    "finished": "good",
    "failed": "bad",
    "stopped": "off",
    "killed": "off",
    "interrupted": "off",
}


def card(state: RunState, now: float, aspect: Aspect = AT_FIRST) -> str:
    """All that changes of a card.

    Args:
        state: What is known of the run.
        now: Monotonic time, for what has elapsed.
        aspect: What its reader has chosen to see.
    """
    tab = "".join(_tab(state, now, aspect))
    foot = "".join([*_said(aspect), *_kept(state), *_notes(state), *failure(state)])
    parts = [
        *_head(state, now),
        *hanging(state, aspect),
        f'<div class="body" role="tabpanel" aria-label="{aspect.tab}">{tab}</div>',
        f'<div class="foot">{foot}</div>',
    ]
    return whole("".join(parts))


def trouble(label: str, text: str) -> str:
    """In place of a card that could not be drawn, and why."""
    said = f"{label}: the live view has failed; the run goes on, run.result() waits for it"
    return whole(f'<div class="body"><div>{escape(said)}</div><pre class="bad">{escape(text)}</pre></div>')


def _head(state: RunState, now: float) -> Iterable[str]:
    hue = "wait" if state.hung and state.ended is None else _HUES[state.status]
    dot = f'<i class="dot" style="background:var(--ddpnb-{hue})"></i>'
    status = f'<span role="status" aria-live="polite">{escape(summary.status(state))}</span>'
    words = "".join(f" · {escape(word)}" for word in summary.place(state))
    name = escape(cut(state.name, NAME_LENGTH))
    yield f'<div class="head">{dot}<b>{name}</b> <span class="soft">{status}{words}</span></div>'
    done = summary.fraction(state)
    if done is not None:
        hue = "bad" if state.status == "failed" else "bar"
        yield '<div class="bar" role="progressbar" aria-label="progress" aria-valuemin="0" aria-valuemax="100" '
        yield f'aria-valuenow="{100 * done:.0f}">'
        yield f'<div style="width:{done:.1%};background:var(--ddpnb-{hue})"></div></div>'
    yield f'<div class="facts soft">{escape(" · ".join(summary.facts(state, now)))}</div>'


def _tab(state: RunState, now: float, aspect: Aspect) -> Iterable[str]:
    match aspect.tab:
        case "curves":
            yield from _curves(state, now, aspect)
            yield from ranks_below(state)
            yield from last_lines(state)
        case "ranks":
            yield from ranks_tab(state)
        case "output":
            yield from output_tab(state, aspect)
        case "settings":
            yield from _settings(state)


def _curves(state: RunState, now: float, aspect: Aspect) -> Iterable[str]:
    name = chosen_name(state, aspect.lens)
    shown = curve(state, name, STROKES, aspect.lens) if name else None
    if shown and not shown.is_empty:
        yield svg(shown)
    elif state.ended is None and not shown:
        yield f'<div class="empty">{_waiting(state, now)}</div>'
    drawn = {shown.name, *(other.name for other in shown.companions)} if shown else set()
    others = summary.values(state, but=drawn)
    if others:
        mean = " (mean of ranks)" if state.world_size > 1 else ""
        yield f'<div class="soft">{escape(" · ".join(others) + mean)}</div>'
    if shown:
        for words in filter(None, (summary.bad_values(shown), shown.trouble)):
            yield f'<div class="bad-word">{escape(cut(shown.name, NAME_LENGTH))}: {words}</div>'


def _waiting(state: RunState, now: float) -> str:
    if state.status == "starting":
        patience = "<br>the first launch of a kernel loads PyTorch, the next ones are quick"
        slow = summary.elapsed(state, now) > _SLOW_START
        return f"starting {count(state.world_size, 'worker')} …{patience if slow else ''}"
    return "waiting for the first value: <code>ddpnb.log(loss=…)</code> in the function draws a curve here"


def _settings(state: RunState) -> Iterable[str]:
    """What was changed so far; what can be changed are widgets above it."""
    if not state.offered:
        yield '<div class="empty">no setting is known: a Loop offers its optimizer\'s, and '
        yield '<code>ddpnb.setting("lr", 0.1)</code> in the function another</div>'
    for change in reversed(state.applied[-_NUM_CHANGES:]):
        before = "" if change.before is None else f"{setting(change.before)} "
        words = f"{cut(change.name, NAME_LENGTH)} {before}→ {setting(change.value)} from step {change.step:,} on"
        yield f'<div class="soft">{escape(words)}</div>'


def _said(aspect: Aspect) -> Iterable[str]:
    if aspect.said:
        yield f'<div class="bad-word" role="alert">{escape(cut(aspect.said, NOTE_LENGTH))}</div>'


def _kept(state: RunState) -> Iterable[str]:
    words = summary.kept(state)
    if words:
        yield f'<div class="soft">{escape(" · ".join(words))}</div>'


def _notes(state: RunState) -> Iterable[str]:
    for note in state.notes[-_NUM_NOTES:]:
        yield f'<div class="soft">note: {escape(cut(note, NOTE_LENGTH))}</div>'
