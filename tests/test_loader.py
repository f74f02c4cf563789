"""`ddpnb.loader()`: what comes out of it is the same for any number of ranks and of DataLoader workers."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from ddpnb.train.loading import Loader, loader
from ddpnb.world import World

from .conftest import have_ended, wait_until
from .ranks import on_ranks

ALONE = World()
Row = tuple[float, ...]


def draws() -> list[float]:
    """One number of each generator."""
    return [random.random(), np.random.rand(), torch.rand((), dtype=torch.float64).item()]


class Augmented(Dataset[Any]):
    """Samples of an index and three random numbers."""

    classes = ("cat", "dog")

    def __init__(self, length: int = 13) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, *draws()], dtype=torch.float64)


class Stream(IterableDataset[Any]):
    """The same in an order of its own, drawn at the beginning and on the way; no length."""

    def __init__(self, length: int = 13) -> None:
        self.num_items = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self._items(random.sample(range(self.num_items), self.num_items))

    def _items(self, buffer: list[int]) -> Iterator[torch.Tensor]:
        while buffer:
            index = buffer.pop(random.randrange(min(4, len(buffer))))
            yield torch.tensor([index, *draws()], dtype=torch.float64)


class MeasuredStream(Stream):
    """One that knows its length."""

    def __len__(self) -> int:
        return self.num_items


def ranks(world_size: int, dataset: Any, batch_size: int = 2, **options: Any) -> list[Loader]:
    """The loaders of so many ranks, all in this process."""
    worlds = (World(rank=rank, world_size=world_size) for rank in range(world_size))
    return [loader(dataset, batch_size, world=world, **options) for world in worlds]


def rows(batch: torch.Tensor) -> list[Row]:
    return [tuple(row) for row in batch.tolist()]


def joined(loaders: list[Loader]) -> list[list[Row]]:
    """One epoch's global batches, each sorted; the ranks have equally many."""
    return [sorted(chain.from_iterable(map(rows, batches))) for batches in zip(*loaders, strict=True)]


def indices(batches: Any) -> list[int]:
    """The samples in them."""
    return [int(row[0]) for batch in batches for row in rows(batch)]


def generators() -> tuple[Any, ...]:
    """The states of the global generators, comparable."""
    _, numbers, *rest = np.random.get_state(legacy=True)
    return random.getstate(), numbers.tobytes(), rest, torch.get_rng_state().tolist()


# ---- the same for any number of ranks and workers


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dataset", [Augmented(), Stream()], ids=["indexed", "stream"])
def test_augmentation_is_the_same_for_any_number_of_ranks_and_workers(
    dataset: Any, world_size: int, num_workers: int
) -> None:
    shuffle = isinstance(dataset, Augmented)
    alone = ranks(1, dataset, 2 * world_size, shuffle=shuffle)
    together = ranks(world_size, dataset, shuffle=shuffle, num_workers=num_workers)

    for _ in range(3):
        batches = joined(together)

        assert joined(alone) == batches
        assert list(range(13)) == sorted(int(row[0]) for batch in batches for row in batch)


def three_epochs(dataset: Any, num_workers: int, **options: Any) -> list[list[Row]]:
    """The batches of this rank."""
    batches = loader(dataset, 2, num_workers=num_workers, **options)
    return [rows(batch) for _ in range(3) for batch in batches]


@pytest.mark.parametrize(("world_size", "num_workers"), [(2, 0), (2, 2), (3, 1)])
def test_real_ranks_load_what_they_load_here(world_size: int, num_workers: int) -> None:
    here = [
        [rows(batch) for _ in range(3) for batch in batches] for batches in ranks(world_size, Augmented(), shuffle=True)
    ]

    assert here == on_ranks(world_size, three_epochs, Augmented(), num_workers, shuffle=True)


def test_real_ranks_share_a_stream() -> None:
    here = [[rows(batch) for _ in range(3) for batch in batches] for batches in ranks(2, Stream())]

    assert here == on_ranks(2, three_epochs, Stream(), 2)


