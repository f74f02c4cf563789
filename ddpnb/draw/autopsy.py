"""A run that has failed, or hangs, as HTML: within its card, and as the page that takes the card's place.

Runs in: kernel
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from html import escape

from ..autopsy import autopsy
from ..report import hang
from ..state import RunState
from . import summary
from .aspect import Aspect
from .curves import main_name
from .words import NAME_LENGTH, NOTE_LENGTH, count, cut, number, whole

_LENGTH = 20_000
"""Characters shown of a traceback; `run.result()` raises all of it."""


def has_failed(state: RunState) -> bool:
    """Whether there is something to report."""
    return state.first_failure is not None or state.problem is not None


def failure(state: RunState) -> Iterable[str]:
    """What failed, where, why, and what helps; the traceback in full, what the others did folded.

    Nothing where nothing failed.
    """
    if not has_failed(state):
        return
    found = autopsy(state)
    yield f'<div class="failure" role="alert"><div class="bad-word"><b>{escape(cut(found.headline, 2000))}</b></div>'
    if found.place and found.source:
        yield f"<pre>{escape(found.place)}: <b>{escape(cut(found.source, NOTE_LENGTH))}</b></pre>"
    if found.cure:
        yield f"<div>Likely cause: {escape(found.cure.cause)}</div><div>What helps: {escape(found.cure.cure)}</div>"
    if found.values:
        yield f'<div class="soft">Last values: {escape(cut("; ".join(found.values), NOTE_LENGTH))}</div>'
    if found.details:
        yield f'<details open=""><summary>Traceback</summary><pre>{escape(cut(found.details, _LENGTH))}</pre></details>'
    if found.others:
        lines = escape(cut("\n".join(found.others), _LENGTH))
        yield f"<details><summary>What the others did ({count(len(found.others), 'line')})</summary>"
        yield f"<pre>{lines}</pre></details>"
    yield "</div>"


def hanging(state: RunState, aspect: Aspect) -> Iterable[str]:
    """Who is waited for and where each rank stands, while a run hangs; beside it are buttons."""
    if state.hung is not None and state.ended is None:
        first, _, rest = hang(state).partition("\n")
        yield f'<div class="hung" role="alert"><b>{escape(first)}</b><pre>{escape(rest.strip(chr(10)))}</pre>'
        if aspect.stacks:
            yield f"<div>Stacks</div><pre>{escape(cut(aspect.stacks, _LENGTH))}</pre>"
        yield "</div>"


def last_page(state: RunState, picture: bytes) -> str:
    """What a page shows once a run has failed: its figure and its report, by themselves, without style or script."""
    name = main_name(state)
    words = f"{cut(state.name, NAME_LENGTH)}, {summary.status(state)}"
    if name:
        words += f": {cut(name, NAME_LENGTH)} {number(summary.newest(state, name))}"
    source = f"data:image/png;base64,{b64encode(picture).decode()}"
    image = (
        f'<img alt="{escape(words)}" width="760" src="{source}"/>' if state.history else f"<div>{escape(words)}</div>"
    )
    return whole(image + "".join(failure(state)))
