"""The newest lines that ranks have printed, as HTML; all of them, or those in which something is found.

Runs in: kernel
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from html import escape

from ..state import RankState, RunState
from . import summary
from .aspect import Aspect
from .palette import look
from .words import NAME_LENGTH, count, cut

FEW_LINES = 5
"""Lines below the curve."""
_MANY_LINES = 24
_FILE_LENGTH = 4_000_000
"""Characters of a download, of all ranks together."""


def last_lines(state: RunState, limit: int = FEW_LINES) -> Iterable[str]:
    """The ranks' newest lines, in one block; nothing where nothing was printed."""
    last = summary.last_lines(state, limit)
    rows = [_row(rank, line) for rank, line in last.lines]
    if last.hidden_ranks:
        rows.append(f'<span class="soft">and {count(last.hidden_ranks, "more rank")}: run.output()</span>')
    if rows:
        yield _block(rows)


def output_tab(state: RunState, aspect: Aspect) -> Iterable[str]:
    """The tab: what the chosen ranks wrote last."""
    ranks = [each for each in state.ranks if aspect.rank in (None, each.rank)]
    if not any(each.output.lines(1) for each in ranks):
        yield '<div class="empty">nothing was printed</div>'
    elif aspect.search:
        yield from _found(ranks, aspect.search)
    elif aspect.rank is None:
        yield from last_lines(state, _MANY_LINES)
    else:
        yield _block(_row(each.rank, summary.clean(line)) for each in ranks for line in each.output.lines(_MANY_LINES))
    dropped = sum(each.output.num_dropped for each in ranks)
    if dropped:
        where = "the run's folder has all of it" if state.folder else "a run with a run_dir keeps all of it"
        yield f'<div class="soft">{dropped:,} earlier characters are no longer here; {where}</div>'


def _found(ranks: list[RankState], search: str) -> Iterable[str]:
    found = [(each.rank, line) for each in ranks for line in matches(each.output.text(), search)]
    yield f'<div class="soft">{count(len(found), "line")} with “{escape(cut(search, NAME_LENGTH))}”</div>'
    if found:
        yield _block(_row(rank, summary.clean(line)) for rank, line in found[-_MANY_LINES:])


def matches(text: str, search: str) -> list[str]:
    """The lines of `text` with `search` in them, upper and lower case alike."""
    wanted = search.lower()
    return [line for line in text.splitlines() if wanted in line.lower()]


def download(state: RunState, rank: int | None) -> str:
    """A link that holds the output itself, of one rank or, by turns, of all."""
    ranks = [each for each in state.ranks if rank in (None, each.rank)]
    most = _FILE_LENGTH // len(ranks)
    parts = [
        f"---- rank {each.rank}\n{_newest(each, most)}\n" if rank is None else _newest(each, most) for each in ranks
    ]
    data = "".join(parts).encode(errors="replace")
    name = f"{state.name}-output" if rank is None else f"{state.name}-rank-{rank}"
    safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)
    uri = f"data:text/plain;charset=utf-8;base64,{b64encode(data).decode()}"
    return f'<a download="{escape(safe)}.txt" href="{uri}">{escape(safe)}.txt, {len(data) / 1000:,.0f} kB</a>'


def _newest(rank: RankState, most: int) -> str:
    text = rank.output.text()
    return text if len(text) <= most else f"[{len(text) - most:,} earlier characters left out]\n{text[-most:]}"


def _row(rank: int, line: str) -> str:
    return f'<span class="h{look(rank).hue}">{rank}│</span> {escape(line)}'


def _block(rows: Iterable[str]) -> str:
    return f"<pre>{chr(10).join(rows)}</pre>"