def load_a_local_class() -> list[int]:
    """A dataset that cannot be pickled, as one of a cell in its worker."""

    class Local(Augmented):
        pass

    return indices(loader(Local(3), 2, num_workers=1))


def test_workers_of_real_ranks_need_no_pickling() -> None:
    assert [[0, 2], [1]] == on_ranks(2, load_a_local_class)


def test_epochs_and_seeds_augment_anew() -> None:
    drawn: list[set[Row]] = []
    for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        batches = loader(Augmented(), 2, seed=seed, world=ALONE)
        batches.set_epoch(epoch)
        drawn.append({row[1:] for batch in batches for row in rows(batch)})

    assert 4 * 13 == len(set.union(*drawn))


def test_what_collate_fn_draws_depends_on_batch_and_rank_alone() -> None:
    first, *others = (
        [list(batches) for batches in ranks(2, dataset, collate_fn=lambda _: draws(), num_workers=num_workers)]
        for dataset in (Augmented(), Stream(), list(range(13)))
        for num_workers in (0, 2)
    )

    assert [first] * 5 == others
    assert 3 + 4 == len({tuple(drawn) for batches in first for drawn in batches if drawn})  # one was cut


def test_it_is_a_dataloader_and_shows_what_it_was_given() -> None:
    batches = loader(Augmented(), 4, drop_last=True, world=World(world_size=3))

    assert isinstance(batches, DataLoader)
    assert (4, True, 1, 0) == (batches.batch_size, batches.drop_last, len(batches), batches.num_workers)
    assert (13, ("cat", "dog"), 5) == (len(batches.dataset), batches.dataset.classes, int(batches.dataset[5][0]))


def test_without_shuffling_alone_it_gives_what_torch_gives() -> None:
    dataset = TensorDataset(torch.arange(26).reshape(13, 2), torch.arange(13))
    expected = list(DataLoader(dataset, 4))

    for batch, ours in zip(expected, loader(dataset, 4, world=ALONE), strict=True):
        assert type(batch) is type(ours)
        assert all(map(torch.equal, batch, ours))


# ---- the global generators


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "dataset", [Augmented(), Stream(), TensorDataset(torch.arange(13))], ids=["indexed", "stream", "tensors"]
)
def test_loading_leaves_the_global_generators_alone(dataset: Any, num_workers: int) -> None:
    *_, last = ranks(3, dataset, num_workers=num_workers, shuffle=not isinstance(dataset, Stream))
    before = generators()

    during = [generators() for _ in last]

    assert 0 == last.local_samples  # the sample that only gave its shape drew, too
    assert [before] * 3 == during
    assert before == generators()


