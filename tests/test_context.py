"""What a training function may ask and say."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import ddpnb
from ddpnb.agreement import Page
from ddpnb.context import Session
from ddpnb.errors import WorkerError, worker_error
from ddpnb.messages import FromWorker, Metrics, Progress, Stopping
from ddpnb.world import World

from .conftest import Kernel

PLACE = World(rank=3, local_rank=1, world_size=4, local_world_size=2, node_rank=1, nnodes=2)


class Listener:
    """A session's other end."""

    def __init__(self) -> None:
        self.messages: list[FromWorker] = []

    def __call__(self, *messages: FromWorker) -> None:
        self.messages += messages

    def points(self, name: str) -> list[tuple[int, float]]:
        points: list[tuple[int, float]] = []
        for message in self.messages:
            if isinstance(message, Metrics) and message.name == name:
                steps, values = np.frombuffer(message.steps, np.int64), np.frombuffer(message.values, np.float64)
                points += zip(steps.tolist(), values.tolist(), strict=True)
        return points


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def session(listener: Listener) -> Iterator[Session]:
    with Session(PLACE, "cpu", listener, None) as session:
        yield session


# ---- where am I


@pytest.mark.usefixtures("session")
def test_the_context_says_where_this_process_stands() -> None:
    seen = (ddpnb.rank(), ddpnb.local_rank(), ddpnb.world_size(), ddpnb.local_world_size(), ddpnb.node_rank())

    assert (3, 1, 4, 2, 1) == seen
    assert not ddpnb.is_rank_zero()
    assert torch.device("cpu") == ddpnb.device()
    assert not ddpnb.should_stop()


def test_outside_of_a_launched_function_there_is_a_world_of_one() -> None:
    assert (0, 0, 1, 1, 0) == (
        ddpnb.rank(),
        ddpnb.local_rank(),
        ddpnb.world_size(),
        ddpnb.local_world_size(),
        ddpnb.node_rank(),
    )
    assert ddpnb.is_rank_zero()
    assert not ddpnb.should_stop()
    assert [0, 1] == list(ddpnb.progress(range(2)))
    with pytest.warns(UserWarning, match="outside of a launched function"):
        ddpnb.log(loss=1.0)


def test_a_place_survives_torchruns_environment() -> None:
    assert World.from_environment(PLACE.environment()) == World(
        **{name: getattr(PLACE, name) for name in World.__dataclass_fields__}
    )
    assert World() == World.from_environment({})
    with pytest.raises(ValueError, match="LOCAL_RANK='first' in the environment is no number"):
        World.from_environment({"LOCAL_RANK": "first"})


# ---- log


def test_numbers_of_every_kind_are_logged_as_floats(session: Session, listener: Listener) -> None:
    ddpnb.log(
        float=0.5,
        int=2,
        bool=True,
        numpy=np.float32(0.25),
        array=np.array([3]),
        tensor=torch.tensor(1.5),
        integers=torch.tensor([7]),
        truth=torch.tensor(True),
        bfloat=torch.tensor(0.5, dtype=torch.bfloat16),
        parameter=torch.nn.Parameter(torch.tensor(4.0)),
        graph=torch.ones(1, requires_grad=True).sum(),
    )
    session.flush()

    logged = {
        message.name: listener.points(message.name) for message in listener.messages if isinstance(message, Metrics)
    }
    assert {
        "float": [(0, 0.5)],
        "int": [(0, 2.0)],
        "bool": [(0, 1.0)],
        "numpy": [(0, 0.25)],
        "array": [(0, 3.0)],
        "tensor": [(0, 1.5)],
        "integers": [(0, 7.0)],
        "truth": [(0, 1.0)],
        "bfloat": [(0, 0.5)],
        "parameter": [(0, 4.0)],
        "graph": [(0, 1.0)],
    } == logged


def test_nan_and_infinity_travel_as_they_are(session: Session, listener: Listener) -> None:
    for value in (math.nan, math.inf, torch.tensor(-math.inf)):
        ddpnb.log(loss=value)
    session.flush()

    values = [value for _, value in listener.points("loss")]
    assert math.isnan(values[0])
    assert [math.inf, -math.inf] == values[1:]


