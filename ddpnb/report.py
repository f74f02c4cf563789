"""A failed or hung run in words, for that moment: which rank, what happened, where, and what the others were doing.

Pure: state -> text. Cells are named as IPython names them, `Cell In[3], line 4`.

Runs in: kernel
"""

from __future__ import annotations

import signal
from collections.abc import Iterable

from .messages import Exited, Lost, Raised
from .stacks import Kind, Standing, place, stack_text, standing, with_cells
from .state import Failure, RankState, RunState

_OUTPUT_LINES = 5
_DUMP_LINES = 110  # faulthandler writes at most 100 frames, and a few lines around them


def report(state: RunState) -> str:
    """The whole text of a failed run; its first line is enough to know what happened.

    Raises:
        ValueError: the run has not failed.
    """
    if state.problem is not None:
        has_begun = any(rank.pid is not None for rank in state.ranks)
        what = "the workers of {} could not be looked after" if has_begun else "{} could not be launched"
        return f"{what.format(state.name)}: {state.problem}"
    failure = state.first_failure
    if failure is None:
        raise ValueError(f"{state.name} has not failed")
    parts = [headline(state), _details(state, failure), _others(state, failure)]
    return "\n\n".join(part for part in parts if part)


def headline(state: RunState) -> str:
    """One line: the rank to blame, what happened, and where."""
    failure = state.first_failure
    if failure is None:
        return state.problem or ""
    match failure.witness:
        case Raised() as raised:
            where = f" in {place(state.cells, raised.location)}" if raised.location else _PHASES.get(raised.phase, "")
            said = raised.text.strip().partition("\n")[0]
            return f"rank {raised.rank} raised {raised.type_name}{where}" + (f": {said}" if said else "")
        case Exited() as exited:
            return f"rank {exited.rank} {_death(exited)}"
        case Lost() as lost:
            return f"failed on node {lost.node_rank}: {lost.text}"


_PHASES = {
    "unpacking": " while the function was being unpacked",
    "rendezvous": " while the process group was being made",
}


def _details(state: RunState, failure: Failure) -> str:
    match failure.witness:
        case Raised() as raised:
            return with_cells(raised.traceback.rstrip(), state.cells) + _early_leavers(state, failure)
        case Exited() as exited:
            lines, dump = _last_words(state.rank(exited.rank))
            said = "\n".join(f"    {line}" for line in lines)
            stood = stack_text(dump, state.cells)
            stack = f"\n\nIt stood at:\n{stood}" if stood else ""
            last = f"\n\nIts last output:\n{with_cells(said, state.cells)}" if lines else ""
            return _explain(exited) + stack + last
        case Lost():
            return "The run on that node has the whole report."


def _last_words(rank: RankState) -> tuple[list[str], str]:
    """The last lines that a dead rank printed, and the stack that `faulthandler` wrote after them in a crash."""
    lines = rank.output.lines(_OUTPUT_LINES + _DUMP_LINES)
    crash = next((index for index, line in enumerate(lines) if line.startswith("Fatal Python error")), len(lines))
    return lines[max(0, crash - _OUTPUT_LINES) : crash], "\n".join(lines[crash:])


def _death(exited: Exited) -> str:
    code = exited.exitcode
    if code >= 0:
        return f"ended with exit code {code} before the function returned"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "an unknown signal"
    return f"was killed by {name} (signal {-code})"


def _explain(exited: Exited) -> str:
    held = f" It had held up to {_size(exited.memory)} of memory." if exited.memory else ""
    match -exited.exitcode:
        case signal.SIGKILL if exited.oom_kills:
            return f"The system's out-of-memory killer ended it: memory ran out.{held} {_LESS_MEMORY}"
        case signal.SIGKILL:
            return f"Somebody killed it, or memory ran out and the system did.{held} {_LESS_MEMORY}"
        case signal.SIGSEGV | signal.SIGBUS | signal.SIGABRT | signal.SIGFPE | signal.SIGILL:
            return f"The process crashed in compiled code.{held}"
        case code if code > 0:
            return f"Nothing in ddpnb sent that signal.{held}"
        case _:
            return "The process left without a word: os._exit(), or a library that ends the process."


_LESS_MEMORY = "A smaller batch, fewer workers or fewer DataLoader workers need less."


def _early_leavers(state: RunState, failure: Failure) -> str:
    if not failure.is_echo:
        return ""
    gone = [str(rank.rank) for rank in state.ranks if rank.returned]
    if not gone:
        return ""
    who = f"Rank {gone[0]} has" if len(gone) == 1 else f"Ranks {', '.join(gone)} have"
    return (
        f"\n\n{who} already returned from the function, while rank {failure.rank} waited for all ranks in a "
        "collective: every rank must make the same collective calls."
    )


def _others(state: RunState, failure: Failure) -> str:
    lines = [f"  rank {rank.rank}: {_doing(state, rank)}" for rank in state.ranks if rank.rank != failure.rank]
    return "\n".join(("Meanwhile", *lines)) if lines else ""


def _doing(state: RunState, rank: RankState) -> str:
    if rank.raised:
        raised = rank.raised
        what = "raised in its wake" if raised.is_echo else "raised as well"
        where = f" in {place(state.cells, raised.location)}" if raised.location else ""
        return f"{what} {raised.type_name}{where}: {raised.text.strip().partition(chr(10))[0]}"
    if rank.returned:
        return "had returned"
    if rank.exited and not rank.exited.ended_by_us:
        return _death(rank.exited)
    if rank.stack:
        return _stood(standing(state, rank))
    return _BUSY[rank.phase]


_BUSY = {
    "starting": "was starting",
    "unpacking": "was unpacking the function",
    "rendezvous": "was making the process group",
    "running": "was in the function; it did not say where",
    "threads": "had finished the function and waited for its threads",
    "leaving": "was leaving",
}
_LAST = {phase: words.removeprefix("was ").partition(";")[0] for phase, words in _BUSY.items()}


def _stood(stands: Standing) -> str:
    if stands.place is None:
        return f"stood in {stands.where}"
    inside = f"{stands.call}(), " if stands.call else ""
    return f"stood in {inside}{stands.lines}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


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
    lines += [f"  rank {rank.rank}: {_doing(state, rank)}" for rank in state.ranks if rank.has_reported]
    return "\n\n".join([hang_headline(state), "\n".join(lines), *_advice(state, found), _WAIT_OR_END])


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
    return [(rank, standing(state, rank)) for rank in state.ranks if not rank.has_reported]


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
            last = f"in {at}" if rank.stack else _LAST[rank.phase]
            resume = f"os.kill({rank.pid}, signal.SIGCONT) lets it go on"
            return f"its process was stopped from outside (SIGSTOP); last seen {last}\n      {resume}"
        case "loader":
            workers = [f"\n    its DataLoader worker: {worker.lines}" for worker in stands.workers]
            return f"in the DataLoader, {stands.lines}" + "".join(workers)
        case "busy":
            return f"in {at}"
        case "silent":
            return f"does not say where it stands; last seen {_LAST[rank.phase]}"
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


def ranks_text(ranks: list[int]) -> str:
    """ "rank 1", "ranks 0, 2", "ranks 0, 1, 2 and 13 more"."""
    named = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {named}{more}"


_MOST_NAMED = 6
