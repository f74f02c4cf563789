"""What is known of a run: `RunState`, and `fold(state, message)` which is all that ever changes it.

Pure seen from outside: no thread, no process, no torch, and the same messages give the same state, so that a view is
tested with a list of messages and a run can be replayed. Inside, curves and output are append-only and bounded, so
that folding the millionth message costs what the first did.

Runs in: kernel
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, assert_never

from .messages import (
    AnyMessage,
    Applied,
    Asked,
    Ended,
    Exited,
    Halted,
    Hung,
    Interrupted,
    Lost,
    Met,
    Metrics,
    Noted,
    Offered,
    Output,
    Paced,
    Paused,
    Phase,
    PhaseName,
    Progress,
    Raised,
    RankMessage,
    Recalled,
    Resumed,
    Returned,
    Saved,
    Stack,
    Started,
    Steered,
    Stopping,
    Unpaused,
    Woke,
)
from .series import Series

Status = Literal["starting", "running", "paused", "stopping", "finished", "failed", "stopped", "killed", "interrupted"]

OUTPUT_LIMIT = 1_000_000
"""Characters of output kept per rank; the oldest go first, and it is said."""

CAUSE_SETTLES = 0.1
"""Seconds that peers have to report once a cause is known."""
ECHO_SETTLES = 0.5
"""Seconds in which a cause may still follow, where only echoes are known."""

_SIGABRT = -6
_MOST_APPLIED = 1000
_MOST_EPOCHS = 1000
_TAIL = 10_000
"""Newest points in which the beginning of an epoch is looked for."""
_BEFORE_THE_FUNCTION: tuple[PhaseName, ...] = ("starting", "unpacking", "rendezvous")


class OutputTail:
    """The last `OUTPUT_LIMIT` characters that a rank wrote."""

    def __init__(self) -> None:
        self._chunks: deque[str] = deque()
        self._kept = 0
        self.num_dropped = 0
        """Characters that had to go."""

    def append(self, text: str) -> None:
        """Add text at the end."""
        self._chunks.append(text)
        self._kept += len(text)
        while self._kept > OUTPUT_LIMIT and len(self._chunks) > 1:
            dropped = len(self._chunks.popleft())
            self._kept -= dropped
            self.num_dropped += dropped

    def text(self) -> str:
        """All that is kept; says first how much is not."""
        note = f"[{self.num_dropped:,} earlier characters dropped]\n" if self.num_dropped else ""
        return note + "".join(self._copy())

    def lines(self, count: int) -> list[str]:
        """The last `count` lines, for a view: cost does not grow with what is kept."""
        recent, length = [], 0
        for chunk in reversed(self._copy()):
            recent.append(chunk)
            length += chunk.count("\n")
            if length > count:
                break
        return "".join(reversed(recent)).splitlines()[-count:]

    def _copy(self) -> tuple[str, ...]:
        while True:
            try:
                return tuple(self._chunks)
            except RuntimeError:  # the folding thread appended meanwhile
                continue


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What is known of one rank."""

    rank: int
    output: OutputTail = field(default_factory=OutputTail)
    pid: int | None = None
    """None before its first word."""
    device: str | None = None
    """None before its first word."""
    phase: PhaseName = "starting"
    running_since: float | None = None
    """Monotonic time at which the function was called; None before."""
    progress: tuple[Progress, ...] = ()
    """Loops under way, outermost first."""
    stopping: Stopping | None = None
    """Set once it has acknowledged a stop."""
    paused: Paused | None = None
    """Set while it stands still."""
    halted: bool = False
    """Its process was stopped from outside."""
    paced: Paced | None = None
    """How it spends its steps; None before it has said so."""
    returned: Returned | None = None
    raised: Raised | None = None
    exited: Exited | None = None
    """None while its process lives."""
    stack: str | None = None
    """Where it stood when last asked; None where it was never asked or did not answer."""

    @property
    def has_reported(self) -> bool:
        """Nothing more is to be expected of this rank."""
        return self.returned is not None or self.raised is not None or self.exited is not None


