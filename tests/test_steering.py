"""Pausing, and changing values, while a run goes on: from the kernel to all ranks at the same step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler as schedules

import ddpnb
from ddpnb.messages import Offered, Setting, Steered
from ddpnb.settings import Set, Settings, pack
from ddpnb.state import RunState
from ddpnb.train.steering import change
from tests import resumable

from .conftest import DEADLINE, Kernel, have_ended, wait_until
from .messages_for_tests import folded


def until(run: ddpnb.Run, claim: Callable[[RunState], object]) -> None:
    """Wait for a message after which the claim holds."""
    wait_until(lambda: bool(claim(run.state)) or run.done(), timeout=DEADLINE, what="what the test waits for")
    assert claim(run.state), (run.state.status, run.state.notes, run.output())


def is_paused(state: RunState) -> bool:
    return state.status == "paused"


def launch(function: Callable[..., Any], *args: Any, num_ranks: int = 2, **kwargs: Any) -> ddpnb.Run:
    return ddpnb.Launcher(nproc_per_node=num_ranks, view=False, **kwargs)(function, *args)


@pytest.fixture(scope="module", autouse=True)
def worker_server() -> None:
    """Has loaded torch, which takes as long as the machine is busy."""
    launch(ddpnb.rank).result()


@pytest.fixture
def ended() -> Iterator[list[ddpnb.Run]]:
    """Runs that a test is to leave ended."""
    runs: list[ddpnb.Run] = []
    yield runs
    for run in runs:
        run.kill()
        run.wait(DEADLINE)


# ---- what is trained here


def count(name: str = "gain", default: Any = 0.5) -> tuple[list[int], list[Any]]:
    """Steps of its own, and the setting in each; ends at a stop."""
    values = []
    while True:
        values.append(ddpnb.setting(name, default))
        ddpnb.log(loss=1.0)
        if ddpnb.should_stop():
            return len(values), values
        time.sleep(0.002 * (1 + ddpnb.rank()))


def say_nothing() -> None:
    print("here", flush=True)
    signal.pause()


def train(epochs: int = 1000, **options: Any) -> list[tuple[int, float]]:
    """(step, learning rate) of each step of a Loop."""
    torch.manual_seed(0)
    model = ddpnb.wrap(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
    loop = ddpnb.Loop(model, optimizer, ddpnb.loader(data, 4), epochs=epochs, **options)
    rates = []
    for inputs, targets in loop:
        rates.append((loop.step, optimizer.param_groups[0]["lr"]))
        loop.update(F.cross_entropy(model(inputs), targets))
        time.sleep(0.005)
    return rates


# ---- pause


@pytest.mark.parametrize("function", [count, train])
def test_a_pause_holds_all_ranks_at_the_same_step_until_it_is_over(
    ended: list[ddpnb.Run], function: Callable[..., Any]
) -> None:
    run = launch(function, num_ranks=3)
    ended.append(run)
    until(run, lambda state: "loss" in state.history)
    run.pause()
    until(run, is_paused)
    checks = [rank.paused.check for rank in run.state.ranks if rank.paused]
    stood = [int(run.history.steps("loss", rank)[-1]) for rank in range(3)]
    run.unpause()
    until(run, lambda state: run.history.steps("loss")[-1] > stood[0] + 3)

    assert [checks[0]] * 3 == checks
    assert [checks[0] - 1] * 3 == stood
    assert run.state.paused_for > 0
    assert "running" == run.state.status


def test_a_paused_run_makes_no_step(ended: list[ddpnb.Run], tmp_path: Path) -> None:
    def touch(folder: Path) -> int:
        count = 0
        while not ddpnb.should_stop():
            count += 1
            (folder / f"{ddpnb.rank()}-{count}").touch()
        return count

    run = launch(touch, tmp_path)
    ended.append(run)
    wait_until(lambda: len(list(tmp_path.iterdir())) > 4)
    run.pause()
    until(run, is_paused)
    made = len(list(tmp_path.iterdir()))
    run.stacks()
    run.stop()

    assert {0: made // 2, 1: made // 2} == run.results(DEADLINE)
    assert made == len(list(tmp_path.iterdir()))


def test_asked_during_the_start_it_pauses_after_the_first_step(ended: list[ddpnb.Run]) -> None:
    run = launch(count)
    ended.append(run)
    run.pause()
    until(run, is_paused)
    checks = [rank.paused.check for rank in run.state.ranks if rank.paused]
    run.stop()

    assert [1, 1] == checks
    assert {0: 1, 1: 1} == {rank: steps for rank, (steps, _) in run.results(DEADLINE).items()}


def test_pausing_twice_and_going_on_without_a_pause_do_nothing(ended: list[ddpnb.Run]) -> None:
    run = launch(count)
    ended.append(run)
    until(run, lambda state: "loss" in state.history)
    run.unpause()
    run.pause()
    run.pause()
    until(run, is_paused)
    run.unpause()
    run.unpause()
    until(run, lambda state: not state.pausing and state.paused_since is None)
    run.stop()

    assert run.results(DEADLINE)


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_paused_run_ends_as_one_that_is_not(ended: list[ddpnb.Run], how: str) -> None:
    run = launch(count)
    ended.append(run)
    run.pause()
    until(run, is_paused)
    getattr(run, how)()
    run.wait(DEADLINE)

    assert {"stop": "finished", "kill": "killed"}[how] == run.state.status
    assert not run.state.pausing


def test_what_a_dataloaders_worker_asks_is_no_check_of_its_rank(ended: list[ddpnb.Run]) -> None:
    class Ones(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            while not ddpnb.should_stop():
                yield torch.ones(1)

    def read() -> None:
        for _ in torch.utils.data.DataLoader(Ones(), num_workers=1 + ddpnb.rank()):
            ddpnb.log(loss=1.0)
            if ddpnb.should_stop():
                break
            time.sleep(0.01)

    run = launch(read)
    ended.append(run)
    until(run, lambda state: len(state.history.get("loss", ())) == 2)
    run.pause()
    until(run, is_paused)
    num_values = [len(run.history.steps("loss", rank)) for rank in range(2)]
    checks = [rank.paused.check for rank in run.state.ranks if rank.paused]
    run.stop()

    assert [checks[0]] * 2 == checks == num_values
    assert run.results(DEADLINE)


def test_a_rank_that_dies_in_a_pause_is_blamed(ended: list[ddpnb.Run]) -> None:
    run = launch(count)
    ended.append(run)
    run.pause()
    until(run, is_paused)
    os.kill(run.state.ranks[1].pid or 0, signal.SIGKILL)
    error = run.exception(DEADLINE)

    assert isinstance(error, ddpnb.WorkerError)
    assert (1, -9) == (error.rank, error.exitcode)


def test_an_interrupted_wait_ends_a_paused_run(kernel: Kernel) -> None:
    kernel.run("""
        def count():
            while not ddpnb.should_stop():
                time.sleep(0.01)
        run = two(count)
        run.pause()
        until(run, lambda run: run.state.status == "paused")

        from contextlib import contextmanager
        @contextmanager
        def telling():
            print("waiting", flush=True)
            yield
        run.around_waits.append(telling)
    """)
    cell = kernel.start("run.wait()")
    reply = kernel.wait(cell, on_stdout=lambda text: kernel.interrupt() if "waiting" in text else None)

    assert "KeyboardInterrupt" == reply.error
    assert "finished" == kernel.value("print(repr(run.state.status))")


def test_a_paused_run_saves_when_its_kernel_is_killed(tmp_path: Path) -> None:
    code = f"""
