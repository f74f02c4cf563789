"""The loop and accumulation against one process that trains on the joint batch."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import ddpnb
from ddpnb.train.replica import Replica
from ddpnb.train.sampling import epoch_order

from .ranks import on_ranks, refused

pytestmark = pytest.mark.usefixtures("group_of_one")

DIM = 6
EPOCHS = 2
SHAPES = [(length, batch_size) for length, batch_size in ((23, 2), (37, 3), (7, 4))]
CASES = [(*shape, accumulate, tokens) for shape in SHAPES for accumulate in (1, 3, 4) for tokens in (False, True)]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}

State = dict[str, torch.Tensor]


def samples(length: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Inputs (length, DIM), classes (length,), weights (length,), some of them 0."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(length, DIM, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (length,), generator=generator)
    weights = torch.randint(0, 5, (length,), generator=generator)
    return TensorDataset(inputs.to(dtype), targets, weights.to(dtype))


def small_net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def weighted(outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean over what the weights count; 0 where they count nothing."""
    return (F.cross_entropy(outputs, targets, reduction="none") * weights).sum() / weights.sum().clamp(min=1)


def trained_apart(
    world_size: int, length: int, batch_size: int, accumulate: int, tokens: bool, dtype: torch.dtype
) -> State:
    """What one process has, with plain torch and the joint batches."""
    inputs, targets, weights = samples(length, dtype).tensors
    model = small_net(dtype)
    optimizer = sgd(model)
    for epoch in range(EPOCHS):
        for joint in torch.as_tensor(epoch_order(length, 3, epoch)).split(world_size * batch_size * accumulate):
            counting = weights[joint] if tokens else torch.ones_like(weights[joint])
            if not counting.sum():
                continue
            optimizer.zero_grad()
            weighted(model(inputs[joint]), targets[joint], counting).backward()
            optimizer.step()
    return model.state_dict()


def trained_by_loop(cases: list[tuple[int, int, int, bool]], dtype: torch.dtype) -> list[State]:
    return [_by_loop(*case, dtype) for case in cases]


def _by_loop(length: int, batch_size: int, accumulate: int, tokens: bool, dtype: torch.dtype, **wrapping: Any) -> State:
    model = ddpnb.wrap(small_net(dtype), **wrapping)
    loader = ddpnb.loader(samples(length, dtype), batch_size, shuffle=True, seed=3)
    loop = ddpnb.Loop(model, sgd(model), loader, epochs=EPOCHS, accumulate=accumulate)
    for inputs, targets, weights in loop:
        if tokens:
            loop.update(weighted(model(inputs), targets, weights), weight=weights.sum())
        else:
            loop.update(F.cross_entropy(model(inputs), targets))
    assert loop.samples == EPOCHS * length
    return ddpnb.state_dict(model)


def trained_by_accumulate(cases: list[tuple[int, int, int, bool]], dtype: torch.dtype) -> list[State]:
    return [_by_accumulate(*case, dtype) for case in cases]


def _by_accumulate(length: int, batch_size: int, accumulate: int, tokens: bool, dtype: torch.dtype) -> State:
    model = ddpnb.wrap(small_net(dtype))
    optimizer = sgd(model)
    loader = ddpnb.loader(samples(length, dtype), batch_size, shuffle=True, seed=3)
    for _ in range(EPOCHS):
        for window in ddpnb.accumulate(model, loader, steps=accumulate):
            weight = 0.0
            for inputs, targets, weights in window:
                weight += float(weights.sum())
                if tokens:
                    window.backward(weighted(model(inputs), targets, weights), weight=weights.sum())
                else:
                    window.backward(F.cross_entropy(model(inputs), targets))
            if not tokens or ddpnb.total(weight):
                optimizer.step()
    return ddpnb.state_dict(model)


def farthest(expected: State, actual: State) -> float:
    """The largest difference between two states."""
    assert expected.keys() == actual.keys()
    return max(float((expected[name] - actual[name]).abs().max()) for name in expected)


# ---- as one process


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_any_number_of_ranks_ends_with_the_weights_of_one_process(world_size: int, dtype: torch.dtype) -> None:
    expected = [trained_apart(world_size, *case, dtype) for case in CASES]

    by_rank = on_ranks(world_size, trained_by_loop, CASES, dtype)

    off = {
        (rank, case): farthest(want, have)
        for rank, states in enumerate(by_rank)
        for case, want, have in zip(CASES, expected, states, strict=True)
    }
    assert {} == {key: distance for key, distance in off.items() if not distance <= TOLERANCES[dtype]}


def test_accumulate_ends_with_the_weights_of_one_process() -> None:
    expected = [trained_apart(2, *case, torch.float64) for case in CASES]

    by_rank = on_ranks(2, trained_by_accumulate, CASES, torch.float64)

    assert max(map(farthest, expected, by_rank[0])) <= 1e-12
    assert max(map(farthest, expected, by_rank[1])) <= 1e-12