def test_a_tensor_changed_after_log_was_logged_as_it_was(session: Session, listener: Listener) -> None:
    total = torch.zeros(1)
    for _ in range(3):
        total += 1
        ddpnb.log(total=total)
    session.flush()

    assert [1.0, 2.0, 3.0] == [value for _, value in listener.points("total")]


def test_an_epochs_value_stands_where_the_loss_is(session: Session, listener: Listener) -> None:
    for _ in range(2):
        for _ in range(3):
            ddpnb.log(loss=1.0)
        ddpnb.log(accuracy=0.5)
    session.flush()

    assert [0, 1, 2, 3, 4, 5] == [step for step, _ in listener.points("loss")]
    assert [2, 5] == [step for step, _ in listener.points("accuracy")]


def test_an_epochs_value_stands_where_the_last_given_step_is(session: Session, listener: Listener) -> None:
    for step in (10, 11, 12):
        ddpnb.log(loss=1.0, step=step)
    ddpnb.log(accuracy=0.5)
    session.flush()

    assert [12] == [step for step, _ in listener.points("accuracy")]


def test_a_given_step_and_any_name_are_kept(session: Session, listener: Listener) -> None:
    ddpnb.log({"loss/train": 0.3, "lr": 0.1}, step=120)
    ddpnb.log({"loss/train": 0.2}, step=torch.tensor(121), extra=1)
    session.flush()

    assert [(120, 0.3), (121, 0.2)] == listener.points("loss/train")
    assert [(121, 1.0)] == listener.points("extra")


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        ("high", TypeError, r"log\(loss=…\) takes a number or a tensor of one element, not 'high' \(str\)"),
        (None, TypeError, "not None"),
        ([1.0], TypeError, r"not \[1.0\] \(list\)"),
        (torch.ones(2, 3), ValueError, r"a tensor of shape \(2, 3\) is not one number; log its mean\(\) or sum\(\)"),
        (torch.ones(0), ValueError, r"a tensor of shape \(0,\) is not one number"),
        (np.ones(3), TypeError, r"takes a number or a tensor of one element"),
        (1j, TypeError, r"not 1j \(complex\)"),
        (torch.tensor(1j), TypeError, "takes a number or a tensor of one element"),
    ],
)
def test_what_is_no_number_is_refused_where_it_is_logged(value: object, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        ddpnb.log(loss=value)


def test_a_step_that_is_no_integer_is_refused_and_nothing_else_is_lost(session: Session, listener: Listener) -> None:
    with pytest.raises(TypeError):
        ddpnb.log(loss=1.0, step=2.5)  # type: ignore[arg-type]
    ddpnb.log(loss=3.0)
    session.flush()

    assert [(0, 3.0)] == listener.points("loss")


def test_all_that_was_logged_is_sent_by_the_end_in_order(listener: Listener) -> None:
    with Session(PLACE, "cpu", listener, None):
        for step in range(50_000):
            ddpnb.log(loss=step)

    assert [(step, float(step)) for step in range(50_000)] == listener.points("loss")


def test_a_slow_step_shows_before_it_is_over(kernel: Kernel) -> None:
    values = kernel.value("""
        def train():
            ddpnb.log(loss=0.5)
            time.sleep(60)

        run = two(train)
        until(run, lambda run: ("loss", 0) in run.history and ("loss", 1) in run.history)
        print(run.history["loss"].tolist())
        run.kill()
    """)

    assert [0.5] == values


def test_ranks_that_log_are_kept_apart_and_averaged(kernel: Kernel) -> None:
    values = kernel.value("""
        def train():
            for step in range(3):
                ddpnb.log(loss=10 * ddpnb.rank() + step)

        run = two(train)
        run.result()
        history = run.history
        print((history["loss"].tolist(), history["loss", 1].tolist(), history.steps("loss").tolist(), list(history)))
    """)

    assert ([5.0, 6.0, 7.0], [10.0, 11.0, 12.0], [0, 1, 2], ["loss"]) == values


def test_a_dataloader_worker_that_logs_or_asks_does_not_disturb_its_rank(kernel: Kernel) -> None:
    values = kernel.value("""
        class Chatty(torch.utils.data.Dataset):
            def __len__(self): return 8
            def __getitem__(self, index):
                ddpnb.log(inside=1.0)
                return index

        def train():
            for batch in torch.utils.data.DataLoader(Chatty(), batch_size=4, num_workers=2):
                ddpnb.log(outside=1.0)

        run = two(train)
        run.result()
        print((list(run.history), run.history["outside", 0].tolist()))
    """)

    assert (["outside"], [1.0, 1.0]) == values


# ---- progress and stop


def test_nested_loops_say_how_far_they_are(session: Session, listener: Listener) -> None:
    seen = []
    for epoch in ddpnb.progress(range(2), "epoch"):
        for _ in ddpnb.progress(range(3), "step"):
            pass
        session.flush()
        seen.append(epoch)
    session.flush()

    told = [
        (each.depth, each.description, each.done, each.total)
        for each in listener.messages
        if isinstance(each, Progress)
    ]
    assert [0, 1] == seen
    assert [(0, "epoch", 0, 2), (1, "step", 3, 3), (0, "epoch", 1, 2), (1, "step", 3, 3), (0, "epoch", 2, 2)] == told


def test_of_short_epochs_each_is_told(session: Session, listener: Listener) -> None:
    session.flush()  # and none comes between

    with session._flushing:
        for epoch in ddpnb.progress(range(4), "epoch"):
            ddpnb.log(loss=float(epoch))
    session.flush()

    assert [(0, True), (1, True), (2, True), (3, True), (4, True)] == [
        (message.done, message.began is not None) for message in listener.messages if isinstance(message, Progress)
    ]


def test_a_loop_without_a_length_and_one_that_is_left_early_work(session: Session, listener: Listener) -> None:
    for item in ddpnb.progress(iter(range(10)), "item"):
        if item == 4:
            break
    session.flush()

    (told,) = (each for each in listener.messages if isinstance(each, Progress))
    assert (4, None) == (told.done, told.total)


def test_a_stop_is_acknowledged_once(listener: Listener) -> None:
    page = Page.create(2)
    with Session(World(rank=1, local_rank=1, world_size=2, local_world_size=2), "cpu", listener, page):
        answers = [ddpnb.should_stop(), ddpnb.should_stop()]
        page.ask_to_stop()
        answers += [ddpnb.should_stop(), ddpnb.should_stop()]
    page.close()

    assert [False, False, True, True] == answers
    assert [3] == [message.check for message in listener.messages if isinstance(message, Stopping)]


# ---- errors


class NeedsTwo(Exception):
    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"batch {index} is {reason}")
        self.index = index


