"""`Loop(exact=True)`: the same bits for any number of ranks, and the numbers that plain torch has."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

import ddpnb
from ddpnb.train.loop import Loop
from ddpnb.train.sampling import Cut, epoch_order
from ddpnb.train.tree import Node, Tree

from .ranks import on_ranks, refused

pytestmark = pytest.mark.usefixtures("group_of_one")

DIM, CLASSES, SHARDS = 6, 3, 12
JOINT = 24  # samples of a global batch
JOINT_FOR_FIVE = 60  # which 5 ranks can share as well


class Case(NamedTuple):
    """What is to have the same bits on any number of ranks."""

    length: int
    joint: int = JOINT
    accumulate: int = 1
    num_workers: int = 0
    weighted: bool = False
    precision: Any = "fp32"


CASES = [
    Case(101),
    Case(37, precision="fp16"),
    Case(2 * JOINT + 2, accumulate=2, num_workers=2, weighted=True),  # of the last 2 samples most ranks have none
]
CASES_FOR_FIVE = [Case(101, JOINT_FOR_FIVE), Case(37, JOINT_FOR_FIVE, weighted=True), Case(63, JOINT_FOR_FIVE)]


class Jittered(Dataset[Any]):
    """Two rows of features, changed a little by whatever draws random numbers; a class; a weight; the index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        features = torch.randn(2, DIM, generator=generator)
        jitter = 0.1 * (torch.randn(2, DIM) + random.random() + np.random.rand())
        target = torch.randint(CLASSES, (), generator=generator)
        return (features + jitter).float(), target, torch.rand((), generator=generator) + 0.1, index


def with_noise(samples: list[Any]) -> Any:
    """Collate, and draw random numbers for the whole batch."""
    inputs, *others = default_collate(samples)
    return inputs + 0.1 * torch.randn(inputs.shape), *others


def net_with_everything() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 7, 3), nn.BatchNorm1d(7), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(28, CLASSES)
    )


