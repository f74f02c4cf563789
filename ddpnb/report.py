"""A failed or hung run in words, for that moment: which rank, what happened, where, and what the others were doing.

Pure: state -> text. Cells are named as IPython names them, `Cell In[3], line 4`.

Runs in: kernel
"""

from __future__ import annotations

from collections.abc import Iterable

from .autopsy import BUSY, autopsy, doing
from .stacks import Kind, Standing, ranks_text, standing
from .state import RankState, RunState


def report(state: RunState) -> str:
    """The whole text of a failed run; its first line is enough to know what happened, its last say what helps.

    Raises:
        ValueError: the run has not failed.
    """
    found = autopsy(state)
    others = "\n".join(["Meanwhile", *(f"  {line}" for line in found.others)]) if found.others else ""
    values = "\n".join(["Last values", *(f"  {line}" for line in found.values)]) if found.values else ""
    cure = f"Likely cause: {found.cure.cause}\nWhat helps: {found.cure.cure}" if found.cure else ""
    return "\n\n".join(part for part in (found.headline, found.details, others, values, cure) if part)


# ---- a run that hangs

_URGENCY: tuple[Kind, ...] = ("halted", "loader", "busy", "silent", "waits")
"""Who is to be looked at first: a rank that waits for others is not the cause."""


def hang(state: RunState) -> str:
    """The whole text of a run that hangs; its first line is enough to know who is waited for.

    Raises:
        ValueError: the run does not hang.
    """
    found = _standings(state)
    lines = [f"  rank {rank.rank}{_step(state, rank)}: {_stands(rank, stands)}" for rank, stands in found]
    lines += [f"  rank {rank.rank}: {doing(state, rank)}" for rank in state.ranks if _is_over(rank)]
    is_ending = state.ended is not None or state.asked is not None
    choices = [] if is_ending else [_WAIT_OR_END]
    return "\n\n".join([hang_headline(state), "\n".join(lines), *_advice(state, found), *choices])


def hang_headline(state: RunState) -> str:
    """One line: how long, who is waited for and where, who waits.

    no step for 12 s: rank 1 in the DataLoader, Cell In[7], line 12; rank 0 waits in all_reduce()
    """
    if state.hung is None:
        raise ValueError(f"{state.name} does not hang")
    found = _standings(state)
    groups: dict[tuple[int, str | None, str | None], list[tuple[int, Standing]]] = {}  # those that stand alike
    for rank, stands in found:
        place = stands.place if stands.kind != "waits" or _is_mismatch(found) else None
        groups.setdefault((_URGENCY.index(stands.kind), stands.call, place), []).append((rank.rank, stands))
    words = [_brief(members, place) for (_, _, place), members in sorted(groups.items(), key=_urgency)]
    left = [rank.rank for rank in state.ranks if rank.returned]
    gone = [f"{ranks_text(left)} returned already"] if left else []
    return f"no step for {state.hung.silence:.0f} s: {'; '.join([*gone, *words])}"


def _standings(state: RunState) -> list[tuple[RankState, Standing]]:
    return [(rank, standing(state, rank)) for rank in state.ranks if not _is_over(rank)]


def _is_over(rank: RankState) -> bool:
    """Whether it came to an end by itself; one that was ended for hanging is told of as it hung."""
    return rank.has_reported and not (rank.exited and rank.exited.ended_by_us and not rank.raised and not rank.returned)


def _is_mismatch(found: list[tuple[RankState, Standing]]) -> bool:
    """Whether all ranks wait, and not all in the same line."""
    return all(stands.kind == "waits" for _, stands in found) and len({stands.where for _, stands in found}) > 1


def _urgency(group: tuple[tuple[int, str | None, str | None], list[tuple[int, Standing]]]) -> tuple[int, int]:
    (urgency, _, _), members = group
    return urgency, members[0][0]


def _brief(members: list[tuple[int, Standing]], place: str | None) -> str:
    stands = members[0][1]
    who, is_one = ranks_text([rank for rank, _ in members]), len(members) == 1
    match stands.kind:
        case "halted":
            return f"{who} stopped (SIGSTOP)"
        case "loader":
            return f"{who} in the DataLoader" + (f", {place}" if place else "")
        case "busy":
            return f"{who} at {place}" if place else f"{who} in {stands.where}"
        case "silent":
            return f"{who} {'does' if is_one else 'do'} not say where"
        case "waits":
            inside = f" in {stands.call}()" if stands.call else ""
            return f"{who} wait{'s' * is_one}{inside}" + (f", {place}" if place else "")


def _stands(rank: RankState, stands: Standing) -> str:
    at = f"{stands.call}(), {stands.lines}" if stands.call and stands.place else stands.lines
    match stands.kind:
        case "halted":
            last = f"in {at}" if rank.stack else BUSY[rank.phase]
            resume = f"os.kill({rank.pid}, signal.SIGCONT) lets it go on"
            return f"its process was stopped from outside (SIGSTOP); last seen {last}\n      {resume}"
        case "loader":
            workers = [f"\n    its DataLoader worker: {worker.lines}" for worker in stands.workers]
            return f"in the DataLoader, {stands.lines}" + "".join(workers)
        case "busy":
            return f"in {at}"
        case "silent":
            return f"does not say where it stands; last seen {BUSY[rank.phase]}"
        case "waits":
            return f"waits for other ranks in {at}"


def _step(state: RunState, rank: RankState) -> str:
    """The newest step that it logged."""
    last = [ranks[rank.rank].last for ranks in state.history.values() if rank.rank in ranks]
    steps = [point[0] for point in last if point]
    return f" (step {max(steps):,})" if steps else ""


def _advice(state: RunState, found: list[tuple[RankState, Standing]]) -> Iterable[str]:
    if any(rank.returned for rank in state.ranks):
        yield f"Who has returned makes no more collective calls. {_SAME_CALLS}"
    elif _is_mismatch(found):
        yield f"The ranks wait for each other in different collectives. {_SAME_CALLS} {_USUAL_CAUSES}"
    elif len(found) > 1 and all(stands.kind == "waits" for _, stands in found):
        elsewhere = ", or a rank of another node does not come" if len(state.ranks) < state.world_size else ""
        yield f"All wait in one line: some have made fewer calls before it{elsewhere}. {_SAME_CALLS} {_USUAL_CAUSES}"


_SAME_CALLS = "Every rank must make the same collective calls in the same order."
_USUAL_CAUSES = "A call under `if rank == 0`, or a loop that is longer on one rank, is the usual cause."
_WAIT_OR_END = (
    "Nothing is ended by this. run.keep_waiting() waits twice as long before it says so again, run.stacks() tells "
    "where each rank stands now, run.kill() ends the run."
)
