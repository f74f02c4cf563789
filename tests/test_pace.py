"""How each rank spends its steps, and who holds up the others."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ddpnb
from ddpnb import stopwatch
from ddpnb.context import current_session
from ddpnb.draw.pace import RankPace, paces, slowest
from ddpnb.messages import Paced
from ddpnb.state import RunState
from ddpnb.stopwatch import NUM_TIMED, Stopwatch
from ddpnb.world import World

from .messages_for_tests import folded
from .ranks import on_ranks

Part = Literal["data", "forward", "backward"]
Delay = tuple[Part, int] | None
"""In which part of the step which rank sleeps longer; None: none does."""

PARTS: tuple[Part, ...] = ("data", "forward", "backward")
DELAYS: list[Delay] = [None]
for part in PARTS:
    DELAYS += [(part, rank) for rank in range(3)]
    DELAYS.insert(-1, None)
STEP, DELAY = 0.05, 0.06
NUM_STEPS = 23
"""With each delay: the newest 20 have it, and nothing of what was before."""


class Sleeping(Dataset[torch.Tensor]):
    """Samples that take a while, `seconds()` for each batch."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        time.sleep(self._seconds())
        return [self[index] for index in indices]


class SleepsBackward(torch.autograd.Function):
    """The identity, whose backward takes a while."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return input.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class Net(nn.Module):
    """Two layers; `seconds()` in the forward and in the backward between them."""

    def __init__(self, seconds: Callable[[], tuple[float, float]]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8)  # its buffers come from rank 0 in each forward, where the others wait as well
        self._seconds = seconds

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        forward, backward = self._seconds()
        time.sleep(forward)
        return self.second(SleepsBackward.apply(self.norm(self.first(input)), backward))


def train_with_delays(by_loop: bool, delays: list[Delay]) -> list[Paced]:
    """How this rank spent its newest steps, after NUM_STEPS with each delay."""
    told: list[Paced] = []

    def delay(part: Part) -> float:
        now = delays[min(len(told), len(delays) - 1)]
        return DELAY if now == (part, ddpnb.rank()) else 0.0

    model = ddpnb.wrap(Net(lambda: (STEP + delay("forward"), delay("backward"))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    loader = ddpnb.loader(Sleeping(lambda: delay("data")), 8, seed_samples=False)
    loop = ddpnb.Loop(model, optimizer, loader, epochs=1)
    for number, inputs in enumerate(loop if by_loop else loader, 1):
        loss = model(inputs).square().mean()
        if by_loop:
            loop.update(loss)
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if number % NUM_STEPS == 0:
            told.append(stopwatch_here().paced())
        if len(told) == len(delays):
            break
    return told


def stopwatch_here() -> Stopwatch:
    session = current_session()
    assert session is not None
    return session.stopwatch


@pytest.fixture(scope="module")
def runs() -> dict[bool, ddpnb.Run]:
    """Both kinds of loops, side by side: they sleep most of the time. {by a Loop: its run}."""
    launcher = ddpnb.Launcher(nproc_per_node=3, view=False, threads_per_worker=1, timeout=60)
    runs = {by_loop: launcher(train_with_delays, by_loop, DELAYS) for by_loop in (True, False)}
    for run in runs.values():
        run.wait(timeout=100)
    return runs


def state_after(run: ddpnb.Run, phase: int) -> RunState:
    return folded(3, [run.results()[rank][phase] for rank in range(3)])


BY_LOOP = pytest.mark.parametrize("by_loop", [True, False], ids=["a Loop", "an own loop"])


@BY_LOOP
@pytest.mark.parametrize("phase", [phase for phase, delay in enumerate(DELAYS) if delay])
def test_the_rank_that_sleeps_is_named_and_what_it_sleeps_in(
    runs: dict[bool, ddpnb.Run], phase: int, by_loop: bool
) -> None:
    part, rank = DELAYS[phase] or ("data", -1)

    straggler = slowest(state_after(runs[by_loop], phase))

    assert straggler is not None
    assert (rank, "data loading" if part == "data" else "compute") == (straggler.rank, straggler.cause)
    assert straggler.excess == pytest.approx(DELAY, rel=0.5)


@BY_LOOP
@pytest.mark.parametrize("phase", [phase for phase, delay in enumerate(DELAYS) if not delay])
def test_nobody_is_named_where_all_sleep_equally_long(runs: dict[bool, ddpnb.Run], phase: int, by_loop: bool) -> None:
    assert slowest(state_after(runs[by_loop], phase)) is None


@BY_LOOP
def test_a_runs_state_says_how_each_rank_spends_its_steps(runs: dict[bool, ddpnb.Run], by_loop: bool) -> None:
    run, last = runs[by_loop], DELAYS[-1]
    told = [rank.paced for rank in run.state.ranks]

    assert last is not None
    assert last[1] == getattr(slowest(run.state), "rank", None)
    for paced in told:
        assert paced is not None
        assert NUM_STEPS * len(DELAYS) - 1 == paced.num_steps  # the first one only begins
        assert paced.samples == pytest.approx(8 / paced.step, rel=0.2)
        assert paced.memory is not None
        assert paced.memory > 1 << 20


# ---- whatever DDP does


def wait_of(steps: int, each: Callable[[], None]) -> tuple[int, float | None]:
    """(number of steps, median wait in them) of a stopwatch that sees nothing else."""
    session = current_session()
    assert session is not None
    session.stopwatch = Stopwatch(session.place, session.device)
    for _ in range(steps):
        each()
    paced = session.stopwatch.paced()
    return paced.num_steps, paced.wait


def train_in_each_way(ways: dict[str, dict[str, Any]]) -> dict[str, tuple[int, float | None]]:
    """{way: what `wait_of` gives for seven reduced backwards}, where rank 1 sleeps in its backwards."""
    found = {}
    inputs = torch.randn(8, 4)
    for name, options in ways.items():
        asleep = 0.03 if ddpnb.rank() == 1 else 0.0
        options = dict(options)
        unreduced, copied = options.pop("unreduced", 0), options.pop("copied", False)
        wrapped = ddpnb.wrap(Net(lambda asleep=asleep: (0.0, asleep)), **options)
        model = copy.deepcopy(wrapped) if copied else wrapped

        def step(model: Any = model, unreduced: int = unreduced) -> None:
            for left in range(unreduced, -1, -1):
                with model.no_sync() if left else nullcontext():
                    model(inputs).square().mean().backward()

        found[name] = wait_of(7, step)
    return found


def test_waiting_is_seen_in_every_way_that_ddp_reduces() -> None:
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "a bucket for each parameter": {"bucket_cap_mb": 1e-6},
        "static graph": {"static_graph": True},
        "unused parameters": {"find_unused_parameters": True},
        "gradients in the buckets": {"gradient_as_bucket_view": True},
        "in half precision": {"comm_hook": "fp16"},
        "as factors": {"comm_hook": "powersgd"},
        "normalised together": {"sync_batchnorm": True},
        "windows": {"unreduced": 2},
        "a copy": {"copied": True},
    }

    first, second = on_ranks(2, train_in_each_way, ways)

    assert dict.fromkeys(ways, 6) == {way: num_steps for way, (num_steps, _) in first.items()}
    assert [] == [way for way in ways if not first[way][1] > 0.02 > second[way][1]]


def train_unseen() -> dict[str, Paced]:
    """How steps are spent where nobody sees a rank wait."""
    found = {}
    for name, strategy, options in (("exact", "ddp", {"exact": True}), ("sharded", "fsdp", {}), ("apart", "none", {})):
        session = current_session()
        assert session is not None
        session.stopwatch = Stopwatch(session.place, session.device)
        model = ddpnb.wrap(nn.Linear(4, 2), strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = ddpnb.loader(Sleeping(lambda: 0.02), 12, seed_samples=False)
        loop = ddpnb.Loop(model, optimizer, loader, epochs=1, **options)
        for inputs in loop:
            loop.update(model(inputs).mean())
            if loop.step == 4:
                break
        found[name] = session.stopwatch.paced()
    return found


def test_steps_and_data_are_timed_where_nobody_sees_the_waiting() -> None:
    (found, _) = on_ranks(2, train_unseen)

    assert {"exact": 3, "sharded": 3, "apart": 3} == {name: paced.num_steps for name, paced in found.items()}
    assert {None} == {paced.wait for paced in found.values()}
    for paced in found.values():
        assert 0.02 <= paced.data <= paced.step


def train_alone() -> Paced:
    model = ddpnb.wrap(nn.Linear(4, 2))
    loader = DataLoader(Sleeping(lambda: 0.02), 8)
    loop = ddpnb.Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), ddpnb.progress(loader, "batch"), epochs=1)
    for inputs in loop:
        loop.update(model(inputs).mean())
        if loop.step == 4:
            break
    return stopwatch_here().paced()


def test_a_rank_by_itself_waits_for_nobody_and_any_loader_is_timed() -> None:
    (paced,) = on_ranks(1, train_alone)

    assert (3, None) == (paced.num_steps, paced.wait)
    assert 0.02 <= paced.data <= paced.step
    assert paced.samples == pytest.approx(8 / paced.step, rel=0.2)


# ---- the stopwatch


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stopwatch, "monotonic", clock)
    return clock


def watch(world_size: int = 2, device: str = "cpu") -> Stopwatch:
    return Stopwatch(World(world_size=world_size, local_world_size=world_size), device)


def make_step(watch: Stopwatch, clock: Clock, *, data: float = 0.0, compute: float = 0.0, wait: float = 0.0) -> None:
    began = clock.now
    clock.now += data
    watch.fetched(began, 8)
    clock.now += compute
    ready = clock.now
    clock.now += wait
    watch.end_step(ready)


def times(paced: Paced) -> tuple[int, float, float, float | None]:
    wait = None if paced.wait is None else round(paced.wait, 6)
    return paced.num_steps, round(paced.step, 6), round(paced.data, 6), wait


def test_a_step_is_from_end_to_end_and_its_parts_are_known(clock: Clock) -> None:
    own = watch()
    make_step(own, clock)

    make_step(own, clock, data=1.0, compute=2.0, wait=4.0)

    assert (1, 7.0, 1.0, 4.0) == times(own.paced())


def test_waiting_in_collectives_before_the_reduction_counts_too(clock: Clock) -> None:
    own = watch()
    make_step(own, clock)
    began = clock.now
    clock.now += 8.0
    own.waited(began)

    make_step(own, clock, compute=2.0, wait=4.0)

    assert (1, 14.0, 0.0, 12.0) == times(own.paced())


def test_a_pause_is_left_out(clock: Clock) -> None:
    own = watch()
    make_step(own, clock)
    clock.now += 60.0
    own.leave_out(60.0)

    make_step(own, clock, compute=2.0)

    assert (1, 2.0, 0.0, 0.0) == times(own.paced())


def test_a_batch_that_comes_through_two_loaders_is_counted_once(clock: Clock) -> None:
    own = watch()
    make_step(own, clock)
    began = clock.now
    make_step(own, clock, data=1.0)
    make_step(own, clock)
    own.fetched(began, 8)

    make_step(own, clock)

    assert (3, 0.0, 0.0, 0.0) == times(own.paced())


def test_medians_are_of_the_newest_steps(clock: Clock) -> None:
    own = watch()
    for compute in [50.0] * (NUM_TIMED + 1) + [2.0] * NUM_TIMED:
        make_step(own, clock, compute=compute)

    assert (2 * NUM_TIMED, 2.0, 0.0, 0.0) == times(own.paced())


def test_medians_are_of_two_seconds_where_steps_are_short(clock: Clock) -> None:
    own = watch()
    for compute in [1 / 16] * 40 + [1 / 64] * 24:  # the newest 24 make 0.375 s, 26 before them the rest
        make_step(own, clock, compute=compute)

    assert 1 / 16 == own.paced().step


@pytest.mark.parametrize(("world_size", "device"), [(1, "cpu"), (2, "cuda:0")])
def test_a_rank_by_itself_and_one_on_a_gpu_say_nothing_of_waiting(clock: Clock, world_size: int, device: str) -> None:
    own = watch(world_size, device)
    make_step(own, clock)

    make_step(own, clock, compute=2.0, wait=4.0)

    assert (1, 6.0, 0.0, None) == times(own.paced())


def test_news_are_told_now_and_then_and_at_the_end_at_once(clock: Clock) -> None:
    own = watch()
    told = []
    for _ in range(30):
        make_step(own, clock, compute=0.1)
        told.append(own.news() is not None)

    assert own.news(last=True) is not None
    assert own.news(last=True) is None
    assert 4 <= told.count(True) <= 5


def test_memory_is_told_without_a_step_where_it_has_changed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    own, told = watch(), []
    for memory in (1000, 1000, 1005, 1100):
        monkeypatch.setattr(stopwatch, "_memory", lambda _, memory=memory: memory)
        clock.now += 3.0
        told.append(own.news())

    assert [1000, None, None, 1100] == [paced and paced.memory for paced in told]


# ---- who is named


def paced(rank: int, *, data: float = 0.001, compute: float = 0.05, wait: float | None = 0.0, steps: int = 40) -> Paced:
    return Paced(
        rank=rank,
        time=0.0,
        num_steps=steps,
        step=data + compute + (wait or 0.0),
        data=data,
        wait=wait,
        samples=100.0,
        memory=1 << 30,
    )


def waits(*seconds: float, step: float = 0.1) -> RunState:
    """Ranks that made a thousand equally long steps, and waited so long in each."""
    told = [paced(rank, compute=step - 0.001 - wait, wait=wait, steps=1000) for rank, wait in enumerate(seconds)]
    return folded(len(seconds), told)


def test_the_parts_of_a_step_add_up() -> None:
    (only,) = paces(folded(2, [paced(1, data=0.25, compute=0.5, wait=0.125)]))

    assert (
        RankPace(rank=1, step=0.875, data=0.25, compute=0.5, wait=0.125, samples=100.0, memory=1 << 30) == only
    )  # rank 0 has said nothing yet


def test_a_straggler_is_said_with_its_cause() -> None:
    data = folded(2, [paced(0, data=0.061, wait=0.0), paced(1, wait=0.06)])
    compute = folded(2, [paced(0, wait=0.06), paced(1, compute=0.11, wait=0.0)])

    assert "slowest: data loading" == getattr(slowest(data), "words", None)
    assert "slowest: compute" == getattr(slowest(compute), "words", None)


def test_no_cause_is_said_where_nobody_has_seen_the_loader() -> None:
    told = [replace(each, samples=None) for each in (paced(0, wait=0.06), paced(1, compute=0.11))]

    straggler = slowest(folded(2, told))

    assert straggler is not None
    assert (1, None, "slowest") == (straggler.rank, straggler.cause, straggler.words)


def test_nobody_is_named_before_all_ranks_have_timed_enough_steps() -> None:
    early = folded(2, [paced(0, wait=0.06, steps=19), paced(1, compute=0.11, wait=0.0)])
    silent = folded(3, [paced(0, wait=0.06), paced(1, compute=0.11, wait=0.0)])

    assert (None, None) == (slowest(early), slowest(silent))


def test_nobody_is_named_where_no_waiting_is_seen() -> None:
    unseen = folded(2, [paced(0, wait=None), paced(1, compute=0.2, wait=None)])
    alone = folded(1, [paced(0, wait=None)])

    assert (None, None) == (slowest(unseen), slowest(alone))


def test_nobody_is_named_for_what_a_scheduler_does() -> None:
    small = waits(0.0, 0.004, step=0.006)
    part = waits(0.0, 0.025, 0.026)

    assert (None, None) == (slowest(small), slowest(part))


def test_nobody_is_named_where_two_are_equally_slow() -> None:
    assert slowest(waits(0.0, 0.0, 0.06, 0.06)) is None


def test_a_rank_that_has_told_later_than_the_others_is_not_named_for_it() -> None:
    grown_slower = folded(2, [paced(0, compute=0.2), paced(1, compute=0.05)])

    assert slowest(grown_slower) is None
