"""Short ways to write lists of messages, and the states that they fold to."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from ddpnb.messages import AnyMessage, Ended, Metrics, Output, Phase, Progress, Raised, Returned, Started
from ddpnb.state import RunState, fold, new_state


def metrics(rank: int, name: str, values: Sequence[float], *, first_step: int = 0, seconds: float = 0.01) -> Metrics:
    steps = range(first_step, first_step + len(values))
    times = array("d", [step * seconds for step in steps])
    columns = array("q", steps).tobytes(), array("d", values).tobytes(), times.tobytes()
    return Metrics(time=0.0, rank=rank, name=name, steps=columns[0], values=columns[1], times=columns[2])


def started(num_ranks: int) -> list[AnyMessage]:
    """Every rank is in the function."""
    first = [Started(time=0.0, rank=rank, pid=100 + rank, device="cpu") for rank in range(num_ranks)]
    return [*first, *(Phase(time=0.0, rank=rank, phase="running") for rank in range(num_ranks))]


def progress(rank: int, depth: int, done: int, total: int | None, description: str) -> Progress:
    return Progress(time=0.0, rank=rank, depth=depth, done=done, total=total, description=description)


def output(rank: int, text: str) -> Output:
    return Output(time=0.0, rank=rank, text=text)


def raised(rank: int, text: str = "bad shape") -> Raised:
    return Raised(
        time=1.0,
        rank=rank,
        phase="running",
        type_name="ValueError",
        text=text,
        traceback=f'Traceback (most recent call last):\n  File "cell", line 1, in train\nValueError: {text}\n',
        location=None,
        is_echo=False,
        exception=None,
    )


def finished(num_ranks: int, *, at: float = 36.0) -> list[AnyMessage]:
    """Every rank has returned and the run is over."""
    return [*(Returned(time=at, rank=rank, value=b"") for rank in range(num_ranks)), Ended(time=at, problem=None)]


def folded(num_ranks: int, messages: Iterable[AnyMessage] = (), *, name: str = "train") -> RunState:
    """The state of a run that has begun at time 0 and has said `messages`."""
    state = new_state(name, num_ranks, backend="gloo", started=0.0)
    for message in [*started(num_ranks), *messages]:
        state = fold(state, message)
    return state