import ddpnb
from tests.test_steering import is_paused, launch, train, until
run = launch(train, run_dir={str(tmp_path)!r})
run.pause()
until(run, is_paused)
print(*(rank.pid for rank in run.state.ranks), flush=True)
run.wait()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as kernel:
        assert kernel.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in kernel.stdout.readline().split()]
        kernel.kill()
    wait_until(lambda: have_ended(workers), what="the end of all workers")
    read = ddpnb.open_run(tmp_path)

    assert 2 == len(workers)
    assert read.state.interrupted
    assert ["step-00000001"] == [path.name for path in (read.dir or tmp_path).glob("checkpoints/step-*")]


# ---- settings


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_value_changes_on_all_ranks_at_the_same_step(ended: list[ddpnb.Run], num_ranks: int) -> None:
    run = launch(count, num_ranks=num_ranks)
    ended.append(run)
    until(run, lambda state: "gain" in state.offered)
    for number in range(1, 6):
        run.set(gain=float(number))
    until(run, lambda state: state.offered["gain"].value == 5.0)
    run.stop()
    results = list(run.results(DEADLINE).values())

    assert [results[0]] * num_ranks == results
    assert 0.5 == results[0][1][0]
    assert 5.0 == results[0][1][-1]


def test_a_change_is_told_with_its_step_and_is_in_the_history(ended: list[ddpnb.Run]) -> None:
    run = launch(count)
    ended.append(run)
    until(run, lambda state: "gain" in state.offered)
    run.set(gain=2)
    until(run, lambda state: state.applied)
    (applied,) = run.state.applied
    run.stop()
    _, values = run.result(DEADLINE)

    assert ("gain", 0.5, 2.0) == (applied.name, applied.before, applied.value)
    assert values.index(2.0) == applied.step
    assert isinstance(applied.value, float)
    assert [0, applied.step] == run.history.steps("gain").tolist()
    assert [0.5, 2.0] == run.history["gain"].tolist()


