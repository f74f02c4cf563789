"""The ranks of a run as a table: how each spends its steps, how fast it is, what it holds, what it is busy with.

Runs in: kernel
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ..state import RankState, RunState
from .pace import RankPace, Straggler, paces, slowest
from .palette import look
from .words import number, seconds, size

MOST_BELOW = 8
"""More ranks than this have their table in a tab of its own only."""

_PARTS = {"data": "data", "compute": "compute", "wait": "waiting for others"}  # {class: words}

_BUSY = {
    "starting": "starting",
    "unpacking": "unpacking the function",
    "rendezvous": "making the process group",
    "running": "running",
    "threads": "waiting for its threads",
    "leaving": "leaving",
}


def ranks_below(state: RunState) -> Iterable[str]:
    """What stands below the curve: the table of few ranks, else who is slowest, once steps have been timed."""
    timed = paces(state)
    if timed and len(state.ranks) <= MOST_BELOW:
        yield _table(state, timed, is_whole=False)
    elif (straggler := slowest(state)) is not None:
        yield f'<div class="slow">rank {straggler.rank} is the {straggler.words}</div>'


def ranks_tab(state: RunState) -> Iterable[str]:
    """The table with all that is known of each rank."""
    yield _table(state, paces(state), is_whole=True)


def _table(state: RunState, timed: tuple[RankPace, ...], *, is_whole: bool) -> str:
    known = {pace.rank: pace for pace in timed}
    straggler = slowest(state)
    longest = max((pace.step for pace in timed), default=0.0)
    rows = (
        _row(rank, known.get(rank.rank), longest, _remark(rank, straggler, is_whole=is_whole), is_whole=is_whole)
        for rank in state.ranks
    )
    more = '<th scope="col">device</th>' if is_whole else ""
    return (
        f'<div class="scroll"><table class="ranks{" whole" if is_whole else ""}" aria-label="ranks">'
        '<thead><tr><th scope="col">rank</th>'
        f'<th scope="col" class="bars">{_key(state, timed)}</th><th scope="col" class="figure">step</th>'
        f'<th scope="col" class="figure">samples/s</th><th scope="col" class="figure">memory</th>{more}'
        '<th scope="col"><span class="unseen">remarks</span></th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _key(state: RunState, timed: tuple[RankPace, ...]) -> str:
    """What the colours of the bars mean; only those parts that somebody has."""
    if not timed:
        return "no step was timed yet"
    parts = [part for part in _PARTS if part != "wait" or any(pace.wait is not None for pace in timed)]
    words = " ".join(f'<span><i class="key {part}"></i>{_PARTS[part]}</span>' for part in parts)
    on_gpu = any((rank.device or "").startswith("cuda") for rank in state.ranks)
    return words + (" (waiting for others: CPU only)" if on_gpu and "wait" not in parts else "")


def _row(rank: RankState, pace: RankPace | None, longest: float, remark: str, *, is_whole: bool) -> str:
    memory = rank.paced.memory if rank.paced else None
    cells = [
        f'<td class="bars">{_split(pace, longest) if pace else ""}</td>',
        f'<td class="figure">{seconds(pace.step) if pace else ""}</td>',
        f'<td class="figure">{_samples(pace)}</td>',
        f'<td class="figure">{size(memory) if memory else ""}</td>',
        *([f"<td>{escape(rank.device or '')}</td>"] if is_whole else []),
        f"<td>{remark}</td>",
    ]
    swatch = f'<i class="swatch" style="background:var(--ddpnb-h{look(rank.rank).hue})"></i>'
    return f'<tr><th scope="row">{swatch}{rank.rank}</th>{"".join(cells)}</tr>'


def _samples(pace: RankPace | None) -> str:
    return (
        ""
        if pace is None or pace.samples is None
        else f"{pace.samples:,.0f}"
        if pace.samples >= 10
        else number(pace.samples)
    )


def _split(pace: RankPace, longest: float) -> str:
    """A bar as long as the step, cut into its parts."""
    shares = {"data": pace.data, "compute": pace.compute, "wait": pace.wait or 0.0}
    words = ", ".join(f"{_PARTS[part]} {seconds(share)}" for part, share in shares.items() if share > 0)
    widths = ((part, share / longest if longest > 0 else 0.0) for part, share in shares.items())
    bars = "".join(
        f'<span class="{part}" style="width:{width:.1%}"></span>' for part, width in widths if width >= 0.001
    )
    return f'<div class="split" role="img" title="{words}" aria-label="{words}">{bars}</div>'


def _remark(rank: RankState, straggler: Straggler | None, *, is_whole: bool) -> str:
    """What is out of the ordinary, in words; in its own tab what a rank is busy with in any case."""
    if rank.halted:
        return '<span class="bad-word">stopped (SIGSTOP)</span>'
    if straggler is not None and straggler.rank == rank.rank:
        return f'<span class="slow">{straggler.words}</span>'
    return f'<span class="soft">{_doing(rank)}</span>' if is_whole else ""


def _doing(rank: RankState) -> str:
    if rank.raised:
        return "failed"
    if rank.returned:
        return "returned"
    if rank.exited:
        return "gone"
    if rank.paused:
        return "paused"
    return "stopping" if rank.stopping else _BUSY[rank.phase]