def digest(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    """Of the weights, the buffers and the optimizer's state, bit by bit."""
    found = hashlib.sha256()
    for value in ddpnb.state_dict(model).values():
        found.update(value.numpy().tobytes())
    for state in optimizer.state_dict()["state"].values() if optimizer is not None else ():
        for value in state.values():
            found.update(value.numpy().tobytes())
    return found.hexdigest()


def bits_of(cases: list[Case]) -> list[tuple[str, int, int]]:
    return [trained(case) for case in cases]


def trained(case: Case) -> tuple[str, int, int]:
    model = ddpnb.wrap(net_with_everything(), precision=case.precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch_size = case.joint // (ddpnb.world_size() * case.accumulate)
    loader = ddpnb.loader(
        Jittered(case.length),
        batch_size,
        shuffle=True,
        seed=3,
        num_workers=case.num_workers,
        collate_fn=with_noise,
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loop = Loop(
        model,
        optimizer,
        loader,
        epochs=2,
        accumulate=case.accumulate,
        scheduler=scheduler,
        clip_norm=1.0,
        exact=True,
        shards=SHARDS,
    )
    for inputs, targets, weights, _ in loop:
        losses = F.cross_entropy(model(inputs), targets, reduction="none")
        if case.weighted:
            loop.update((losses * weights).sum() / weights.sum(), weight=weights.sum())
        else:
            loop.update(losses.sum() / max(1, len(losses)))
    return digest(model, optimizer), loop.step, loop.samples


# ---- the same bits


def test_1_to_4_ranks_end_with_the_same_bits() -> None:
    (alone,) = on_ranks(1, bits_of, CASES)

    several = [each for world_size in (2, 3, 4) for each in on_ranks(world_size, bits_of, CASES)]

    assert [alone] * 9 == several
    assert [2 * case.length for case in CASES] == [samples for _, _, samples in alone]


def test_1_to_5_ranks_end_with_the_same_bits() -> None:
    (alone,) = on_ranks(1, bits_of, CASES_FOR_FIVE)

    several = [each for world_size in (2, 5) for each in on_ranks(world_size, bits_of, CASES_FOR_FIVE)]

    assert [alone] * 7 == several


def test_accumulation_is_a_factor_of_the_global_batch_and_nothing_else() -> None:
    once, twice = bits_of([Case(101), Case(101, accumulate=2)])

    assert once == twice


class Handed(NamedTuple):
    """What one world hands to the next between two steps."""

    model: dict[str, torch.Tensor]
    optimizer: Any
    position: dict[str, int]


def some_steps(handed: Handed | None, num_steps: int | None) -> tuple[Handed, list[int], str]:
    """Go on with an epoch for so many steps, or to its end; which samples this rank has seen."""
    model = ddpnb.wrap(net_with_everything())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = ddpnb.loader(Jittered(101), JOINT // ddpnb.world_size(), shuffle=True, num_workers=2)
    if handed is not None:
        ddpnb.load_state_dict(model, handed.model)
        optimizer.load_state_dict(handed.optimizer)
        loader.load_state_dict(handed.position)
    seen: list[int] = []
    loop = Loop(model, optimizer, loader, epochs=1, exact=True, shards=SHARDS)
    for inputs, targets, _, indices in loop:
        loop.update(F.cross_entropy(model(inputs), targets))
        seen += indices.tolist()
        if loop.step == num_steps:
            break
    here = Handed(ddpnb.state_dict(model), optimizer.state_dict(), loader.state_dict())
    return here, seen, digest(model, optimizer)


def test_a_run_that_is_resized_in_the_middle_of_an_epoch_ends_with_the_same_bits() -> None:
    _, all_at_once, expected = some_steps(None, None)

    first = on_ranks(4, some_steps, None, 2)
    second = on_ranks(2, some_steps, first[0][0], 1)
    third = on_ranks(3, some_steps, second[0][0], None)

    assert [expected] * 3 == [bits for _, _, bits in third]
    assert list(range(101)) == sorted(all_at_once)
    assert list(range(101)) == sorted(index for _, seen, _ in (*first, *second, *third) for index in seen)


# ---- the numbers of plain torch


def samples(length: int) -> TensorDataset:
    """Inputs (length, DIM), classes (length,), weights (length,), in float64."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(length, DIM, generator=generator, dtype=torch.float64)
    weights = torch.randint(1, 5, (length,), generator=generator).double()
    return TensorDataset(inputs, torch.randint(CLASSES, (length,), generator=generator), weights)


def plain_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def exact_and_fast(length: int) -> list[dict[str, torch.Tensor]]:
    ends = []
    for options in ({"exact": True, "shards": SHARDS}, {}):
        model = ddpnb.wrap(plain_net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = ddpnb.loader(samples(length), 4, shuffle=True)
        loop: Loop = Loop(model, optimizer, loader, epochs=2, accumulate=2, clip_norm=0.5, **options)  # type: ignore[arg-type]
        for inputs, targets, weights in loop:
            losses = F.cross_entropy(model(inputs), targets, reduction="none") * weights
            loop.update(losses.sum() / weights.sum().clamp(min=1), weight=weights.sum())
        ends.append(ddpnb.state_dict(model))
    return ends


def test_an_exact_loop_makes_the_steps_of_a_fast_one() -> None:
    for exact, fast in on_ranks(3, exact_and_fast, 53):
        for name, value in fast.items():
            torch.testing.assert_close(exact[name], value, rtol=0, atol=1e-12)


class Normalising(nn.Module):
    """BatchNorm of all kinds: usual, without momentum, called twice, frozen, and one without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.usual = nn.BatchNorm1d(DIM)
        self.even = nn.BatchNorm1d(DIM, momentum=None)
        self.frozen = nn.BatchNorm1d(DIM)
        self.forgetful = nn.BatchNorm1d(DIM, track_running_stats=False)
        self.last = nn.Linear(DIM, CLASSES)

    def train(self, mode: bool = True) -> Normalising:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self.even(self.usual(inputs).tanh())
        result: torch.Tensor = self.last(self.forgetful(self.frozen(self.usual(inputs * inputs))))
        return result


def normalising() -> Normalising:
    torch.manual_seed(0)
    return Normalising().double().train()


def with_batchnorm(joint: int) -> dict[str, torch.Tensor]:
    model = ddpnb.wrap(normalising())
    loader = ddpnb.loader(samples(2 * joint), joint // ddpnb.world_size(), shuffle=True)
    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, epochs=2, exact=True, shards=4)
    for inputs, targets, _ in loop:
        loop.update(F.cross_entropy(model(inputs), targets))
    return ddpnb.state_dict(model)


def test_running_statistics_are_those_of_the_shards_one_after_the_other() -> None:
    inputs, targets, _ = samples(2 * JOINT).tensors
    model = normalising()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for joint in torch.as_tensor(epoch_order(2 * JOINT, 0, epoch)).split(JOINT):
            optimizer.zero_grad()
            for shard in joint.chunk(4):
                (F.cross_entropy(model(inputs[shard]), targets[shard]) / 4).backward()
            optimizer.step()

    for state in on_ranks(3, with_batchnorm, JOINT):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


# ---- what has nothing to add


class TwoHeads(nn.Module):
    """One of the heads is used for a batch; the third for none."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.BatchNorm1d(DIM)
        self.heads = nn.ModuleList(nn.Linear(DIM, 1) for _ in range(3))

    def forward(self, inputs: torch.Tensor, head: int) -> torch.Tensor:
        outputs: torch.Tensor = self.heads[head](self.body(inputs))
        return outputs


def with_gaps() -> tuple[str, int, int, int, bool]:
    """Some shards are skipped, some weigh nothing, some use one head and some the other, and some losses are nan."""
    torch.manual_seed(0)
    bare = TwoHeads().double()
    unused = bare.heads[2].weight.clone()
    model = ddpnb.wrap(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data, batch_size = samples(5 * JOINT), JOINT // ddpnb.world_size()
    loader = ddpnb.loader(data, batch_size, shuffle=True, collate_fn=with_noise)
    loop = Loop(model, optimizer, loader, epochs=1, exact=True, shards=SHARDS)
    for inputs, _, weights in loop:
        kind, number = int(weights.sum()) % 4, loader.samples // JOINT  # of the global batch
        if number == 2 or kind == 3:
            loop.skip()
        else:
            outputs = model(inputs, kind % 2)
            loop.update(outputs.mean() * (math.nan if number == 3 else 1), weight=0 if kind == 2 else None)
    was_left_alone = torch.equal(unused, bare.heads[2].weight)
    return digest(model, optimizer), loop.step, loop.skipped, int(bare.body.num_batches_tracked or 0), was_left_alone


def test_shards_that_are_skipped_or_weigh_nothing_leave_the_same_bits() -> None:
    (alone,) = on_ranks(1, with_gaps)

    assert [alone] * 5 == [*on_ranks(2, with_gaps), *on_ranks(3, with_gaps)]
    assert [3, 1] == [alone[1], alone[2]]
    assert 0 < alone[3] < 4 * SHARDS
    assert alone[4]


def silent_on_one_rank() -> str:
    model = ddpnb.wrap(normalising())
    loader = ddpnb.loader(samples(2 * JOINT), JOINT // 2)
    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, epochs=1, exact=True)
    for inputs, targets, _ in loop:
        if ddpnb.rank() == 0:
            loop.skip()
        else:
            loop.update(F.cross_entropy(model(inputs), targets))
    return digest(model)


def test_a_rank_that_never_calls_the_model_has_the_weights_and_statistics_of_the_other() -> None:
    first, second = on_ranks(2, silent_on_one_rank)

    assert first == second


def rounds_of_the_body() -> tuple[list[int], int]:
    """How many samples each round of the body had, and how many had `epoch_done`."""
    model = ddpnb.wrap(plain_net())
    loader = ddpnb.loader(samples(JOINT + 2), JOINT // 3)
    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, epochs=1, exact=True, shards=4)
    sizes, num_done = [], 0
    for inputs, targets, _ in loop:
        sizes.append(len(inputs))
        loop.update(F.cross_entropy(model(inputs), targets))
        num_done += loop.epoch_done
    return sizes, num_done


def test_a_rank_without_a_shard_has_a_batch_without_samples_and_sees_the_epochs_end() -> None:
    assert [([6, 6, 1], 1), ([6, 1], 1), ([6, 0], 1)] == on_ranks(3, rounds_of_the_body)


# ---- what is switched, and back


def left_midway() -> None:
    torch.set_num_threads(2)
    model = normalising()
    loader = ddpnb.loader(samples(JOINT), JOINT)
    before = {name: value.clone() for name, value in model.named_buffers()}
    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, epochs=1, exact=True, shards=4)
    for inputs, _, _ in loop:
        model(inputs)
        assert torch.get_num_threads() == 1
        assert all(torch.equal(before[name], value) for name, value in model.named_buffers())
        break

    assert torch.get_num_threads() == 2
    model(samples(JOINT).tensors[0])
    assert model.usual.num_batches_tracked == 2
    assert [JOINT] == [len(inputs) for inputs, _, _ in loader]


def test_a_loop_that_is_left_leaves_nothing_switched() -> None:
    on_ranks(1, left_midway)


def gradients_after_a_loop() -> list[torch.Tensor]:
    model = ddpnb.wrap(plain_net())
    loader = ddpnb.loader(samples(JOINT), JOINT // 2)
    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, epochs=1, exact=True)
    for inputs, targets, _ in loop:
        loop.update(F.cross_entropy(model(inputs), targets))
    model(torch.full((1, DIM), float(ddpnb.rank()), dtype=torch.float64)).sum().backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


def test_ddp_reduces_again_once_the_loop_is_over() -> None:
    first, second = on_ranks(2, gradients_after_a_loop)

    assert all(torch.equal(*each) for each in zip(first, second, strict=True))


# ---- what cannot be


class Stream(IterableDataset[Any]):
    """One that has no indices."""

    def __iter__(self) -> Iterator[Any]:
        return iter(samples(JOINT))


class Counting(nn.Module):
    """Changes a buffer of its own in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, CLASSES).double()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += len(inputs)
        outputs: torch.Tensor = self.layer(inputs)
        return outputs


def train(kind: str) -> None:
    """An exact loop with something that it cannot have."""
    rank, world_size = ddpnb.rank(), ddpnb.world_size()
    bare: nn.Module = Counting() if kind == "buffer" else plain_net()
    if kind == "sync_batchnorm":
        bare = nn.Sequential(nn.BatchNorm1d(DIM), bare).double()
    wrapping: dict[str, Any] = {
        "sync_batchnorm": {"sync_batchnorm": True},
        "fsdp": {"strategy": "fsdp"},
        "comm_hook": {"comm_hook": "fp16"},
        "static_graph": {"static_graph": True},
        "apart": {"strategy": "none"},
    }
    model = ddpnb.wrap(bare, **wrapping.get(kind, {}))
    if kind == "compile":
        model.compile(backend="eager")
    dataset = Stream() if kind == "stream" else samples(JOINT)
    batch_size = JOINT // world_size + (rank if kind == "batch_size" else 0)
    loading = {"pad": {"pad": True}, "drop_last": {"drop_last": True}, "seed": {"seed": rank}}
    loader: Any = ddpnb.loader(dataset, batch_size, **loading.get(kind, {}))
    if kind == "DataLoader":
        loader = DataLoader(samples(JOINT), batch_size)
    loop = Loop(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loader,
        epochs=2,
        accumulate=2 if kind == "drop_last" else 1,
        exact=True,
        shards={"too few": 1, "none": 0}.get(kind, SHARDS),
    )
    for inputs, targets, _ in loop:
        loop.update(F.cross_entropy(model(inputs), targets))
        if kind == "threads" and loop.epoch_done:
            torch.set_num_threads(2)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("sync_batchnorm", ValueError, "'0' normalises over the joint batch"),
        ("fsdp", ValueError, "use wrap(model)"),
        ("comm_hook", ValueError, "leave out comm_hook"),
        ("static_graph", ValueError, "static_graph=True"),
        ("apart", ValueError, "use ddpnb.wrap(model)"),
        ("compile", ValueError, "torch.compile"),
        ("DataLoader", TypeError, "got a DataLoader"),
        ("stream", TypeError, "got an IterableDataset"),
        ("pad", ValueError, "pad=True"),
        ("drop_last", ValueError, "Let batch_size be 2 times as large"),
        ("too few", ValueError, "shards=1 for 2 ranks"),
        ("none", ValueError, "at least 1"),
        ("batch_size", ValueError, "accumulate is, by rank, [24, 26]"),
        ("seed", ValueError, "position is, by rank"),
        ("buffer", RuntimeError, "the buffer 'seen'"),
        ("threads", RuntimeError, "torch.set_num_threads(2)"),
    ],
)
def test_what_cannot_be_exact_is_refused(kind: str, error: type[Exception], words: str) -> None:
    assert words in refused(2, error, train, kind)


# ---- dealing and adding


@pytest.mark.parametrize("num_samples", [1, 2, 11, 12, 13, 24, 101])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_each_place_is_in_one_shard_and_each_shard_that_has_one_on_one_rank(num_samples: int, world_size: int) -> None:
    cut = Cut(SHARDS)
    places, ranks = cut.places(num_samples), cut.shards(num_samples, world_size)

    assert list(range(num_samples)) == [place for shard in places for place in shard]
    assert [shard for shard in range(SHARDS) if places[shard]] == [shard for shards in ranks for shard in shards]
    assert max(map(len, places)) - min(map(len, places)) <= 1
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


@pytest.mark.parametrize("num_leaves", [1, 2, 7, 12, 16])
@pytest.mark.parametrize("empty", [set(), {0}, {3, 4, 5, 6}])
def test_a_tree_is_the_same_from_whatever_parts(num_leaves: int, empty: set[int]) -> None:
    leaves = [Node(leaf, leaf + 1, None if leaf in empty else str(leaf)) for leaf in range(num_leaves)]
    tree = Tree(num_leaves)
    alone = tree.root(leaves, bracketed)

    for num_ranks in range(2, num_leaves + 1):
        nodes: list[Node[str]] = []
        for shards in Cut(num_leaves).shards(num_leaves, num_ranks):
            own: list[Node[str]] = []
            tree.extend(own, leaves[shards.start : shards.stop], bracketed)
            nodes += own

        assert alone == tree.root(nodes, bracketed)


def test_twelve_leaves_are_cut_into_halves_of_halves() -> None:
    leaves = [Node(leaf, leaf + 1, "abcdefghijkl"[leaf]) for leaf in range(12)]

    assert "(((ab)c)(d(ef)))(((gh)i)(j(kl)))" == (Tree(12).root(leaves, bracketed) or "")[1:-1]


def bracketed(left: str, right: str) -> str:
    return f"({left}{right})"