class Batched(Augmented):
    """One that reads batches at once, and draws for all of them."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [torch.tensor([-1.0 - index]) for index in indices]


def test_a_datasets_own_batches_are_not_used_where_samples_are_seeded() -> None:
    assert [0, 1, 2, 3] == indices(loader(Batched(4), 2, world=ALONE))
    assert [-1, -2, -3, -4] == indices(loader(Batched(4), 2, seed_samples=False, world=ALONE))


def is_seeded(dataset: Any) -> bool:
    """Whether its batches are made with generators that were seeded for them."""
    before = generators()
    return not any(loader(dataset, 9, collate_fn=lambda _: generators() == before, world=ALONE))


class OwnTensors(TensorDataset):
    """May draw."""


def test_only_what_is_surely_made_of_tensors_is_not_seeded() -> None:
    tensors, own = TensorDataset(torch.arange(3)), OwnTensors(torch.arange(3))

    assert not is_seeded(tensors)
    assert not is_seeded(Subset(tensors, [0, 2]))
    assert not is_seeded(Subset(tensors, [0]) + Subset(tensors, [1]))
    assert is_seeded(own)
    assert is_seeded(Subset(own, [0, 2]))
    assert is_seeded(tensors + own)


# ---- a rank without samples


class Pair(NamedTuple):
    inputs: torch.Tensor
    names: list[str]


@dataclass(frozen=True)
class Record:
    inputs: torch.Tensor
    length: int


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_rank_without_samples_gets_tensors_of_length_0(num_workers: int) -> None:
    def collate(samples: list[torch.Tensor]) -> Any:
        inputs = torch.stack(samples)
        names = [f"sample {int(row[0])}" for row in inputs]
        return {
            "list": [inputs, names, inputs.numpy()],
            "tuple": (Pair(inputs, names), (names, {"deep": inputs})),
            "record": Record(inputs, 7),
            "scalar": torch.tensor(3.0),
        }

    _, last = ranks(2, Augmented(1), collate_fn=collate, num_workers=num_workers)
    (batch,) = last

    tensors, names, array = batch["list"]
    pair, (more_names, deep) = batch["tuple"]
    assert 0 == last.local_samples
    assert {(0, 4)} == {part.shape for part in (tensors, array, pair.inputs, deep["deep"], batch["record"].inputs)}
    assert [[]] * 3 == [names, pair.names, more_names]
    assert (7, 3.0, Pair) == (batch["record"].length, batch["scalar"].item(), type(pair))


def test_the_last_batch_of_each_rank_says_how_many_samples_are_its_own() -> None:
    said = []
    for batches in ranks(3, Augmented(14)):
        said.append([(len(batch), batches.local_samples, batches.samples) for batch in batches])

    assert [(2, 2, 6), (2, 2, 12), (1, 1, 14)] == said[0] == said[1]
    assert [(2, 2, 6), (2, 2, 12), (0, 0, 14)] == said[2]


def test_padding_repeats_the_first_samples_until_all_ranks_have_as_many() -> None:
    loaders = ranks(3, Augmented(), pad=True)

    assert [[12], [0], [1]] == [indices(batches)[4:] for batches in loaders]
    assert [(1, 15)] * 3 == [(batches.local_samples, batches.samples) for batches in loaders]


# ---- epochs and positions


def test_each_iteration_is_the_next_epoch() -> None:
    batches = loader(Augmented(), 2, shuffle=True, world=ALONE)

    seen = [(indices(batches), batches.epoch) for _ in range(3)]

    assert [0, 1, 2] == [epoch for _, epoch in seen]
    assert 3 == len({tuple(order) for order, _ in seen})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_can_be_chosen(num_workers: int) -> None:
    batches = loader(Augmented(), 2, shuffle=True, num_workers=num_workers, world=ALONE)
    expected = [[rows(batch) for batch in batches] for _ in range(3)]

    for epoch in (2, 0, 1):
        batches.set_epoch(epoch)

        assert epoch == batches.epoch
        assert expected[epoch] == [rows(batch) for batch in batches]


def test_an_iteration_that_was_left_early_is_followed_by_the_next_epoch() -> None:
    batches = loader(Augmented(), 2, shuffle=True, world=ALONE)
    next(iter(batches))

    assert 13 == len(indices(batches))
    assert 1 == batches.epoch


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [Augmented(), Stream()], ids=["indexed", "stream"])
def test_the_position_is_that_of_the_batch_handed_out_last(dataset: Any, num_workers: int) -> None:
    batches = loader(dataset, 2, seed=5, num_workers=num_workers, world=World(rank=1, world_size=2))

    at_first = batches.state_dict()
    *during, _ = [batches.state_dict() for _ in batches]
    at_last = batches.state_dict()

    assert [{"seed": 5, "epoch": 0, "samples": samples} for samples in (0, 4, 8, 12)] == [at_first, *during]
    assert {"seed": 5, "epoch": 1, "samples": 0} == at_last


def test_an_epoch_is_over_with_its_last_batch() -> None:
    batches = loader(Augmented(), 2, world=ALONE)

    *_, position = [(batches.samples, batches.state_dict()) for _ in batches]

    assert (13, {"seed": 0, "epoch": 1, "samples": 0}) == position


@pytest.mark.parametrize("other", [1, 2, 3])
@pytest.mark.parametrize("dataset", [Augmented(23), Stream(23)], ids=["indexed", "stream"])
def test_a_loaded_position_goes_on_with_any_number_of_ranks(dataset: Any, other: int) -> None:
    options = {"shuffle": True} if isinstance(dataset, Augmented) else {}
    (alone,) = ranks(1, dataset, 23, **options)
    whole = [rows(batch) for _ in range(3) for batch in alone]
    first, second = ranks(2, dataset, **options)
    joined([first, second])
    begun = list(
        chain.from_iterable(rows(batch) for _, *both in zip(range(3), first, second, strict=False) for batch in both)
    )

    resumed = ranks(other, dataset, **options, seed=77, num_workers=1)
    for batches in resumed:
        batches.load_state_dict(first.state_dict())
    rest = list(chain.from_iterable(joined(resumed)))

    assert 12 == len(begun)
    assert sorted(whole[1]) == sorted(begun + rest)
    assert sorted(whole[2]) == sorted(chain.from_iterable(joined(resumed)))


def test_choosing_the_epoch_of_a_loaded_position_keeps_it() -> None:
    batches = loader(Augmented(), 2, world=ALONE)

    batches.load_state_dict({"epoch": 3, "samples": 10, "seed": 0})
    batches.set_epoch(3)

    assert (3, 10) == (batches.epoch, batches.samples)
    assert [10, 11, 12] == indices(batches)


def test_a_position_at_the_end_of_an_epoch_is_the_beginning_of_the_next() -> None:
    batches = loader(Augmented(), 2, drop_last=True, world=World(world_size=5))

    batches.load_state_dict({"epoch": 3, "samples": 8, "seed": 0})

    assert {"epoch": 4, "samples": 0, "seed": 0} == batches.state_dict()


def test_an_iteration_knows_how_many_batches_are_left() -> None:
    batches = loader(Augmented(), 2, world=ALONE)
    batches.load_state_dict({"epoch": 0, "samples": 8, "seed": 0})
    iteration = iter(batches)

    assert [3, 2, 1, 0] == [len(iteration), *(len(iteration) for _ in iteration)]
    assert 7 == len(batches)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_only_the_newest_iteration_goes_on(num_workers: int) -> None:
    batches = loader(Augmented(), 2, num_workers=num_workers, world=ALONE)
    older, newer = iter(batches), iter(batches)

    with pytest.raises(RuntimeError, match="two at the same time need two loaders"):
        next(older)
    assert 13 == len(indices(newer))


# ---- streams


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_stream_with_a_length_knows_how_many_batches_it_gives(world_size: int, drop_last: bool) -> None:
    for length in (1, 6, 13):
        (first, *_) = ranks(world_size, MeasuredStream(length), drop_last=drop_last)

        assert len(list(first)) == len(first)


def test_a_stream_without_a_length_has_none_here() -> None:
    with pytest.raises(TypeError, match="'Stream' has no len"):
        len(loader(Stream(), 2, world=ALONE))


def test_a_stream_drops_the_last_global_batch_on_all_ranks() -> None:
    batches = joined(ranks(2, Stream(15), drop_last=True, num_workers=2))

    assert [4, 4, 4] == list(map(len, batches))


# ---- nothing is left


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("how_many", [1, 7], ids=["left early", "ended"])
def test_workers_end_with_their_iteration_or_their_loader(how_many: int, persistent_workers: bool) -> None:
    before = set(psutil.Process().children(recursive=True))
    batches = loader(Augmented(), 2, num_workers=2, persistent_workers=persistent_workers, world=ALONE)
    iteration = iter(batches)
    for _ in range(how_many):
        next(iteration)
    workers = [process for process in psutil.Process().children(recursive=True) if process not in before]

    assert 2 == len(workers)
    del iteration
    if persistent_workers:
        assert not have_ended(workers)
        del batches
    wait_until(lambda: have_ended(workers), what="the end of the workers")


class Threads(Augmented):
    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return torch.get_num_threads()


def test_a_worker_has_one_thread() -> None:
    assert [1, 1, 1] == torch.cat(list(loader(Threads(3), 2, num_workers=1, world=ALONE))).tolist()


# ---- errors


class Broken(Augmented):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 3:
            raise OSError("cannot be read")
        return super().__getitem__(index)


def failure(num_workers: int) -> str:
    """The text of the OSError and its notes; a worker's notes are in its text."""
    try:
        list(loader(Broken(), 2, num_workers=num_workers, world=ALONE))
    except OSError as error:
        # Torch's iterator hangs on the traceback. Freed by the garbage collector, it would wait 5 s for its worker.
        error.__traceback__ = None
        return " ".join([str(error), *getattr(error, "__notes__", [])])
    return "no error"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_names_the_sample(num_workers: int) -> None:
    text = failure(num_workers)

    assert "cannot be read" in text
    assert "while sample 3 of the dataset was loaded" in text