def test_what_is_set_in_a_pause_counts_from_the_next_step_on(ended: list[ddpnb.Run]) -> None:
    run = launch(count)
    ended.append(run)
    run.pause()
    until(run, is_paused)
    for number in (2.0, 3.0):
        run.set(gain=number)
        until(run, lambda state: state.offered["gain"].value == number)  # noqa: B023
    run.unpause()
    until(run, lambda state: run.history.steps("loss").size > 3)
    run.stop()
    steps, values = run.result(DEADLINE)

    assert [0.5, 3.0, 3.0] == values[:3]
    assert [1, 1] == [each.step for each in run.state.applied]
    assert [0, 1, 1] == run.history.steps("gain", 0).tolist()
    assert list(range(steps)) == run.history.steps("loss", 0).tolist()


def test_a_value_set_before_it_is_read_is_there_when_it_is(ended: list[ddpnb.Run]) -> None:
    def late() -> Any:
        while not ddpnb.should_stop():
            read.append(None if len(read) < 3 else ddpnb.setting("gain", 0.5))
            time.sleep(0.01)
        return read

    read: list[Any] = []
    run = launch(late)
    ended.append(run)
    run.set(gain=4)
    until(run, lambda state: state.applied)
    run.stop()

    assert [None, None, None, 4.0] == run.result(DEADLINE)[:4]
    assert (None, 4.0) == (run.state.applied[0].before, run.state.applied[0].value)


def test_a_name_that_nothing_reads_is_told_with_those_there_are(ended: list[ddpnb.Run]) -> None:
    run = launch(train)
    ended.append(run)
    until(run, lambda state: "lr" in state.offered)
    run.set(lrr=0.01)
    until(run, lambda state: state.notes)

    assert ("nothing reads 'lrr': this run has lr, momentum, weight_decay",) == run.state.notes
    assert () == run.state.applied


def test_a_value_of_a_loop_that_the_function_reads_too_is_refused_for_both() -> None:
    settings, applied = Settings(), []
    settings.claim({"lr": 1.0}, lambda name, value: applied.append(value))
    list(settings.first_read("lr", 1))

    said = list(settings.take(pack({"lr": Set(0.5, 1)})))

    assert ["lr=0.5 is refused: it is of type int here, 1 now"] == said
    assert [] == applied