WRAPPINGS: list[tuple[dict[str, Any], float]] = [
    ({"gradient_as_bucket_view": True}, 1e-12),
    ({"find_unused_parameters": True}, 1e-12),
    ({"bucket_cap_mb": 0.0001}, 1e-12),
    ({"strategy": "fsdp"}, 1e-5),
]


@pytest.mark.parametrize(("wrapping", "tolerance"), WRAPPINGS, ids=str)
def test_however_a_model_is_wrapped(wrapping: dict[str, Any], tolerance: float) -> None:
    case = (23, 2, 3, True)

    states = on_ranks(2, lambda: _by_loop(*case, torch.float64, **wrapping))

    assert farthest(trained_apart(2, *case, torch.float64), states[0]) <= tolerance


def test_a_static_graph_trains_the_same_and_refuses_to_accumulate() -> None:
    case = (23, 2, 1, True)

    states = on_ranks(2, lambda: _by_loop(*case, torch.float64, static_graph=True))
    text = refused(2, ValueError, lambda: _by_loop(23, 2, 3, True, torch.float64, static_graph=True))

    assert farthest(trained_apart(2, *case, torch.float64), states[0]) <= 1e-12
    assert "static_graph=True takes every backward of the first step" in text


@pytest.mark.parametrize("outside", [False, True])
def test_a_compiled_model_trains_the_same(outside: bool) -> None:
    def train() -> State:
        model = small_net()
        if outside:
            wrapped = torch.compile(ddpnb.wrap(model), backend="aot_eager")
        else:
            wrapped = ddpnb.wrap(torch.compile(model, backend="aot_eager"))
        loop = ddpnb.Loop(wrapped, sgd(wrapped), ddpnb.loader(samples(23), 2, True, seed=3), epochs=2, accumulate=3)
        for inputs, targets, _ in loop:
            loop.update(F.cross_entropy(wrapped(inputs), targets))
        return ddpnb.state_dict(wrapped)

    states = on_ranks(2, train)

    assert farthest(trained_apart(2, 23, 2, 3, False, torch.float64), states[1]) <= 1e-12


def test_clipping_and_a_scheduler_act_as_in_one_process() -> None:
    def train() -> tuple[State, float]:
        model = ddpnb.wrap(small_net())
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        loader = ddpnb.loader(samples(23), 2, True, seed=3)
        loop = ddpnb.Loop(model, optimizer, loader, epochs=2, accumulate=3, scheduler=scheduler, clip_norm=0.05)
        for inputs, targets, _ in loop:
            loop.update(F.cross_entropy(model(inputs), targets))
        return ddpnb.state_dict(model), optimizer.param_groups[0]["lr"]

    inputs, targets, _ = samples(23).tensors
    model = small_net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    for epoch in range(2):
        for joint in torch.as_tensor(epoch_order(23, 3, epoch)).split(12):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[joint]), targets[joint]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            scheduler.step()
    ((state, lr), _) = on_ranks(2, train)

    assert farthest(model.state_dict(), state) <= 1e-12
    assert optimizer.param_groups[0]["lr"] == pytest.approx(lr, rel=1e-12)


# ---- what goes over the wire


class _Counted:
    """Collectives that are started while it is entered, by whoever."""

    def __enter__(self) -> list[str]:
        self.calls: list[str] = []
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self._profile.__enter__()
        return self.calls

    def __exit__(self, *exception: object) -> None:
        self._profile.__exit__(*exception)
        self.calls += [event.name for event in self._profile.events() if event.name.startswith("c10d::")]


def _collectives(wrapping: dict[str, Any], accumulate: int) -> tuple[list[str], int]:
    """What goes over the wire in two windows once all has settled, and the number of buckets."""
    model = ddpnb.wrap(small_net(torch.float32), **wrapping)
    loader = ddpnb.loader(samples(40, torch.float32), 2)
    loop = ddpnb.Loop(model, sgd(model), loader, epochs=2, accumulate=accumulate)
    settled, counted = 2 * accumulate, 4 * accumulate
    counting = _Counted()
    calls: list[str] = []
    for number, (inputs, targets, _) in enumerate(loop):
        if number == settled:
            calls = counting.__enter__()
        loop.update(F.cross_entropy(model(inputs), targets))
        if number + 1 == counted:
            counting.__exit__(None, None, None)
            break
    buckets = model._get_ddp_logging_data().get("rebuilt_bucket_sizes", "") if isinstance(model, Replica) else ""
    return calls, len(buckets.split(","))


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("wrapping", [{}, {"bucket_cap_mb": 0.0001}], ids=str)
def test_a_step_costs_one_all_reduce_for_each_bucket_and_nothing_else(
    wrapping: dict[str, Any], accumulate: int
) -> None:
    calls, num_buckets = on_ranks(2, _collectives, wrapping, accumulate)[0]

    assert (num_buckets > 1) == bool(wrapping)
    assert 2 * num_buckets * ["c10d::allreduce_"] == calls


