"""A run as one piece of HTML: status, progress, curve, values, the last lines of output, the failure.

It uses JupyterLab's theme variables and falls back to plain colours elsewhere. Everything that a user wrote is
escaped.

Runs in: kernel
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from html import escape

from ..state import RunState
from . import summary
from .curves import Curve, curve, main_name
from .palette import DARK, LIGHT, look
from .svg import STROKES, svg
from .svg import STYLE as SVG_STYLE
from .words import count, number

_NUM_LINES = 8
_NUM_NOTES = 4
_SLOW_START = 1.5
"""Seconds after which a start is explained."""

_DARK = "".join(
    [
        *(f"--ddpnb-h{hue}:{colour};" for hue, colour in enumerate(DARK)),
        "--ddpnb-good:#4cc27a;--ddpnb-wait:#f0b429;--ddpnb-bad:#ff6b6b;--ddpnb-off:#9aa0a6;",
        "--ddpnb-page:#111;--ddpnb-ink-0:#f0f0f0;--ddpnb-soft-0:#a8a8a8;--ddpnb-line-0:#333;",
    ]
)
_LIGHT = "".join(
    [
        *(f"--ddpnb-h{hue}:{colour};" for hue, colour in enumerate(LIGHT)),
        "--ddpnb-good:#2e9e57;--ddpnb-wait:#d9920a;--ddpnb-bad:#d32f2f;--ddpnb-off:#8a8f98;",
        "--ddpnb-page:#fff;--ddpnb-ink-0:#1f1f1f;--ddpnb-soft-0:#616161;--ddpnb-line-0:#e4e4e4;",
    ]
)

# The theme's own attribute decides; the system's wish counts only on a page that has neither JupyterLab's nor
# VS Code's mark.
_UNMARKED = "body:not([data-jp-theme-light]):not(.vscode-light):not(.vscode-high-contrast-light)"

_STYLE = "".join(
    [
        ".ddpnb{" + _LIGHT + "}",
        '[data-jp-theme-light="false"] .ddpnb,body.vscode-dark .ddpnb,body.vscode-high-contrast .ddpnb{' + _DARK + "}",
        "@media(prefers-color-scheme:dark){" + _UNMARKED + " .ddpnb{" + _DARK + "}}",
        ".ddpnb{--ddpnb-ink:var(--jp-ui-font-color0,var(--ddpnb-ink-0));--ddpnb-soft:var(--jp-ui-font-color2,var(--ddpnb-soft-0));",
        "--ddpnb-line:var(--jp-border-color2,var(--ddpnb-line-0));--ddpnb-well:rgba(128,128,128,.13);--ddpnb-grid:rgba(128,128,128,.24);",
        "--ddpnb-bar:var(--jp-brand-color1,#1976d2);",
        "box-sizing:border-box;max-width:780px;margin:4px 0;padding:12px 14px 14px;",
        "border:1px solid var(--ddpnb-line);border-radius:6px;",
        "background:var(--jp-layout-color1,var(--ddpnb-page));color:var(--ddpnb-ink);",
        "font:13px/1.5 var(--jp-ui-font-family,system-ui,sans-serif);font-variant-numeric:tabular-nums}",
        ".ddpnb b{font-weight:600;margin-right:9px;font-size:14px}",
        ".ddpnb i{display:inline-block;width:9px;height:9px;border-radius:50%;margin-right:8px}",
        ".ddpnb .soft,.ddpnb .wait{color:var(--ddpnb-soft)}",
        ".ddpnb .soft{overflow-wrap:anywhere}",
        ".ddpnb .wait{padding:56px 0;text-align:center}",
        ".ddpnb .bar{height:6px;margin:8px 0 6px;border-radius:3px;background:var(--ddpnb-well);overflow:hidden}",
        ".ddpnb .bar div{height:100%;border-radius:3px}",
        ".ddpnb svg{margin:8px 0 6px}.ddpnb img{display:block;width:100%;border-radius:4px}",
        ".ddpnb pre{margin:10px 0 0;padding:7px 10px;border-radius:4px;background:var(--ddpnb-well);",
        "color:var(--ddpnb-ink);font:12px/1.45 var(--jp-code-font-family,monospace);",
        "overflow:hidden;text-overflow:ellipsis}",
        ".ddpnb pre.bad{border:1px solid var(--ddpnb-bad);background:none;max-height:340px;overflow:auto}",
        *(f".ddpnb pre .h{hue}{{color:var(--ddpnb-h{hue})}}" for hue in range(len(LIGHT))),
        SVG_STYLE,
    ]
)

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


def card(state: RunState, now: float, *, picture: bytes | None = None) -> str:
    """The whole card.

    Args:
        state: What is known of the run.
        now: Monotonic time, for what has elapsed.
        picture: The final figure as PNG, which says all that stands above the output. A reloaded page shows it.
    """
    name = main_name(state)
    shown = curve(state, name, STROKES) if name else None
    top = (
        [_image(state, name, picture)]
        if picture
        else [*_head(state, now), *_curve(state, shown, now), *_values(state, shown)]
    )
    return _framed([*top, *_kept(state), *_output(state), *_notes(state), *_failure(state)])


def trouble(label: str, text: str) -> str:
    """A card that could not be drawn, and why."""
    said = f"{label}: the live view has failed; the run goes on, run.result() waits for it"
    return _framed([f"<div>{escape(said)}</div>", f'<pre class="bad">{escape(text)}</pre>'])


def _framed(rows: Iterable[str]) -> str:
    return f'<style>{_STYLE}</style><div class="ddpnb">{"".join(rows)}</div>'


def _head(state: RunState, now: float) -> Iterable[str]:
    dot = f'<i style="background:var(--ddpnb-{_HUES[state.status]})"></i>'
    words = " · ".join([summary.status(state), *summary.place(state)])
    yield f'<div>{dot}<b>{escape(state.name)}</b> <span class="soft">{escape(words)}</span></div>'
    yield from _bar(state)
    yield f'<div class="soft">{escape(" · ".join(summary.facts(state, now)))}</div>'


def _bar(state: RunState) -> Iterable[str]:
    done = summary.fraction(state)
    if done is not None:
        hue = "bad" if state.status == "failed" else "bar"
        yield f'<div class="bar" role="progressbar" aria-valuemax="100" aria-valuenow="{100 * done:.0f}">'
        yield f'<div style="width:{done:.1%};background:var(--ddpnb-{hue})"></div></div>'


def _curve(state: RunState, shown: Curve | None, now: float) -> Iterable[str]:
    if shown and not shown.is_empty:
        yield svg(shown)
    elif state.ended is None and not shown:
        yield f'<div class="wait">{_waiting(state, now)}</div>'


def _waiting(state: RunState, now: float) -> str:
    if state.status == "starting":
        patience = "<br>the first launch of a kernel loads PyTorch, the next ones are quick"
        slow = summary.elapsed(state, now) > _SLOW_START
        return f"starting {count(state.world_size, 'worker')} …{patience if slow else ''}"
    return "waiting for the first value: <code>ddpnb.log(loss=…)</code> in the function draws a curve here"


def _image(state: RunState, name: str | None, picture: bytes) -> str:
    words = f"{state.name}, {summary.status(state)}"
    if name:
        words += ": " + ", ".join([f"{name} {number(summary.newest(state, name))}", *summary.values(state, but=name)])
    return f'<img alt="{escape(words)}" src="data:image/png;base64,{b64encode(picture).decode()}"/>'


def _values(state: RunState, shown: Curve | None) -> Iterable[str]:
    others = summary.values(state, but=shown.name if shown else None)
    if others:
        mean = " (mean of ranks)" if state.world_size > 1 else ""
        yield f'<div class="soft">{escape(" · ".join(others) + mean)}</div>'
    bad = summary.bad_values(shown) if shown else None
    if shown and bad:
        yield f'<div style="color:var(--ddpnb-bad)">{escape(shown.name)}: {bad}</div>'


def _kept(state: RunState) -> Iterable[str]:
    words = summary.kept(state)
    if words:
        yield f'<div class="soft">{escape(" · ".join(words))}</div>'


def _output(state: RunState) -> Iterable[str]:
    last = summary.last_lines(state, _NUM_LINES)
    rows = [f'<span class="h{look(rank).hue}">{rank}│</span> {escape(line)}' for rank, line in last.lines]
    if last.hidden_ranks:
        rows.append(f'<span class="soft">and {count(last.hidden_ranks, "more rank")}: run.output()</span>')
    if rows:
        yield f"<pre>{chr(10).join(rows)}</pre>"


def _notes(state: RunState) -> Iterable[str]:
    for note in state.notes[-_NUM_NOTES:]:
        yield f'<div class="soft">note: {escape(note)}</div>'


def _failure(state: RunState) -> Iterable[str]:
    text = summary.failure(state)
    if text:
        yield f'<pre class="bad">{escape(text)}</pre>'