def test_a_loop_that_ends_late_leaves_the_next_ones_settings_alone() -> None:
    settings, applied = Settings(), []

    def apply_first(name: str, value: Setting) -> None:
        raise AssertionError

    settings.claim({"lr": 1.0}, apply_first)
    settings.claim({"lr": 0.1}, lambda name, value: applied.append(value))
    settings.release(apply_first)
    list(settings.take(pack({"lr": Set(0.5, 1)})))

    assert [0.5] == applied


@pytest.mark.parametrize(
    ("default", "value", "expected"),
    [
        (1, 3.0, 3),
        (1, 2.5, None),
        (1, 1e300, None),
        (0.5, 2, 2.0),
        (False, 1, True),
        (False, 2, None),
        (0.5, True, None),
        ("a", 1, None),
    ],
)
def test_a_value_takes_the_defaults_type_or_is_refused(
    ended: list[ddpnb.Run], default: Any, value: Any, expected: Any
) -> None:
    run = launch(count, "gain", default, num_ranks=1)
    ended.append(run)
    until(run, lambda state: "gain" in state.offered)
    run.set(gain=value)
    until(run, lambda state: state.applied or state.notes)

    if expected is None:
        assert f"gain={value!r} is refused" in run.state.notes[0]
    else:
        (applied,) = run.state.applied
        assert (expected, type(expected)) == (applied.value, type(applied.value))


def test_a_loops_learning_rate_changes_between_two_steps_of_all_ranks(ended: list[ddpnb.Run]) -> None:
    run = launch(train, num_ranks=3)
    ended.append(run)
    until(run, lambda state: "lr" in state.history)
    run.set(lr=0.025, momentum=0.5)
    until(run, lambda state: 2 == len(state.applied))
    run.stop()
    results = run.results(DEADLINE)
    applied = {each.name: each for each in run.state.applied}
    rates = dict(results[0])

    assert [results[0]] * 3 == list(results.values())
    assert (0.1, 0.025) == (rates[applied["lr"].step - 1], rates[applied["lr"].step])
    assert (0.9, 0.5) == (applied["momentum"].before, applied["momentum"].value)
    assert [0.1, 0.025] == run.history["lr", 0].tolist()
    assert [0, applied["lr"].step] == run.history.steps("lr").tolist()
    assert [applied["momentum"].step] == run.history.steps("momentum").tolist()


@pytest.mark.parametrize("what", [{"lr": -1.0}, {"lr": "fast"}, {"weight_decay": True}])
def test_an_optimizers_setting_that_cannot_be_is_refused(ended: list[ddpnb.Run], what: dict[str, Any]) -> None:
    run = launch(train, num_ranks=1)
    ended.append(run)
    until(run, lambda state: "lr" in state.offered)
    run.set(**what)
    until(run, lambda state: state.notes)

    assert "is refused: it is" in run.state.notes[0]
    assert () == run.state.applied


@pytest.mark.parametrize("name", ["lr", "momentum", "weight_decay"])
def test_a_loop_offers_its_optimizers_settings(ended: list[ddpnb.Run], name: str) -> None:
    run = launch(train, num_ranks=1)
    ended.append(run)
    until(run, lambda state: name in state.offered)

    assert {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}[name] == run.state.offered[name].value


def test_pause_set_stop_and_resume_tell_one_story(ended: list[ddpnb.Run], tmp_path: Path) -> None:
    run = launch(train, run_dir=tmp_path)
    ended.append(run)
    until(run, lambda state: "loss" in state.history)
    run.pause()
    until(run, is_paused)
    stood = int(run.history.steps("loss")[-1])
    run.unpause()
    until(run, lambda state: run.history.steps("loss")[-1] > stood)
    run.set(lr=0.02)
    until(run, lambda state: state.applied)
    run.stop()
    rates = dict(run.result(DEADLINE))
    resumed = launch(train, run_dir=tmp_path, resume=True)
    ended.append(resumed)
    until(resumed, lambda state: "loss" in state.history and "lr" in state.offered)
    resumed.stop()
    later = dict(resumed.result(DEADLINE))

    assert max(rates) + 1 == min(later)
    assert run.state.saved is not None
    assert max(rates) + 1 == run.state.saved.step
    assert run.state.applied[0].step > stood
    assert (0.1, 0.02) == (rates[stood], rates[max(rates)])
    assert {0.02} == set(later.values())
    assert 0.02 == resumed.state.offered["lr"].value