def test_a_sharded_step_costs_one_all_reduce_beside_its_own_gathers_and_scatters() -> None:
    calls, _ = on_ranks(2, _collectives, {"strategy": "fsdp"}, 1)[0]

    assert {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allreduce_"} == set(calls)
    assert 2 == calls.count("c10d::allreduce_")


# ---- ranks with different numbers of batches


class _Uneven(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rank r has 5 + 3 r samples; nothing knows how many."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        inputs, targets, _ = samples(30).tensors
        begin = 0 if ddpnb.rank() == 0 else 5
        for index in range(begin, begin + 5 + 3 * ddpnb.rank()):
            yield inputs[index], targets[index]


def test_ranks_with_different_numbers_of_batches_end_together_and_exactly() -> None:
    def train(accumulate: int) -> tuple[State, int, int]:
        model = ddpnb.wrap(small_net())
        loop = ddpnb.Loop(model, sgd(model), DataLoader(_Uneven(), 2), epochs=2, accumulate=accumulate)
        for inputs, targets in loop:
            loop.update(F.cross_entropy(model(inputs), targets))
        return ddpnb.state_dict(model), loop.step, loop.samples

    for accumulate in (1, 3):
        inputs, targets, _ = samples(30).tensors
        model = small_net()
        optimizer = sgd(model)
        own = [range(5), range(5, 13)]
        for _ in range(2):
            width = 2 * accumulate
            for begin in range(0, 8, width):
                joint = [index for indices in own for index in indices[begin : begin + width]]
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[joint]), targets[joint]).backward()
                optimizer.step()

        results = on_ranks(2, train, accumulate)

        assert [26, 26] == [seen for _, _, seen in results]
        assert max(farthest(model.state_dict(), state) for state, _, _ in results) <= 1e-12