def test_an_error_is_of_ours_and_of_the_causes_type_with_its_text_and_fields() -> None:
    error = worker_error("the report", rank=1, exitcode=None, cause=NeedsTwo(7, "torn"))

    assert isinstance(error, NeedsTwo)
    assert isinstance(error, WorkerError)
    assert ("the report", "NeedsTwo", 7, ("batch 7 is torn",), 1) == (
        str(error),
        type(error).__name__,
        error.index,
        error.args,
        error.rank,
    )
    assert isinstance(error.__cause__, NeedsTwo)


@pytest.mark.parametrize(
    "cause",
    [
        KeyError("a"),
        OSError(2, "no such file"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        torch.OutOfMemoryError("x"),
    ],
)
def test_builtin_exceptions_keep_their_type_and_take_our_text(cause: Exception) -> None:
    error = worker_error("the report", rank=0, exitcode=None, cause=cause)

    assert isinstance(error, type(cause))
    assert ("the report", cause.args) == (str(error), error.args)


@pytest.mark.parametrize("cause", [SystemExit(3), KeyboardInterrupt(), StopIteration(1), GeneratorExit(), None])
def test_what_would_break_who_catches_it_is_a_plain_worker_error(cause: BaseException | None) -> None:
    error = worker_error("the report", rank=0, exitcode=None, cause=cause)

    assert WorkerError is type(error)
    assert "the report" == str(error)
    assert error.__cause__ is cause


def test_a_class_that_cannot_be_subclassed_is_a_plain_worker_error() -> None:
    class Final(Exception):
        def __init_subclass__(cls) -> None:
            raise TypeError("final")

    assert WorkerError is type(worker_error("the report", rank=0, exitcode=None, cause=Final()))


def test_a_mixed_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(worker_error("the report", rank=1, exitcode=-9, cause=KeyError("a"))))

    assert isinstance(error, KeyError)
    assert isinstance(error, WorkerError)
    assert ("the report", 1, -9) == (str(error), error.rank, error.exitcode)
