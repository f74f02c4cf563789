"""All that is said about a run: one frozen dataclass per kind, and who says it.

`FromWorker` crosses a rank's own pipe. `FromLauncher` is what the kernel sees from outside, since a crashed worker
cannot speak. Nothing is sent *to* a worker: what is asked of it, a stop, a pause, another learning rate, is written on
the run's shared page (`agreement.py`), and the kernel's end shows on the worker's lifeline.

Objects of the user travel as `bytes` and are unpacked only by whoever asks for them, so that neither a decoder nor a
fold can fail on a user's class.

Runs in: both
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PhaseName = Literal["starting", "unpacking", "rendezvous", "running", "threads", "leaving"]
"""What a worker is busy with: before its first word; loading the function; making the process group; in the function;
waiting for non-daemon threads that the function left running; tearing down."""

Setting = float | int | bool | str
"""A value that can be changed while a run goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of all kinds."""

    time: float
    """`time.monotonic()` of the sender: one clock for all processes of a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMessage(Message):
    """A message about one rank."""

    rank: int
    """Global rank."""


# ---- from a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(RankMessage):
    """The worker's first word: it has its own process group, signals, lifeline and output by now."""

    pid: int
    """Process id, and id of the process group that the worker leads."""
    device: str
    """`str(torch.device)` the rank computes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase(RankMessage):
    """The worker begins another part of its life."""

    phase: PhaseName


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics(RankMessage):
    """Values logged under one name since the last batch; three columns of equal length."""

    name: str
    steps: bytes
    """int64, native order."""
    values: bytes
    """float64, native order; nan and inf travel as they are."""
    times: bytes
    """float64, native order: monotonic time of each `log()` call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(RankMessage):
    """How far one `ddpnb.progress()` loop is."""

    depth: int
    """0 for the outermost loop, 1 for one inside it, …; loops deeper than `depth` are over."""
    done: int
    """Items handed out and finished."""
    total: int | None
    """Number of items; None where the iterable has no length."""
    description: str
    """Word for the items, such as "epoch"; may be empty."""
    began: float | None = None
    """Monotonic time at which the item under way was handed out; None before the first, and in old folders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping(RankMessage):
    """The function has been told to stop by `should_stop()`: it finishes its step, may save, and returns."""

    check: int
    """Number of the `should_stop()` call that said so, from 1; the same on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(RankMessage):
    """A checkpoint has been published: complete on every rank, and durable."""

    path: str
    """Its folder, absolute."""
    step: int
    """Optimizer steps that the run had made by then."""
    epoch: int
    """Number of the epoch under way, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(RankMessage):
    """The run goes on from a checkpoint. Rank 0 alone says it, for all."""

    path: str
    """The checkpoint's folder, absolute."""
    step: int
    """Optimizer steps that had been made by then."""
    epoch: int
    """Number of the epoch that goes on, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused(RankMessage):
    """The rank stands still between two steps, as it was asked to."""

    check: int
    """Number of the `should_stop()` call in which it waits, from 1; the same on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpaused(RankMessage):
    """The rank goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered(RankMessage):
    """A value that `Run.set` can change: one that the function reads with `setting()`, or its optimizer's."""

    name: str
    value: Setting
    """As it is now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied(RankMessage):
    """A value was changed by `Run.set`, on all ranks at the same step. Rank 0 alone says it, for all."""

    name: str
    before: Setting | None
    """What it was; None where nothing has read it yet."""
    value: Setting
    """What it is now."""
    step: int
    """The first step that is made with it, as steps are counted in `log()`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paced(RankMessage):
    """How the rank spends its steps: medians over the newest ones, in seconds; and what it holds."""

    num_steps: int
    """Steps that were timed so far; 0: none, and the times say nothing."""
    step: float
    """From the end of one step to the end of the next, pauses left out."""
    data: float
    """Of it: waiting for the next batch."""
    wait: float | None
    """Of it: waiting for other ranks, from this rank's own last gradient to the end of the reduction, and in the other
    collectives of ddpnb's own. None where that cannot be seen: a rank by itself, a GPU, a loop whose model is not
    wrapped as "ddp", an exact one."""
    samples: float | None
    """Samples a second of this rank; None where they are not counted."""
    memory: int | None
    """Bytes that it holds now: of its device, or of the machine for a CPU. None where that cannot be known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned(RankMessage):
    """The function returned. The only sign of success."""

    value: bytes
    """The packed value (`payload.pack`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised(RankMessage):
    """The function, or the worker on its way to it, raised."""

    phase: PhaseName
    """What the worker was busy with."""
    type_name: str
    """Qualified name of the exception's type."""
    text: str
    """`str()` of the exception."""
    traceback: str
    """The traceback as Python prints it, the function's frames only."""
    location: str | None
    """"file:line" of the innermost frame in the user's own code; None where there is none."""
    is_echo: bool
    """It came out of a torch.distributed call and speaks of a peer: another rank may be the cause."""
    exception: bytes | None
    """The packed exception object; None where it does not survive a round trip."""


# ---- from the launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Output(RankMessage):
    """Text that the rank wrote to its stdout or stderr."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited(RankMessage):
    """The rank's process is gone."""

    exitcode: int
    """As in `multiprocessing.Process.exitcode`: negative for a signal."""
    ended_by_us: bool
    """The launcher had sent it a signal before."""
    memory: int | None
    """Most bytes of memory it had held when last seen; None where it was never seen."""
    oom_kills: int | None
    """Processes that the kernel's out-of-memory killer ended in this cgroup during the run; None where unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack(RankMessage):
    """Where a rank stands, as `faulthandler` tells it: innermost call first, no source lines."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Met(Message):
    """The nodes have met, and how many ranks each has is known. Comes before any word of a worker."""

    first_rank: int
    """Global rank of this node's first."""
    num_ranks: int
    """Of this node."""
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Message):
    """Another node has failed, as it says itself, or has gone without a word. `time` is that of the arrival here."""

    node_rank: int
    rank: int
    """Global rank that is to blame there; the node's first where it could not say."""
    text: str
    """What happened there, in a line."""
    is_echo: bool
    """It blames its peers: the cause may be here, or on a third node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled(RankMessage):
    """Values that the run from which this one goes on had logged under one name, up to the checkpoint.

    They come before all that this run logs under that name, whenever they are told.
    """

    name: str
    steps: bytes
    """int64, native order."""
    values: bytes
    """float64, native order."""
    times: bytes
    """float64, native order: monotonic times, moved so that the last value of that run falls on this run's launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Message):
    """The kernel has asked the workers to end."""

    how: Literal["stop", "kill"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steered(Message):
    """The kernel has asked the workers to pause, or to go on."""

    how: Literal["pause", "unpause"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Halted(RankMessage):
    """The process was stopped from outside, by SIGSTOP say, or goes on again."""

    halted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung(Message):
    """No rank makes steps any more, or one does not; where each stands was told just before."""

    silence: float
    """Seconds since the last step of the rank that has been silent longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Woke(Message):
    """What hung makes steps again, or the user wants to wait longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted(Message):
    """Something the user should know: an option without effect, a slower way taken. A worker may say it too."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Message):
    """Nothing of the run is left: every worker is gone, every pipe drained."""

    problem: str | None
    """Why the run could not be launched or followed; None for a run that ended by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted(Message):
    """The run's kernel ended before the run did. Said by whoever reads the run's folder; `time` is of the last word."""


FromWorker = (
    Started
    | Phase
    | Metrics
    | Progress
    | Stopping
    | Paused
    | Unpaused
    | Offered
    | Applied
    | Paced
    | Saved
    | Resumed
    | Noted
    | Returned
    | Raised
)
FromLauncher = (
    Output
    | Exited
    | Stack
    | Met
    | Lost
    | Recalled
    | Asked
    | Steered
    | Halted
    | Hung
    | Woke
    | Noted
    | Ended
    | Interrupted
)
AnyMessage = FromWorker | FromLauncher