class _Stream(IterableDataset[tuple[torch.Tensor, ...]]):
    """The samples of `samples(19)`, of which nobody knows the number."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return iter([samples(19)[index] for index in range(19)])


def test_a_stream_weighs_each_batch_by_its_own_samples() -> None:
    def train(dataset: Any, accumulate: int) -> tuple[State, int]:
        model = ddpnb.wrap(small_net())
        loop = ddpnb.Loop(model, sgd(model), ddpnb.loader(dataset, 2), epochs=2, accumulate=accumulate)
        for inputs, targets, _ in loop:
            loop.update(F.cross_entropy(model(inputs), targets))
        return ddpnb.state_dict(model), loop.samples

    for accumulate in (1, 2):
        ((state, seen), _) = on_ranks(2, train, _Stream(), accumulate)
        ((expected, _), _) = on_ranks(2, train, samples(19), accumulate)

        assert 38 == seen
        assert farthest(expected, state) <= 1e-12


def test_a_rank_without_a_single_batch_is_named_on_all_ranks() -> None:
    def train() -> str:
        model = ddpnb.wrap(small_net())
        batches = [samples(4).tensors] * (1 - ddpnb.rank())
        with pytest.raises(ValueError, match="single batch") as caught:
            next(iter(ddpnb.Loop(model, sgd(model), batches, epochs=1)))
        return str(caught.value)

    texts = on_ranks(2, train)

    assert texts[0] == texts[1]
    assert "the loader of rank 1 has not a single batch" in texts[0]


def test_a_plain_loader_with_torchs_sampler_is_shuffled_anew_in_each_epoch() -> None:
    def train() -> list[list[int]]:
        model = ddpnb.wrap(small_net())
        dataset = TensorDataset(samples(8).tensors[0], torch.arange(8))
        loader = DataLoader(dataset, 2, sampler=DistributedSampler(dataset))
        seen: list[list[int]] = [[], []]
        loop = ddpnb.Loop(model, sgd(model), loader, epochs=2)
        for inputs, indices in loop:
            seen[loop.epoch] += indices.tolist()
            loop.update(model(inputs).square().mean())
        return seen

    (first, second), (others, _) = on_ranks(2, train)

    assert list(range(8)) == sorted(first + others)
    assert first != second


# ---- half precision and what is not finite


def test_an_infinite_gradient_of_one_rank_is_left_out_on_all_and_the_scale_falls() -> None:
    def train() -> tuple[State, State, int, int, float]:
        model = ddpnb.wrap(small_net(torch.float32), precision="fp16")
        loop = ddpnb.Loop(model, sgd(model), ddpnb.loader(samples(16, torch.float32), 2), epochs=1)
        before = ddpnb.state_dict(model)
        after = before
        for number, (inputs, targets, _) in enumerate(loop):
            loss = F.cross_entropy(model(inputs), targets)
            loop.update(loss * (math.inf if number == 0 and ddpnb.rank() == 1 else 1.0))
            if number == 0:
                after = ddpnb.state_dict(model)
        assert loop._scaler is not None
        return before, after, loop.step, loop.skipped, loop._scaler.get_scale()

    for before, after, step, skipped, scale in on_ranks(2, train):
        assert 0 == farthest(before, after)
        assert (3, 1, 2.0**15) == (step, skipped, scale)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_nan_loss_on_one_rank_skips_the_step_on_all_ranks(strategy: Any) -> None:
    def train() -> tuple[State, int, int]:
        model = ddpnb.wrap(small_net(), strategy)
        loop = ddpnb.Loop(model, sgd(model), ddpnb.loader(samples(16), 2), epochs=1)
        for number, (inputs, targets, _) in enumerate(loop):
            loop.update(
                F.cross_entropy(model(inputs), targets) * (math.nan if (number, ddpnb.rank()) == (1, 1) else 1.0)
            )
        return ddpnb.state_dict(model), loop.step, loop.skipped

    (state, *counts), (other, *_) = on_ranks(2, train)

    assert [3, 1] == counts
    assert 0 == farthest(state, other)
    assert all(value.isfinite().all() for value in state.values())


def test_the_nan_of_a_skipped_step_shows_in_the_curve_of_its_rank() -> None:
    def train() -> None:
        model = ddpnb.wrap(small_net())
        loop = ddpnb.Loop(model, sgd(model), ddpnb.loader(samples(16), 2), epochs=1)
        for number, (inputs, targets, _) in enumerate(loop):
            loop.update(
                F.cross_entropy(model(inputs), targets) * (math.nan if (number, ddpnb.rank()) == (1, 1) else 1.0)
            )

    run = ddpnb.launch(train, nproc_per_node=2, view=False, timeout=60)
    run.results(60)

    assert [[False] * 4, [False, True, False, False]] == [
        [math.isnan(value) for value in run.history["loss", rank]] for rank in range(2)
    ]
    assert "are not finite (norm nan): it is left out on all ranks" in run.output(0)


def test_fp16_trains_a_sharded_model_and_all_ranks_skip_together() -> None:
    def train() -> tuple[State, int, int, str]:
        model = ddpnb.wrap(small_net(torch.float32), "fsdp", precision="fp16")
        loop = ddpnb.Loop(model, sgd(model), ddpnb.loader(samples(16, torch.float32), 2), epochs=2)
        for number, (inputs, targets, _) in enumerate(loop):
            outputs = model(inputs)
            loop.update(F.cross_entropy(outputs, targets) * (math.inf if (number, ddpnb.rank()) == (2, 1) else 1.0))
        return ddpnb.state_dict(model), loop.step, loop.skipped, str(outputs.dtype)

    (state, *counts), (other, *_) = on_ranks(2, train)

    assert [7, 1, "torch.float32"] == counts
    assert 0 == farthest(state, other)


def test_bf16_trains_near_fp32() -> None:
    states = on_ranks(2, lambda: _by_loop(23, 2, 3, False, torch.float32, precision="bf16"))

    assert 0 < farthest(trained_apart(2, 23, 2, 3, False, torch.float32), states[0]) < 0.02


@pytest.mark.parametrize("hook", ["fp16", "powersgd"])
def test_compressed_gradients_train_near_whole_ones(hook: str) -> None:
    states = on_ranks(2, lambda: _by_loop(23, 2, 1, True, torch.float32, comm_hook=hook))

    assert farthest(trained_apart(2, 23, 2, 1, True, torch.float32), states[0]) < 0.02
    assert 0 == farthest(*states)


# ---- leaving a loop


def _interrupted(how: str) -> tuple[State, bool, bool, bool]:
    model = ddpnb.wrap(small_net())
    loader = ddpnb.loader(samples(23), 2, True, seed=3)
    first = ddpnb.Loop(model, torch.optim.SGD(model.parameters(), lr=0.0), loader, epochs=1, accumulate=3)
    try:
        for number, (inputs, targets, _) in enumerate(first):
            if number == 1 and how == "break":
                break
            loss = F.cross_entropy(model(inputs), targets)
            if number == 1:
                raise KeyboardInterrupt if how == "interrupt" else ValueError("mine")
            first.update(loss)
    except (ValueError, KeyboardInterrupt):
        pass
    switched = (torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), bool(model.require_backward_grad_sync))
    loop = ddpnb.Loop(model, sgd(model), ddpnb.loader(samples(23), 2, True, seed=3), epochs=EPOCHS, accumulate=3)
    for inputs, targets, _ in loop:
        loop.update(F.cross_entropy(model(inputs), targets))
    return ddpnb.state_dict(model), *switched


@pytest.mark.parametrize("how", ["break", "exception", "interrupt"])
def test_a_loop_that_is_left_leaves_nothing_switched_and_the_next_one_trains_right(how: str) -> None:
    state, *switched = on_ranks(2, _interrupted, how)[0]

    assert [False, True, True] == switched
    assert farthest(trained_apart(2, 23, 2, 3, False, torch.float64), state) <= 1e-12


def test_accumulate_begins_anew_after_a_window_that_was_left() -> None:
    def train() -> tuple[State, bool]:
        model = ddpnb.wrap(small_net())
        optimizer = sgd(model)
        for window in ddpnb.accumulate(model, ddpnb.loader(samples(23), 2, True, seed=3), steps=3):
            for inputs, targets, _ in window:
                window.backward(F.cross_entropy(model(inputs), targets))
                break
            break
        switched = bool(model.require_backward_grad_sync)
        loader = ddpnb.loader(samples(23), 2, True, seed=3)
        for _ in range(EPOCHS):
            for window in ddpnb.accumulate(model, loader, steps=3):
                for inputs, targets, _ in window:
                    window.backward(F.cross_entropy(model(inputs), targets))
                optimizer.step()
        return ddpnb.state_dict(model), switched

    (state, is_reduced), _ = on_ranks(2, train)

    assert is_reduced
    assert farthest(trained_apart(2, 23, 2, 3, False, torch.float64), state) <= 1e-12


def test_after_a_break_an_own_loop_reduces_its_gradients_and_its_optimizer_steps() -> None:
    def train() -> State:
        model = ddpnb.wrap(small_net())
        optimizer = sgd(model)
        for _ in ddpnb.Loop(model, optimizer, ddpnb.loader(samples(8), 1), epochs=1, accumulate=4):
            break
        inputs, targets, _ = samples(2).tensors
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[[ddpnb.rank()]]), targets[[ddpnb.rank()]]).backward()
        optimizer.step()
        return ddpnb.state_dict(model)

    states = on_ranks(2, train)

    assert 0 == farthest(*states)


@pytest.mark.parametrize("called", [False, True])
def test_a_batch_that_one_rank_skips_weighs_nothing(called: bool) -> None:
    def train() -> tuple[State, list[int]]:
        model = ddpnb.wrap(small_net())
        dataset = TensorDataset(*samples(8).tensors[:2], torch.arange(8))
        loop = ddpnb.Loop(model, sgd(model), ddpnb.loader(dataset, 2), epochs=1, accumulate=2)
        counted = []
        for number, (inputs, targets, indices) in enumerate(loop):
            if number == 1 and ddpnb.rank() == 1:
                if called:
                    model(inputs)
                loop.skip()
                continue
            counted += indices.tolist()
            loop.update(F.cross_entropy(model(inputs), targets))
        return ddpnb.state_dict(model), counted

    (state, first), (other, second) = on_ranks(2, train)

    inputs, targets, _ = samples(8).tensors
    model = small_net()
    optimizer = sgd(model)
    F.cross_entropy(model(inputs[first + second]), targets[first + second]).backward()
    optimizer.step()
    assert (4, 2) == (len(first), len(second))
    assert farthest(model.state_dict(), state) <= 1e-12
    assert 0 == farthest(state, other)


def test_stop_of_one_rank_ends_all_after_the_same_step() -> None:
    def train() -> tuple[int, bool]:
        model = ddpnb.wrap(small_net())
        loop = ddpnb.Loop(model, sgd(model), ddpnb.loader(samples(40), 2), epochs=3)
        for inputs, targets, _ in loop:
            loop.update(F.cross_entropy(model(inputs), targets))
            if loop.step == 4 and ddpnb.rank() == 1:
                loop.stop()
        return loop.step, loop.epoch_done

    assert [(5, False), (5, False)] == on_ranks(2, train)


def test_a_run_that_is_stopped_ends_its_loop_at_the_same_step_and_keeps_its_value() -> None:
    def train() -> int:
        model = ddpnb.wrap(small_net())
        loop = ddpnb.Loop(model, sgd(model), ddpnb.loader(samples(40), 2), epochs=100_000)
        for inputs, targets, _ in loop:
            loop.update(F.cross_entropy(model(inputs), targets))
        return loop.step

    run = ddpnb.launch(train, nproc_per_node=2, view=False, timeout=60)
    has_trained = threading.Event()
    run.watchers.append(lambda run: has_trained.set() if "loss" in run.state.history else None)
    assert has_trained.wait(60)
    run.stop()
    first, second = run.results(60).values()

    assert 0 < first == second
    assert (first - 1) // 10 == run.state.ranks[0].progress[0].done  # the epoch that was cut short is not counted


def test_a_stop_during_an_evaluation_is_acknowledged_and_ends_the_loop_after_it() -> None:
    def train() -> tuple[int, float | dict[str, float]]:
        model = ddpnb.wrap(small_net())
        loop = ddpnb.Loop(model, sgd(model), ddpnb.loader(samples(8), 2), epochs=100_000)
        result: float | dict[str, float] = 0.0
        for inputs, targets, _ in loop:
            loop.update(F.cross_entropy(model(inputs), targets))
            if loop.step == 1:
                print("evaluating", flush=True)
                result = loop.evaluate(lambda x, y, w: (time.sleep(0.05), y.float())[1], ddpnb.loader(samples(120), 1))
        return loop.step, result

    run = ddpnb.launch(train, nproc_per_node=2, view=False, timeout=60)
    is_evaluating = threading.Event()
    run.watchers.append(
        lambda run: is_evaluating.set() if all("evaluating" in text for text in run.output().values()) else None
    )
    assert is_evaluating.wait(60)
    run.stop()
    results = list(run.results(60).values())

    expected = float(samples(120).tensors[1].double().mean())
    assert 2 * [(2, pytest.approx(expected))] == results


# ---- what is refused, in one process


def _own_loop(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, ddpnb.Loop]:
    model = ddpnb.wrap(small_net())
    optimizer = sgd(model)
    return model, optimizer, ddpnb.Loop(model, optimizer, ddpnb.loader(samples(8), 2), **{"epochs": 1, **options})


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"epochs": 0}, ValueError, "epochs=0: at least 1"),
        ({"epochs": 1.5}, TypeError, "epochs is a whole number, not 1.5"),
        ({"accumulate": 0}, ValueError, "accumulate=0: at least 1"),
        ({"clip_norm": 0.0}, ValueError, "clip_norm=0.0: a positive number"),
        ({"clip_norm": -1.0}, ValueError, "clip_norm=-1.0: a positive number"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        _own_loop(**options)


def test_an_optimizer_of_another_model_is_refused() -> None:
    model = ddpnb.wrap(small_net())

    with pytest.raises(
        ValueError, match=r"a parameter of shape \(8, 6\) that is not the model's: make the optimizer after"
    ):
        ddpnb.Loop(model, sgd(small_net()), ddpnb.loader(samples(8), 2), epochs=1)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="the model has no parameter"):
        ddpnb.wrap(nn.ReLU())


def test_a_model_that_torch_alone_has_wrapped_is_refused() -> None:
    model = nn.parallel.DistributedDataParallel(ddpnb.unwrap(ddpnb.wrap(small_net())))

    with pytest.raises(ValueError, match="wrapped by torch's own DistributedDataParallel, which cannot weigh"):
        ddpnb.Loop(model, sgd(model), ddpnb.loader(samples(8), 2), epochs=1)


def test_a_loop_is_used_once() -> None:
    model, _, loop = _own_loop()
    for inputs, targets, _ in loop:
        loop.update(F.cross_entropy(model(inputs), targets))

    with pytest.raises(RuntimeError, match="this Loop has been used: make a new one"):
        iter(loop)


def test_a_batch_that_got_no_loss_is_missed() -> None:
    _, _, loop = _own_loop()

    with pytest.raises(RuntimeError, match=r"waits for its loss: loop.update\(loss\), or loop.skip\(\), for each"):
        for _ in loop:
            pass


def test_an_own_optimizer_step_in_a_loop_is_refused_and_allowed_after_it() -> None:
    model, optimizer, loop = _own_loop()
    inputs, targets, _ = next(batches := iter(loop))
    F.cross_entropy(model(inputs), targets).backward()

    with pytest.raises(RuntimeError, match=r"leave out loss\.backward"):
        optimizer.step()
    del batches
    optimizer.step()


@pytest.mark.parametrize("how", ["twice", "outside"])
def test_an_update_that_no_batch_waits_for_is_refused(how: str) -> None:
    model, _, loop = _own_loop()
    inputs, targets, _ = samples(2).tensors
    loss = F.cross_entropy(model(inputs), targets)
    if how == "twice":
        batches = iter(loop)
        next(batches)
        loop.update(loss)
        loss = F.cross_entropy(model(inputs), targets)

    with pytest.raises(RuntimeError, match=r"loop.update\(loss\) once for each batch"):
        loop.update(loss)


@pytest.mark.parametrize(
    ("loss", "kind", "words"),
    [
        (0.5, TypeError, "the loss is a tensor with a gradient, not float"),
        (torch.ones(3, requires_grad=True), ValueError, r"the loss is a scalar, not of shape \(3,\)"),
        (torch.tensor(1.0), ValueError, "the loss has no gradient"),
    ],
)
def test_a_loss_that_is_none_is_refused(loss: Any, kind: type[Exception], words: str) -> None:
    _, _, loop = _own_loop()
    batches = iter(loop)
    next(batches)

    with pytest.raises(kind, match=words):
        loop.update(loss)


def test_a_negative_weight_is_refused() -> None:
    model, _, loop = _own_loop()
    inputs, targets, _ = next(batches := iter(loop))

    with pytest.raises(ValueError, match=r"weight=-1\.0: how much the mean loss stands for"):
        loop.update(F.cross_entropy(model(inputs), targets), weight=-1)
    del batches


def test_a_batch_without_tensors_needs_a_weight() -> None:
    model = ddpnb.wrap(small_net())
    loop = ddpnb.Loop(model, sgd(model), [["a", "b"]], epochs=1)

    next(batches := iter(loop))
    loss = model(samples(2).tensors[0]).square().mean()

    with pytest.raises(TypeError, match="the batch has no tensor to count samples by"):
        loop.update(loss)
    del batches


@pytest.mark.parametrize(
    ("meddle", "words"),
    [
        (lambda optimizer, loss: optimizer.zero_grad(), r"leave out zero_grad\(\), each window begins with none"),
        (lambda optimizer, loss: loss.backward(retain_graph=True), r"leave out loss.backward\(\), give the sum"),
    ],
)
def test_own_gradients_within_a_loop_are_refused(meddle: Callable[..., None], words: str) -> None:
    model, optimizer, loop = _own_loop(accumulate=2)

    def train() -> None:
        for inputs, targets, _ in loop:
            loss = F.cross_entropy(model(inputs), targets)
            meddle(optimizer, loss)
            loop.update(loss)

    with pytest.raises(RuntimeError, match=words):
        train()


@pytest.mark.parametrize("begins_frozen", [False, True])
def test_freezing_after_wrapping_is_refused_by_name(begins_frozen: bool) -> None:
    net = small_net()
    net[0].requires_grad_(not begins_frozen)
    model = ddpnb.wrap(net)
    net[0].requires_grad_(begins_frozen)

    with pytest.raises(RuntimeError, match=rf"'0.weight' was {'un' * begins_frozen}frozen after wrap\(\)"):
        ddpnb.Loop(model, sgd(model), ddpnb.loader(samples(8), 2), epochs=1)


def test_a_layer_that_came_after_wrapping_is_refused_by_name() -> None:
    model = ddpnb.wrap(small_net())
    ddpnb.unwrap(model).append(nn.Linear(3, 3, dtype=torch.float64))  # type: ignore[operator]

    with pytest.raises(RuntimeError, match=r"'3.weight' was unfrozen after wrap\(\), or came to the model later"):
        ddpnb.Loop(model, sgd(model), ddpnb.loader(samples(8), 2), epochs=1)


def test_a_loop_within_a_loop_over_the_same_model_is_refused() -> None:
    model, optimizer, loop = _own_loop()
    batches = iter(loop)
    other = ddpnb.Loop(model, optimizer, ddpnb.loader(samples(8), 2), epochs=1)

    with pytest.raises(RuntimeError, match="another Loop or window over this model is still under way"):
        iter(other)
    del batches


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda parts: parts | {"optimizer": torch.optim.LBFGS(parts["model"].parameters())}, "LBFGS calls the model"),
        (
            lambda parts: parts | {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(parts["optimizer"])},
            "ReduceLROnPlateau wants a metric",
        ),
        (lambda parts: parts | {"loader": iter([1])}, "which can be gone through once: give a loader"),
    ],
)
def test_what_a_loop_cannot_drive_is_refused(change: Callable[[dict[str, Any]], dict[str, Any]], words: str) -> None:
    model = ddpnb.wrap(small_net())
    parts = change({"model": model, "optimizer": sgd(model), "loader": ddpnb.loader(samples(8), 2), "epochs": 2})

    with pytest.raises(TypeError, match=words):
        ddpnb.Loop(parts.pop("model"), parts.pop("optimizer"), parts.pop("loader"), **parts)


def test_sparse_gradients_of_an_embedding_train_as_dense_ones() -> None:
    def train(sparse: bool) -> State:
        torch.manual_seed(0)
        net = nn.Sequential(nn.EmbeddingBag(20, 4, sparse=sparse), nn.Linear(4, 3)).double()
        model = ddpnb.wrap(net)
        data = TensorDataset(torch.arange(38).reshape(19, 2) % 20, samples(19).tensors[1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = ddpnb.Loop(model, optimizer, ddpnb.loader(data, 2), epochs=2, accumulate=2)
        for inputs, targets in loop:
            loop.update(F.cross_entropy(model(inputs), targets))
        return ddpnb.state_dict(model)

    (expected, _), (state, _) = on_ranks(2, train, False), on_ranks(2, train, True)

    assert farthest(expected, state) <= 1e-12


def test_a_loss_over_nothing_weighs_nothing_though_it_is_nan() -> None:
    def train() -> tuple[State, int, int]:
        model = ddpnb.wrap(small_net())
        loop = ddpnb.Loop(model, sgd(model), ddpnb.loader(samples(8), 2), epochs=1)
        for inputs, targets, _ in loop:
            counting = torch.full((2,), float(ddpnb.rank() == 0), dtype=torch.float64)
            losses = F.cross_entropy(model(inputs), targets, reduction="none")
            loop.update((losses * counting).sum() / counting.sum(), weight=counting.sum())
        return ddpnb.state_dict(model), loop.step, loop.skipped

    (state, *counts), (other, *_) = on_ranks(2, train)

    assert [2, 0] == counts
    assert 0 == farthest(state, other)
    assert all(value.isfinite().all() for value in state.values())


def test_a_parameter_that_the_loss_does_not_need_is_named_with_its_cure() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(DIM, 3), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    def train() -> None:
        model = ddpnb.wrap(Net())
        loop = ddpnb.Loop(model, sgd(model), ddpnb.loader(samples(8, torch.float32), 2), epochs=1)
        for inputs, targets, _ in loop:
            loop.update(F.cross_entropy(model(inputs), targets))

    text = refused(2, RuntimeError, train)

    assert "the loss does not depend on 'unused.weight', 'unused.bias'" in text
    assert "find_unused_parameters=True" in text


# ---- evaluation


class _Shaped(Dataset[tuple[torch.Tensor, int]]):
    """Values that no two orders of adding round alike."""

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([1.1**index * (-1) ** index] * DIM, dtype=torch.float64), index


def _evaluated() -> dict[str, float]:
    model = ddpnb.wrap(small_net())
    loop = ddpnb.Loop(model, sgd(model), ddpnb.loader(samples(8), 2), epochs=1)
    is_training = model.training

    def values(inputs: torch.Tensor, indices: torch.Tensor) -> dict[str, torch.Tensor]:
        assert not model.training
        assert not torch.is_grad_enabled()
        return {"value": inputs[:, 0] * 1e3, "even": (indices % 2 == 0).float()}

    result = loop.evaluate(values, ddpnb.loader(_Shaped(), 4))
    assert model.training == is_training
    return result  # type: ignore[return-value]


def test_an_evaluation_has_the_same_bits_on_any_number_of_ranks() -> None:
    exact = math.fsum(float(_Shaped()[index][0][0]) * 1e3 for index in range(29)) / 29

    found = [each for world_size in (1, 2, 3, 4) for each in on_ranks(world_size, _evaluated)]

    assert 10 * [{"value": exact, "even": 15 / 29}] == found


@pytest.mark.parametrize(
    ("fn", "kind", "words"),
    [
        (lambda x, y: 0.5, TypeError, "gives a tensor with a value for each sample, not float"),
        (lambda x, y: x.mean(), ValueError, r"gives one value per sample, shape \(4,\), not \(\)"),
        (lambda x, y: {"loss": x}, ValueError, r"'loss' of evaluate\(\)'s function gives one value per sample"),
    ],
)
def test_an_evaluation_of_something_else_is_refused(fn: Callable[..., Any], kind: type[Exception], words: str) -> None:
    _, _, loop = _own_loop()

    with pytest.raises(kind, match=words):
        loop.evaluate(fn, ddpnb.loader(_Shaped(), 4))


# ---- the classic mistakes


def _warned(make: Callable[[], tuple[nn.Module, Any]], **options: Any) -> list[str]:
    """Warnings of a loop's first step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, loader = make()
        loop = ddpnb.Loop(model, sgd(model), loader, epochs=1, **options)
        for inputs, targets, _ in loop:
            loop.update(F.cross_entropy(model(inputs), targets))
    own = [each for each in caught if issubclass(each.category, ddpnb.TrainingWarning)]
    assert {"_warned()"} >= {each.filename for each in own}
    return [str(each.message) for each in own]