# ---- schedules


def _two_groups(factor: float = 1.0, rate: Any = 0.1) -> torch.optim.SGD:
    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    groups = [{"params": [weights[0]]}, {"params": [weights[1]], "lr": rate * 0.3 * factor}]
    return torch.optim.SGD(groups, lr=rate * factor, momentum=0.9)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer, float], Any]] = {
    "LambdaLR": lambda optimizer, _: schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda optimizer, _: schedules.MultiplicativeLR(optimizer, lambda step: 0.9),
    "StepLR": lambda optimizer, _: schedules.StepLR(optimizer, 5, 0.5),
    "LinearLR": lambda optimizer, _: schedules.LinearLR(optimizer, 0.2, total_iters=8),
    "ExponentialLR": lambda optimizer, _: schedules.ExponentialLR(optimizer, 0.9),
    "PolynomialLR": lambda optimizer, _: schedules.PolynomialLR(optimizer, 30, 2.0),
    "CosineAnnealingLR": lambda optimizer, factor: schedules.CosineAnnealingLR(optimizer, 10, 0.01 * factor),
    "CosineAnnealingWarmRestarts": lambda optimizer, factor: schedules.CosineAnnealingWarmRestarts(
        optimizer, 4, 2, 0.01 * factor
    ),
    "CyclicLR": lambda optimizer, factor: schedules.CyclicLR(
        optimizer, [0.1 * factor, 0.03 * factor], [0.4 * factor, 0.2 * factor], 4, cycle_momentum=False
    ),
    "OneCycleLR": lambda optimizer, factor: schedules.OneCycleLR(optimizer, [0.4 * factor, 0.2 * factor], 30),
    "SequentialLR": lambda optimizer, factor: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, 0.2, total_iters=8), schedules.CosineAnnealingLR(optimizer, 10, 0.01 * factor)],
        [9],
    ),
    "ChainedScheduler": lambda optimizer, _: schedules.ChainedScheduler(
        [schedules.LinearLR(optimizer, 0.2, total_iters=8), schedules.ExponentialLR(optimizer, 0.9)]
    ),
}


def _rates(name: str, factor: float = 1.0, *, change_at: int | None = None, by: float = 1.0) -> list[list[float]]:
    optimizer = _two_groups(factor)
    scheduler = SCHEDULES[name](optimizer, factor)
    rates = []
    for step in range(24):
        if step == change_at:
            change(optimizer, scheduler, "lr", optimizer.param_groups[0]["lr"] * by)
            assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_as_one_that_was_made_with_scaled_rates(name: str) -> None:
    before, after = _rates(name), _rates(name, 0.25)

    changed = torch.tensor(_rates(name, change_at=6, by=0.25), dtype=torch.float64)

    torch.testing.assert_close(changed[:6], torch.tensor(before[:6], dtype=torch.float64), rtol=0, atol=0)
    torch.testing.assert_close(changed[6:], torch.tensor(after[6:], dtype=torch.float64), rtol=1e-12, atol=0)


def test_a_plateau_scheduler_used_by_hand_goes_on_from_the_rate_that_was_set() -> None:
    optimizer = _two_groups()
    scheduler = schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    scheduler.step(1.0)
    change(optimizer, None, "lr", 0.04)
    scheduler.step(2.0)

    assert [0.02, pytest.approx(0.006)] == [group["lr"] for group in optimizer.param_groups]


