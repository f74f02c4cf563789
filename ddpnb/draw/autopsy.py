"""A failed run as HTML: within its card, and as the page that takes the card's place.

Runs in: kernel
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from html import escape

from ..state import RunState
from . import summary
from .curves import main_name
from .words import number


def has_failed(state: RunState) -> bool:
    """Whether there is something to report."""
    return state.first_failure is not None or state.problem is not None


def autopsy(state: RunState) -> Iterable[str]:
    """The report; nothing where nothing failed."""
    text = summary.failure(state)
    if text:
        yield f'<pre class="bad">{escape(text)}</pre>'


def last_page(state: RunState, picture: bytes) -> str:
    """What a page shows once a run has failed: its figure and its report, by themselves, without style or script."""
    name = main_name(state)
    words = f"{state.name}, {summary.status(state)}"
    if name:
        words += f": {name} {number(summary.newest(state, name))}"
    source = f"data:image/png;base64,{b64encode(picture).decode()}"
    image = (
        f'<img alt="{escape(words)}" width="760" src="{source}"/>' if state.history else f"<div>{escape(words)}</div>"
    )
    return f"{image}<pre>{escape(summary.failure(state) or '')}</pre>"