@dataclass(frozen=True, slots=True)
class Epoch:
    """Where an epoch began."""

    number: int
    """From 1."""
    step: int
    """The first step logged in it."""
    time: float
    """Monotonic time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What is known of a run. `history` and each rank's `output` grow in place; all else is replaced."""

    name: str
    world_size: int
    backend: str | None
    ranks: tuple[RankState, ...]
    """By position: this node's ranks."""
    cells: Mapping[str, str] = field(default_factory=dict)  # {file name of a cell's code: "Cell In[3]"}
    history: dict[str, dict[int, Series]] = field(default_factory=dict)  # {name: {rank: its points}}
    started: float = 0.0
    """Monotonic time of the launch."""
    ended: float | None = None
    """Monotonic time at which nothing was left; None while something is."""
    interrupted: bool = False
    """Its kernel ended before it did: what is known was read from its folder."""
    folder: str | None = None
    """The run's folder, absolute; None: nothing is written."""
    asked: Literal["stop", "kill"] | None = None
    """What the kernel has asked of the workers."""
    lost: tuple[Lost, ...] = ()
    """Other nodes that have failed or gone."""
    pausing: bool = False
    """The kernel has asked the workers to pause; they do so once all have come to the same step."""
    paused_since: float | None = None
    """Monotonic time at which all ranks stood still; None while they do not."""
    paused_for: float = 0.0
    """Seconds of the pauses that are over."""
    went_on: float | None = None
    """Monotonic time at which the last pause was over; None before the first."""
    offered: Mapping[str, Offered] = field(default_factory=dict)  # {name: its present value}
    applied: tuple[Applied, ...] = ()
    """What `Run.set` has changed, oldest first."""
    epochs: tuple[Epoch, ...] = ()
    """Where rank 0's epochs began, oldest first; of very many some."""
    hung: Hung | None = None
    """Set while ranks make no steps that should."""
    saved: Saved | None = None
    """The last checkpoint; None before the first."""
    resumed: Resumed | None = None
    """What the run goes on from; None where it began afresh."""
    notes: tuple[str, ...] = ()
    problem: str | None = None
    """Why the run could not be launched or followed."""
    first_failure: Failure | None = None
    """The failure to blame as far as is known; None while all is well, and for what ends by our hand."""

    @property
    def status(self) -> Status:
        """One word for where the run is."""
        if self.ended is None:
            if self.asked or self.first_failure:
                return "stopping"
            if self.paused_since is not None:
                return "paused"
            return "starting" if any(rank.phase in _BEFORE_THE_FUNCTION for rank in self.ranks) else "running"
        if self.first_failure or self.problem:
            return "failed"
        if self.interrupted:
            return "interrupted"
        if all(rank.returned for rank in self.ranks):
            return "finished"
        return "killed" if self.asked == "kill" else "stopped"

    def rank(self, rank: int) -> RankState:
        """The state of one global rank."""
        return self.ranks[rank - self.ranks[0].rank]


@dataclass(frozen=True, slots=True)
class Failure:
    """How a rank failed: by an exception, by a death without a word, or on another node, which told."""

    witness: Raised | Exited | Lost
    is_echo: bool
    """Another rank's failure may have brought it about."""

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.witness.rank

    @property
    def time(self) -> float:
        """Monotonic time."""
        return self.witness.time

    @property
    def is_silent(self) -> bool:
        """The rank died without a word."""
        return isinstance(self.witness, Exited)


def new_state(
    name: str,
    world_size: int,
    *,
    backend: str | None,
    started: float,
    cells: Mapping[str, str] | None = None,
    here: range | None = None,
    folder: str | None = None,
) -> RunState:
    """The state before any message.

    Args:
        here: global ranks of this node; None: all are.
        folder: of the run, absolute; None: nothing is written.
    """
    return RunState(
        name=name,
        world_size=world_size,
        backend=backend,
        ranks=tuple(RankState(rank=rank) for rank in here or range(world_size)),
        started=started,
        cells=cells or {},
        folder=folder,
    )


def fold(state: RunState, message: AnyMessage) -> RunState:
    """The state after `message`."""
    match message:
        case Started():
            return _with_rank(state, message, pid=message.pid, device=message.device)
        case Phase():
            since = message.time if message.phase == "running" else state.rank(message.rank).running_since
            return _with_rank(state, message, phase=message.phase, running_since=since)
        case Output():
            state.rank(message.rank).output.append(message.text)
            return state
        case Metrics():
            series = state.history.setdefault(message.name, {}).setdefault(message.rank, Series())
            series.extend(message.steps, message.values, message.times)
            return state
        case Recalled():
            ranks = state.history.setdefault(message.name, {})
            ranks[message.rank] = _before(message, ranks.get(message.rank))
            return state
        case Progress():
            outer = state.rank(message.rank).progress[: message.depth]
            return _with_epoch(_with_rank(state, message, progress=(*outer, message)), message)
        case Stopping():
            return _with_rank(state, message, stopping=message)
        case Paused():
            return _paused(_with_rank(state, message, paused=message), message.time)
        case Unpaused():
            return _paused(_with_rank(state, message, paused=None), message.time)
        case Offered():
            return replace(state, offered={**state.offered, message.name: message})
        case Applied():
            offered = Offered(rank=message.rank, time=message.time, name=message.name, value=message.value)
            applied = (*state.applied, message)[-_MOST_APPLIED:]
            return replace(state, offered={**state.offered, message.name: offered}, applied=applied)
        case Paced():
            return _with_rank(state, message, paced=message)
        case Saved():
            return replace(state, saved=message)
        case Resumed():
            return replace(state, resumed=message)
        case Returned():
            return _with_rank(state, message, returned=message)
        case Raised():
            return _blamed(_with_rank(state, message, raised=message))
        case Exited():
            return _blamed(_with_rank(state, message, exited=message))
        case Stack():
            return _with_rank(state, message, stack=message.text)
        case Met():
            here = range(message.first_rank, message.first_rank + message.num_ranks)
            return replace(state, world_size=message.world_size, ranks=tuple(RankState(rank=rank) for rank in here))
        case Lost():
            return _blamed(replace(state, lost=(*state.lost, message)))
        case Asked():
            # A kill outranks the stop before it.
            return replace(state, asked="kill" if state.asked == "kill" else message.how, pausing=False)
        case Steered():
            return replace(state, pausing=message.how == "pause")
        case Halted():
            return _with_rank(state, message, halted=message.halted)
        case Hung():
            return replace(state, hung=message)
        case Woke():
            return replace(state, hung=None)
        case Noted():
            return replace(state, notes=(*state.notes, message.text))
        case Ended():
            return replace(_paused(state, message.time, is_over=True), ended=message.time, problem=message.problem)
        case Interrupted():
            return replace(state, ended=message.time, interrupted=True)
        case _:
            assert_never(message)