def test_a_rate_in_a_tensor_is_changed_in_place() -> None:
    groups = [{"params": [torch.zeros(1, requires_grad=True)]} for _ in range(2)]
    optimizer = torch.optim.Adam(groups, lr=torch.tensor(0.1), capturable=True)
    rate = optimizer.param_groups[0]["lr"]
    change(optimizer, schedules.StepLR(optimizer, 5), "lr", 0.05)

    assert rate is optimizer.param_groups[0]["lr"]
    assert [0.05, 0.05] == [pytest.approx(group["lr"].item()) for group in optimizer.param_groups]


@pytest.mark.parametrize("value", [0.0, -1.0, True, "a"])
def test_a_rate_that_a_schedule_cannot_take_changes_nothing(value: Any) -> None:
    optimizer = _two_groups()
    scheduler = schedules.StepLR(optimizer, 5)
    before = repr((optimizer.state_dict(), scheduler.state_dict()))
    with pytest.raises(ValueError, match=r"factor|it is"):
        change(optimizer, scheduler, "lr", value)

    assert before == repr((optimizer.state_dict(), scheduler.state_dict()))


# ---- who cannot be asked


def test_a_function_that_never_asks_is_told_so(ended: list[ddpnb.Run]) -> None:
    run = launch(say_nothing)
    ended.append(run)
    run.pause()
    run.set(lr=0.1)
    until(run, lambda state: state.notes)

    assert 1 == len(run.state.notes)
    assert run.state.notes[0].startswith("the function has not asked ddpnb.should_stop() so far")
    assert "running" == run.state.status


def test_a_run_that_has_ended_cannot_be_asked() -> None:
    run = launch(ddpnb.rank, num_ranks=1)
    run.wait(DEADLINE)

    for ask, refusal in (
        (run.pause, "rank has finished: it cannot be paused any more. "),
        (run.unpause, "rank has finished: it cannot be unpaused any more. "),
        (lambda: run.set(lr=0.1), "rank has finished: nothing can be set in it any more. "),
    ):
        with pytest.raises(RuntimeError, match=refusal + "Launch it again; with run_dir= and resume=True it goes on"):
            ask()


def test_a_run_in_place_and_one_of_a_folder_cannot_be_asked(tmp_path: Path) -> None:
    run = launch(ddpnb.rank, num_ranks=0, run_dir=tmp_path)
    read = ddpnb.open_run(tmp_path)

    for ask in (run.pause, run.unpause, lambda: run.set(lr=0.1)):
        with pytest.raises(RuntimeError, match="runs in the kernel itself"):
            ask()
    for what, ask in (("pause", read.pause), ("unpause", read.unpause), ("set", lambda: read.set(lr=0.1))):
        with pytest.raises(RuntimeError, match=rf"run.{what}\(\): rank was opened from its folder"):
            ask()


@pytest.mark.parametrize(
    ("values", "kind", "text"),
    [
        ({}, TypeError, "got no value"),
        ({"lr": [0.1]}, TypeError, "not list"),
        ({"lr": None}, TypeError, "not NoneType"),
        ({"lr": float("nan")}, ValueError, "finite"),
        ({"lr": float("inf")}, ValueError, "finite"),
        ({"lr": 1 << 80}, ValueError, r"2\*\*53"),
        ({"x" * 200: 1}, ValueError, "100 characters"),
        ({"text": "x" * 9000}, ValueError, "8,192 bytes"),
    ],
)
def test_a_value_that_no_setting_can_have_is_refused_at_once(
    ended: list[ddpnb.Run], values: dict[str, Any], kind: type[Exception], text: str
) -> None:
    run = launch(count, num_ranks=1)
    ended.append(run)

    with pytest.raises(kind, match=text):
        run.set(**values)


def test_without_a_kernel_to_ask_a_setting_is_its_default() -> None:
    assert (0.1, "a", 3) == (ddpnb.setting("lr", 0.1), ddpnb.setting("mode", "a"), ddpnb.setting("n", 3))
    with pytest.raises(TypeError, match="a setting is a float, int, bool or str, not list"):
        ddpnb.setting("lr", [0.1])  # type: ignore[type-var]
    assert 0.1 == launch(lambda: ddpnb.setting("lr", 0.1), num_ranks=0).result()