def _without_sampler() -> tuple[nn.Module, Any]:
    return ddpnb.wrap(small_net()), DataLoader(samples(8), 2)


def _with_batchnorm() -> tuple[nn.Module, Any]:
    model = ddpnb.wrap(nn.Sequential(nn.Linear(DIM, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double())
    return model, ddpnb.loader(samples(8), 2)


def _changed_on_one_rank() -> tuple[nn.Module, Any]:
    model = ddpnb.wrap(small_net())
    if ddpnb.rank() == 1:
        with torch.no_grad():
            next(model.parameters()).add_(1)
    return model, ddpnb.loader(samples(8), 2)


def _not_wrapped() -> tuple[nn.Module, Any]:
    return small_net(), ddpnb.loader(samples(8), 2)


MISTAKES = [
    (_not_wrapped, "the model is not wrapped: every rank trains weights of its own. Use ddpnb.wrap(model)"),
    (_without_sampler, "the DataLoader has no distributed sampler. Use ddpnb.loader("),
    (
        _with_batchnorm,
        "'1' takes its statistics from 2 samples, this rank's own. Use ddpnb.wrap(model, sync_batchnorm=True)",
    ),
    (_changed_on_one_rank, "'0.weight' differs between ranks: weights were changed or loaded on some ranks only."),
]


@pytest.mark.parametrize(("make", "words"), MISTAKES)
def test_a_classic_mistake_is_named_once_with_its_cure(make: Callable[[], Any], words: str) -> None:
    warned = on_ranks(2, _warned, make)

    assert [] == warned[1]
    assert 1 == len(warned[0])
    assert words in warned[0][0]


def test_accumulate_notices_an_epoch_that_comes_in_the_order_of_the_one_before() -> None:
    def train(calls_set_epoch: bool) -> list[str]:
        model = ddpnb.wrap(small_net())
        loader = DataLoader(samples(8), 2, sampler=DistributedSampler(samples(8)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for epoch in range(2):
                if calls_set_epoch:
                    loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
                for window in ddpnb.accumulate(model, loader, steps=2):
                    for inputs, targets, _ in window:
                        window.backward(F.cross_entropy(model(inputs), targets))
        return [str(each.message) for each in caught if issubclass(each.category, ddpnb.TrainingWarning)]

    assert [[], []] == on_ranks(2, train, True)
    ((text,), _) = on_ranks(2, train, False)
    assert "call loader.sampler.set_epoch(epoch) before each epoch" in text


def test_the_checks_can_be_turned_off_and_say_nothing_where_all_is_well() -> None:
    def well() -> tuple[nn.Module, Any]:
        return ddpnb.wrap(small_net()), ddpnb.loader(samples(8), 2)

    assert [[], []] == on_ranks(2, _warned, _without_sampler, checks=False)

    def apart() -> tuple[nn.Module, Any]:
        return ddpnb.wrap(small_net(), "none"), ddpnb.loader(samples(8), 2)

    assert [[], []] == on_ranks(2, _warned, well)
    assert [[], []] == on_ranks(2, _warned, apart)
    assert [[]] == on_ranks(1, _warned, _with_batchnorm)