def _paused(state: RunState, time: float, *, is_over: bool = False) -> RunState:
    """The state with its clock of pauses: it runs while every rank that has more to say stands still."""
    waiting = [rank for rank in state.ranks if not rank.has_reported]
    stands = bool(waiting) and all(rank.paused for rank in waiting) and not is_over
    if stands and state.paused_since is None:
        return replace(state, paused_since=time)
    if not stands and state.paused_since is not None:
        paused_for = state.paused_for + time - state.paused_since
        return replace(state, paused_since=None, paused_for=paused_for, went_on=time)
    return state


def _with_epoch(state: RunState, progress: Progress) -> RunState:
    """The state with the epoch that has just begun, if `progress` tells of one: rank 0's outermost loop counts them."""
    is_one = progress.depth == 0 and progress.description == "epoch" and progress.rank == state.ranks[0].rank
    if not is_one or progress.began is None or progress.done == progress.total:
        return state
    epochs, number = state.epochs, progress.done + 1
    if epochs and epochs[-1].number >= number:
        return state
    if state.resumed is not None and progress.done < state.resumed.epoch:  # a loop that goes on counts up to there
        return state
    if len(epochs) >= _MOST_EPOCHS:
        epochs = epochs[::2]
    return replace(state, epochs=(*epochs, Epoch(number, _step_at(state, progress), progress.began)))


def _step_at(state: RunState, progress: Progress) -> int:
    """The first step that was logged since the item under way began; the next one where none was."""
    own = (ranks[progress.rank] for ranks in state.history.values() if progress.rank in ranks)
    busiest = max(own, key=lambda series: series.num_points, default=None)
    if busiest is None or progress.began is None:
        return 0 if state.resumed is None else state.resumed.step
    steps, _, times = busiest.tail(_TAIL)
    place = bisect_left(times, progress.began)
    return steps[place] if place < len(steps) else steps[-1] + 1


def _before(recalled: Recalled, own: Series | None) -> Series:
    """A series with what was recalled, and then its own points, of which there are few when that comes."""
    longer = Series()
    longer.extend(recalled.steps, recalled.values, recalled.times)
    longer.num_recalled = longer.num_points
    if own is not None:
        steps, values, times = own.columns()
        longer.extend(steps.tobytes(), values.tobytes(), times.tobytes())
    return longer


def failures(state: RunState) -> list[Failure]:
    """All failures known, the one to blame first.

    A failure is a *cause* or an *echo*. The earliest cause is blamed: an exception, a death without a word, or a loss
    of another node.
    Without one a SIGABRT, since NCCL's watchdog aborts the healthy ranks after a peer's failure; then the earliest
    echo.
    """
    found = []
    for rank in state.ranks:
        if rank.raised:
            found.append(Failure(rank.raised, rank.raised.is_echo))
        elif rank.exited and not rank.returned and not rank.exited.ended_by_us:
            found.append(Failure(rank.exited, rank.exited.exitcode == _SIGABRT))
    found += [Failure(lost, lost.is_echo) for lost in state.lost]
    return sorted(found, key=_innocence)


def _innocence(failure: Failure) -> tuple[bool, bool, float, int]:
    return failure.is_echo, failure.is_echo and not failure.is_silent, failure.time, failure.rank


def settles_at(state: RunState) -> float | None:
    """Monotonic time at which the blame is settled; None while nothing has failed.

    In the past once every rank has reported.
    """
    found = failures(state)
    if not found:
        return None
    first = found[0]
    if all(rank.has_reported for rank in state.ranks):
        return first.time
    return first.time + (ECHO_SETTLES if first.is_echo and not first.is_silent else CAUSE_SETTLES)


def _blamed(state: RunState) -> RunState:
    found = failures(state)
    if state.asked:
        # Deaths and echoes are what ending brings about; a function's own error, while it saves say, is still one.
        own = [failure for failure in found if not failure.is_silent and not failure.is_echo]
        found = own if state.asked == "stop" else []
    return replace(state, first_failure=found[0] if found else state.first_failure)


def _with_rank(state: RunState, message: RankMessage, **changes: object) -> RunState:
    position = message.rank - state.ranks[0].rank
    changed = replace(state.ranks[position], **changes)  # type: ignore[arg-type]
    return replace(state, ranks=(*state.ranks[:position], changed, *state.ranks[position + 1 :]))