# ---- what it leads to


def test_the_time_of_pauses_counts_nowhere() -> None:
    from ddpnb.draw import summary
    from ddpnb.messages import Paused, Unpaused

    pausing = folded(2, [Steered(time=10.0, how="pause")])
    paused = folded(2, [Paused(time=10.0, rank=rank, check=3) for rank in (0, 1)])
    over = folded(
        2,
        [Paused(time=10.0, rank=rank, check=3) for rank in (0, 1)]
        + [Unpaused(time=40.0, rank=rank) for rank in (0, 1)],
    )

    assert ["pausing …", "paused", "running"] == [summary.status(state) for state in (pausing, paused, over)]
    assert [10.0, 10.0] == [summary.elapsed(paused, now) for now in (10.0, 25.0)]
    assert 20.0 == summary.elapsed(over, 50.0)


def test_an_opened_run_shows_what_was_changed(ended: list[ddpnb.Run], tmp_path: Path) -> None:
    run = launch(count, run_dir=tmp_path)
    ended.append(run)
    until(run, lambda state: "gain" in state.offered)
    run.pause()
    until(run, is_paused)
    run.set(gain=2.0)
    until(run, lambda state: state.applied)
    run.stop()
    run.wait(DEADLINE)
    read = ddpnb.open_run(tmp_path)

    assert [each.value for each in run.state.applied] == [each.value for each in read.state.applied]
    assert [each.step for each in run.state.applied] == [each.step for each in read.state.applied]
    assert isinstance(read.state.offered["gain"], Offered)
    assert run.state.paused_for == pytest.approx(read.state.paused_for, abs=0.01)


def _set_after_the_first_step(run: ddpnb.Run, **values: float) -> None:
    run.pause()
    until(run, is_paused)
    run.set(**values)
    until(run, lambda state: len(state.applied) == len(values))
    assert {1} == {each.step for each in run.state.applied}
    run.unpause()


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one_that_was_set_the_same(
    ended: list[ddpnb.Run], tmp_path: Path
) -> None:
    values = {"lr": 0.004, "weight_decay": 0.3}
    whole = resumable.launcher(2, tmp_path / "whole")(resumable.train)
    ended.append(whole)
    _set_after_the_first_step(whole, **values)
    stopped = resumable.launcher(2, tmp_path / "stopped")(resumable.train, "stop", 7)
    ended.append(stopped)
    _set_after_the_first_step(stopped, **values)
    stopped.wait(DEADLINE)
    resumed = resumable.launcher(2, tmp_path / "stopped", resume=True)(resumable.train)
    ended.append(resumed)
    first, last, digest = resumed.result(DEADLINE)
    untouched = resumable.launcher(2)(resumable.train).result(DEADLINE)

    assert (8, resumable.NUM_STEPS) == (first, last)
    assert whole.result(DEADLINE)[2] == digest
    assert untouched[2] != digest


def test_a_resumed_run_reads_what_was_set_before(ended: list[ddpnb.Run], tmp_path: Path) -> None:
    def gains(stop_at: int | None) -> list[float]:
        model = ddpnb.wrap(torch.nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
        loop = ddpnb.Loop(model, optimizer, ddpnb.loader(data, 4), epochs=2)
        read = []
        for inputs, targets in loop:
            read.append(ddpnb.setting("gain", 1.0))
            loop.update(F.cross_entropy(model(inputs), targets) * read[-1])
            if loop.step == stop_at:
                loop.stop()
        return read

    run = launch(gains, 3, run_dir=tmp_path)
    ended.append(run)
    _set_after_the_first_step(run, gain=2.0)
    before = run.result(DEADLINE)
    resumed = launch(gains, None, run_dir=tmp_path, resume=True)
    ended.append(resumed)
    after = resumed.result(DEADLINE)

    assert [1.0, 2.0, 2.0] == before[:3]
    assert {2.0} == set(after)
    assert 2.0 == resumed.state.offered["gain"].value
    assert () == resumed.state.applied