@pytest.mark.parametrize(
    ("dataset", "options", "kind", "text"),
    [
        ([], {}, ValueError, "the dataset is empty: list of length 0"),
        ((x for x in "ab"), {}, TypeError, "generator is no dataset, it has no __len__; .*IterableDataset"),
        ({1, 2}, {}, TypeError, "set is no dataset, it has no __getitem__"),
        ([1], {"batch_size": 0}, ValueError, "batch_size=0 is below 1"),
        ([1], {"batch_size": True}, TypeError, "batch_size=True is not an int"),
        ([1], {"batch_size": None}, TypeError, "batch_size=None is not an int"),
        ([1], {"num_workers": -1}, ValueError, "num_workers=-1 is below 0"),
        ([1], {"seed": 0.5}, TypeError, "seed=0.5 is not an int"),
        ([1], {"seed": 1 << 63}, ValueError, "does not fit into 64 bits"),
        ([1], {"drop_last": True, "pad": True}, ValueError, "choose one of them"),
        ([1] * 7, {"batch_size": 4, "drop_last": True}, ValueError, "7 samples are fewer than the 8 of .*world_size=2"),
        ([1], {"sampler": [0]}, TypeError, "no sampler=: .*plain torch.utils.data.DataLoader"),
        ([1], {"batch_sampler": [[0]]}, TypeError, "no batch_sampler=: .*plain torch.utils.data.DataLoader"),
        ([1], {"generator": None}, TypeError, "no generator=: .*follow from seed="),
        ([1], {"in_order": False}, TypeError, "no in_order=: batches come in order"),
        ([1], {"colate_fn": list}, TypeError, "no parameter 'colate_fn'"),
        (Stream(), {"shuffle": True}, ValueError, "shuffle=True needs a dataset with indices, and Stream is an Iter"),
        (Stream(), {"pad": True}, ValueError, "pad=True needs a dataset with indices"),
    ],
)
def test_what_cannot_be_is_refused(dataset: Any, options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        loader(dataset, world=World(world_size=2), **options)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"epoch": 1}, "samples, seed missing"),
        ({"epoch": -1, "samples": 0, "seed": 0}, "epoch=-1 is below 0"),
        ({"epoch": 0, "samples": 14, "seed": 0}, "samples=14 lies behind the end of a dataset of 13"),
    ],
)
def test_what_is_no_position_is_refused(state: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        loader(Augmented(), world=ALONE).load_state_dict(state)


def test_a_loader_does_not_leave_its_rank() -> None:
    with pytest.raises(TypeError, match="make it inside the function"):
        pickle.dumps(loader(Augmented(), world=ALONE))
