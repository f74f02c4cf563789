"""When silence is taken for a hang: of messages and moments, without a process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import count

import pytest

from ddpnb.agreement import Page
from ddpnb.messages import AnyMessage, Asked, Halted, Hung, Paused, Recalled, Resumed, Started, Steered, Unpaused, Woke
from ddpnb.state import RunState, fold
from ddpnb.watch import Watch

from .messages_for_tests import folded, metrics, progress, raised


class Watched:
    """A run of two ranks, which live in the test's own process, and who watches it."""

    def __init__(self, page: Page) -> None:
        own = [Started(time=0.0, rank=rank, pid=os.getpid(), device="cpu") for rank in range(2)]
        self.state: RunState = folded(2, own)
        self.told: list[AnyMessage] = []
        self.num_asked = 0
        self.page = page
        self.watch = Watch(page, self.tell, self.ask)
        self._logged = [0, 0]

    def tell(self, message: AnyMessage) -> None:
        self.told.append(message)
        self.state = fold(self.state, message)

    def ask(self) -> None:
        self.num_asked += 1

    def say(self, *messages: AnyMessage) -> None:
        for message in messages:
            self.state = fold(self.state, message)

    def step(self, *ranks: int) -> None:
        """These ranks log once."""
        for rank in ranks:
            self.say(metrics(rank, "loss", [1.0], first_step=self._logged[rank]))
            self._logged[rank] += 1

    def look(self, moments: Iterable[float], stepping: tuple[int, ...] = ()) -> None:
        for now in moments:
            self.step(*stepping)
            self.watch.look(self.state, now, has_answered=True)

    @property
    def hangs(self) -> list[tuple[str, float]]:
        """What was told of hangs, and when."""
        return [(type(each).__name__, each.time) for each in self.told if isinstance(each, Hung | Woke)]


@pytest.fixture
def run() -> Iterator[Watched]:
    page = Page.create(2)
    yield Watched(page)
    page.close()


def seconds(begin: int, end: int) -> Iterator[float]:
    return (float(second) for second in range(begin, end))


def test_a_rank_that_falls_silent_is_told_of_after_ten_seconds_and_its_stack_asked_for_before(run: Watched) -> None:
    run.look(seconds(0, 10), stepping=(0, 1))
    run.look(seconds(10, 30), stepping=(0,))

    assert [("Hung", 21.0)] == run.hangs
    assert 1 == run.num_asked


def test_steps_that_take_long_are_waited_for(run: Watched) -> None:
    for begin in range(0, 200, 20):
        run.look([begin], stepping=(0, 1))
        run.look(seconds(begin + 1, begin + 20))
    run.look(seconds(200, 279))
    waited_for = list(run.hangs)
    run.look(seconds(279, 300))

    assert [] == waited_for
    assert [("Hung", 282.0)] == run.hangs


def test_the_first_steps_of_a_loop_may_take_long_however_much_is_logged_in_each(run: Watched) -> None:
    for step, begin in enumerate(range(0, 120, 12)):
        for rank in range(2):
            run.page.check(rank)
        run.look([begin])
        for name in ("loss", "grad_norm", "samples/s", "lr"):  # which come a moment later
            run.say(*(metrics(rank, name, [1.0], first_step=step) for rank in range(2)))
        run.look(seconds(begin + 1, begin + 12))

    assert [] == run.hangs


def test_values_of_a_set_up_are_no_steps(run: Watched) -> None:
    run.say(*(metrics(rank, name, [1.0]) for rank in range(2) for name in ("classes", "samples", "width", "depth")))
    run.look(seconds(0, 25))

    assert [] == run.hangs


def test_what_a_resumed_run_has_from_before_is_no_sign_of_a_step(run: Watched) -> None:
    run.say(Resumed(time=0.0, rank=0, path="runs/a/checkpoint", step=900, epoch=2))
    for rank in range(2):
        loss = metrics(rank, "loss", [1.0] * 900)
        earlier = Recalled(time=0.0, rank=rank, name="loss", steps=loss.steps, values=loss.values, times=loss.times)
        run.say(earlier, progress(rank, 0, 2, 5, "epoch"), progress(rank, 1, 100, 400, "step"))
    run.look(seconds(0, 25))

    assert [] == run.hangs


def test_a_hang_is_over_once_all_make_steps_again(run: Watched) -> None:
    run.look(seconds(0, 10), stepping=(0, 1))
    run.look(seconds(10, 30))
    run.look(seconds(30, 31), stepping=(0,))
    run.look(seconds(31, 33), stepping=(0, 1))

    assert [("Hung", 21.0), ("Woke", 31.0)] == run.hangs


def test_whoever_keeps_waiting_is_told_again_after_twice_the_time(run: Watched) -> None:
    run.look(seconds(0, 10), stepping=(0, 1))
    run.look(seconds(10, 30))
    run.watch.keep_waiting(run.state, 30.0)
    run.look(seconds(30, 60))

    assert [("Hung", 21.0), ("Woke", 30.0), ("Hung", 52.0)] == run.hangs


def test_a_silence_that_ended_by_itself_is_not_told_of_again(run: Watched) -> None:
    for begin in (0, 30, 60):
        run.look(seconds(begin, begin + 10), stepping=(0, 1))
        run.look(seconds(begin + 10, begin + 30))
    run.look([90.0], stepping=(0, 1))

    assert [("Hung", 21.0), ("Woke", 30.0)] == run.hangs


def test_a_pause_is_no_silence_and_neither_is_the_way_to_it(run: Watched) -> None:
    run.look(seconds(0, 10), stepping=(0, 1))
    run.say(Steered(time=10.0, how="pause"))
    run.look(seconds(10, 100))
    run.say(*(Paused(time=100.0, rank=rank, check=3) for rank in range(2)))
    run.look(seconds(100, 200))
    run.say(Steered(time=200.0, how="unpause"), *(Unpaused(time=200.0, rank=rank) for rank in range(2)))
    run.look(seconds(200, 205))

    assert [] == run.hangs


@pytest.mark.parametrize("end", [Asked(time=10.0, how="stop"), raised(0)])
def test_a_run_that_ends_is_not_watched(run: Watched, end: AnyMessage) -> None:
    run.look(seconds(0, 10), stepping=(0, 1))
    run.say(end)
    run.look(seconds(10, 100))

    assert [] == run.hangs
    assert run.watch.timeout(run.state, 100.0) is None


def test_ranks_whose_loops_are_over_may_compute_as_long_as_they_like(
    run: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = count()
    monkeypatch.setattr("ddpnb.process.seconds_used", lambda pid: float(next(used)))

    run.look(seconds(0, 10), stepping=(0, 1))
    run.say(*(progress(rank, 0, 5, 5, "epoch") for rank in range(2)))
    run.look(seconds(10, 200))

    assert [] == run.hangs


def test_ranks_that_give_no_sign_and_do_not_compute_are_told_of_after_a_longer_time(
    run: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpnb.process.seconds_used", lambda pid: 1.0)

    run.look(seconds(1000, 1100))

    assert [("Hung", 1033.0)] == run.hangs


def test_an_idle_kernel_is_woken_once_a_second(run: Watched) -> None:
    run.look([5.0], stepping=(0, 1))

    assert 1.0 == run.watch.timeout(run.state, 5.0)


def test_nobody_is_taken_for_stopped_from_outside_who_is_not(run: Watched) -> None:
    run.look(seconds(0, 10))

    assert not any(isinstance(each, Halted) for each in run.told)
