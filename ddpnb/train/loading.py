"""`loader()`: a DataLoader whose ranks together see what one process would see, each sample once per epoch.

Torch's DataLoader does the loading. It is given a sampler that deals out one global order, and a dataset that seeds the
random numbers of each sample and returns whole batches with word of where in the order they lie. What is handed over
moves the loader's position; what DataLoader workers have fetched ahead does not.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from itertools import count, islice
from time import monotonic
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from ..context import device, stopwatch
from ..world import World
from .membership import join
from .sampling import Cut, GlobalBatchSampler, Place, Request, generators_kept, hashed, seed_generators

Collate = Callable[[list[Any]], Any]
Parcel = tuple[int, int, Any]
"""What comes from the loading: how many of the samples are this rank's, the position after them, the batch."""

_REFUSED = {
    "sampler": "the order is the loader's own, dealt out to the ranks; for another one, use a plain "
    "torch.utils.data.DataLoader with a DistributedSampler",
    "batch_sampler": "the batches are the loader's own, dealt out to the ranks; for other ones, use a plain "
    "torch.utils.data.DataLoader",
    "generator": "the order and all random numbers follow from seed=",
    "in_order": "batches come in order: the loader's position depends on it",
}


def loader(
    dataset: Any,
    batch_size: int = 1,
    shuffle: bool = False,
    *,
    seed: int = 0,
    drop_last: bool = False,
    pad: bool = False,
    num_workers: int = 0,
    collate_fn: Collate | None = None,
    seed_samples: bool | Literal["auto"] = "auto",
    pin_memory: bool | Literal["auto"] = "auto",
    persistent_workers: bool | Literal["auto"] = "auto",
    prefetch_factor: int | None = None,
    timeout: float = 0,
    worker_init_fn: Callable[[int], None] | None = None,
    multiprocessing_context: Any = None,
    world: World | None = None,
    **others: Any,
) -> Loader:
    """Load a dataset on all ranks together: each sample once per epoch, on exactly one of them.

        loader = ddpnb.loader(train_set, batch_size=64, shuffle=True, seed=0)
        for inputs, targets in loader:                      # (64, …), (64,) on each rank

    The lines of torch it stands for:

        sampler = DistributedSampler(train_set, shuffle=True, seed=0)
        loader = DataLoader(train_set, batch_size=64, sampler=sampler, pin_memory=True, persistent_workers=…)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)                        # here each iteration goes on to the next epoch by itself

    **What a batch is.** `batch_size` is each rank's own: an optimizer step sees world_size × batch_size samples, an
    epoch has world_size times fewer steps, and a learning rate tuned for one process is usually multiplied by
    world_size, with a few epochs of warm-up. The k-th batches of all ranks together are the k-th batch of one process
    with batch_size = world_size × batch_size. (Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD", §2.)

    **The last global batch** is dealt out evenly, so that all ranks have equally many batches. A rank for which none is
    left gets one collated sample cut to length 0 in every tensor, and `local_samples` says 0. Lists whose items are no
    tensors are emptied; an object of another kind stays as it is.

    **Random numbers** belong to the sample. Before each `dataset[index]` Python's `random`, NumPy's and torch's global
    CPU generators are seeded from a hash of (seed, epoch, index), and before `collate_fn` from one of the batch's
    position and the rank; after the batch they are put back. So an augmentation gives the same tensors for any number
    of DataLoader workers and of ranks. A generator that the dataset holds itself is not seen; a dataset's own
    `__getitems__` is not called, since what it draws would depend on the batch. It costs about 15 µs per sample and
    0.15 ms per batch; nothing for a TensorDataset (also in Subset and ConcatDataset), which draws none, and with
    `seed_samples=False`, which leaves the generators alone and calls `__getitems__` where there is one. A
    `Loop(exact=True)` has them seeded for each shard in any case.

    **An IterableDataset** is read by every rank and every DataLoader worker from beginning to end; each keeps the items
    at its places, and all that was said above holds. It must not shard itself, and what it shuffles, it shuffles alike
    everywhere by the seeding. Reading should be cheap: the place to decode is `collate_fn`, which sees only the items
    of this rank.

    **Position.** `state_dict()` holds the epoch and how many of its samples all ranks have been handed. Loaded on
    another number of ranks, the rest of the epoch is dealt out to them.

    Args:
        dataset: has `__getitem__` and `__len__`, or is a `torch.utils.data.IterableDataset`.
        batch_size: samples per batch of each rank.
        shuffle: a new order for each epoch; False: the dataset's own.
        seed: of the order and of the samples' random numbers; the same on all ranks.
        drop_last: leave out the last global batch where it is not full.
        pad: repeat samples from the beginning of the order until the ranks have equally many, as DistributedSampler
            does. (An evaluation then counts them twice.)
        num_workers: DataLoader workers of each rank, of one thread each; 0 loads in the rank itself.
        collate_fn: list of samples -> batch. None: `default_collate`.
        seed_samples: "auto" seeds unless the dataset is made of a TensorDataset.
        pin_memory: "auto" pins where this rank computes on a GPU.
        persistent_workers: "auto" keeps workers from epoch to epoch, until the loader is gone.
        prefetch_factor, timeout, worker_init_fn, multiprocessing_context: as `DataLoader` has them. In a ddpnb worker
            DataLoader workers are forked, so that a dataset may be a class of a cell.
        world: the rank and world size that it loads for; None: those of this process's group.

    Raises:
        TypeError: `dataset` is neither kind, or an argument is of another type than it should be.
        ValueError: an empty dataset, a number out of range, `drop_last` that would leave nothing, or options that
            exclude each other.
    """
    _refuse(others)
    _check_integer("batch_size", batch_size, 1, "the number of samples in each rank's batch")
    _check_integer("num_workers", num_workers, 0, "the number of DataLoader workers of each rank")
    _check_seed(seed)
    if drop_last and pad:
        raise ValueError("drop_last=True leaves the last samples out, pad=True repeats some: choose one of them")
    place, world = Place(seed), world or join()
    collate = collate_fn or default_collate
    seeded = not _draws_nothing(dataset) if seed_samples == "auto" else seed_samples
    source: _Samples | _Stream
    feed: GlobalBatchSampler | _Stream
    if isinstance(dataset, IterableDataset):
        _check_stream(dataset, shuffle, pad)
        source = feed = _Stream(dataset, batch_size, world, place, collate, seeded, drop_last)
    else:
        feed = GlobalBatchSampler(
            _length(dataset),
            batch_size,
            rank=world.rank,
            world_size=world.world_size,
            place=place,
            shuffle=shuffle,
            drop_last=drop_last,
            pad=pad,
        )
        _check_something_is_left(feed)
        source = _Samples(dataset, world.rank, collate, seeded)
    return Loader(
        source,
        feed,
        batch_size,
        drop_last,
        num_workers=num_workers,
        pin_memory=device().type == "cuda" if pin_memory == "auto" else pin_memory,
        persistent_workers=num_workers > 0 if persistent_workers == "auto" else persistent_workers,
        prefetch_factor=prefetch_factor,
        timeout=timeout,
        worker_init_fn=worker_init_fn,
        multiprocessing_context=multiprocessing_context,
        # Of its own, so that an iteration's beginning does not move torch's global generator.
        generator=torch.Generator().manual_seed(hashed(seed, world.rank)),
    )


class Loader(DataLoader[Any]):
    """What `ddpnb.loader()` returns: torch's DataLoader, with a position that is common to all ranks.

    Each iteration is one epoch, and the next one is the next epoch, also after an iteration that was left early; on
    every rank equally often, then. (For a look at one sample, `loader.dataset[0]` is the way.) Only the newest
    iteration goes on.
    """

    local_samples: int = 0
    """How many samples of the batch handed out last are this rank's; 0: it was cut to length 0."""

    def __init__(
        self,
        dataset: _Samples | _Stream,
        feed: GlobalBatchSampler | _Stream,
        batch_size: int,
        drop_last: bool,
        **options: Any,
    ) -> None:
        sampler = {"batch_sampler": feed} if isinstance(feed, GlobalBatchSampler) else {"batch_size": None}
        super().__init__(dataset, collate_fn=_as_it_is, **sampler, **options)
        # Torch knows neither, since batches come ready, and forbids to set them; whoever asks shall read them.
        object.__setattr__(self, "batch_size", batch_size)
        object.__setattr__(self, "drop_last", drop_last)
        self._feed = feed
        self._place = self._next = feed.place  # where it is, and where the next iteration begins
        self._is_over = False
        self._num_iterations = 0

    @property
    def epoch(self) -> int:
        """Number of the epoch under way, or of the last one; before the first, of that."""
        return self._place.epoch

    @property
    def samples(self) -> int:
        """Samples of this epoch that all ranks together have been handed, with the last batch; repeated ones count."""
        return self._place.samples

    @property
    def seed(self) -> int:
        """Of the order and of the samples' random numbers."""
        return self._place.seed

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch; all ranks have equally many."""
        return self._feed.batches_after(0)

    def __iter__(self) -> _Iteration:  # type: ignore[override]
        """Hand out the batches of the next epoch, or of what is left of a loaded one."""
        return self._begin(None)

    def in_shards(self, cut: Cut) -> _Iteration:
        """The next epoch, or what is left of it, shard by shard; of a dataset with indices only.

        Of each global batch this rank is handed those of its shards that have samples, in order, or one batch without
        samples where it has none. The position moves by the whole global batch with the first of them.
        """
        return self._begin(cut)

    def _begin(self, cut: Cut | None) -> _Iteration:
        if isinstance(self._feed, GlobalBatchSampler):
            self._feed.cut = cut
        self._place, self._is_over = self._next, False
        self._next = _epoch_after(self._place)
        self._num_iterations += 1
        self._feed.place = self._place
        return _Iteration(self, super().__iter__())

    def batches_left(self) -> int:
        """Batches of this rank that are left of the epoch under way; all ranks have equally many."""
        return self._feed.batches_after(self._place.samples)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch: from its beginning, or from where a loaded state left it."""
        _check_integer("epoch", epoch, 0, "the number of an epoch")
        if epoch != self._next.epoch:
            self._next = Place(self._next.seed, epoch)
        self._place, self._is_over = self._next, False

    def state_dict(self) -> dict[str, int]:
        """The position: `epoch`, `samples` of all ranks in it, and `seed`. After its last batch an epoch is over."""
        return dataclasses.asdict(self._next if self._is_over else self._place)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Begin the next iteration where `state_dict()` was taken, on any number of ranks.

        With `drop_last` the epoch may be over for this number of ranks: then the next one is begun.

        Raises:
            ValueError: the state is not of this kind, or lies behind the dataset's end.
        """
        if missing := {"epoch", "samples", "seed"} - state.keys():
            raise ValueError(f"this is no position of a loader: {', '.join(sorted(missing))} missing in {dict(state)}")
        for name in ("epoch", "samples"):
            _check_integer(name, state[name], 0, "part of a loader's position")
        _check_seed(state["seed"])
        place = Place(state["seed"], state["epoch"], state["samples"])
        if isinstance(self._feed, GlobalBatchSampler) and place.samples > self._feed.length:
            raise ValueError(
                f"samples={place.samples} lies behind the end of a dataset of {self._feed.length}: this position was "
                "taken with another dataset"
            )
        if self._feed.is_over(place.samples):
            place = _epoch_after(place)
        self._place = self._next = place
        self._is_over = False
        self._num_iterations += 1  # one that is under way has lost its place

    def __reduce__(self) -> NoReturn:
        raise TypeError("a loader belongs to its rank and cannot be sent elsewhere; make it inside the function")


class _Iteration(Iterator[Any]):
    """One way through an epoch."""

    def __init__(self, loader: Loader, parcels: Iterator[Parcel]) -> None:
        self._loader = loader
        self._parcels = parcels
        self._place = loader._place
        self._number = loader._num_iterations

    def __next__(self) -> Any:
        loader = self._loader
        if self._number != loader._num_iterations:
            raise RuntimeError(
                "this iteration over a loader was left when another was begun, or a state loaded; two at the same "
                "time need two loaders"
            )
        began = monotonic()
        try:
            size, stop, batch = next(self._parcels)
        except StopIteration:
            loader._is_over = True
            raise
        stopwatch().fetched(began, size)
        loader.local_samples = size
        loader._place = self._place = dataclasses.replace(self._place, samples=stop)
        loader._is_over = loader._feed.is_over(stop)
        return batch

    def __len__(self) -> int:
        """Batches that are left."""
        return self._loader._feed.batches_after(self._place.samples)


# ---- the datasets that torch's DataLoader sees


class _Samples(Dataset[Any]):
    """The user's dataset, which gives batches as well. What else it has is found here, too."""

    def __init__(self, dataset: Any, rank: int, collate: Collate, seeded: bool) -> None:
        self.dataset = dataset
        self.rank = rank
        self.collate = collate
        self.seeded = seeded

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)  # asked for while this is being unpickled, or by torch
        return getattr(self.dataset, name)

    def __getitems__(self, request: Request) -> Parcel:
        if not self.seeded and request.shard is None:
            return _parcel(self._plain_samples(request.indices), request.size, request.stop, self.collate)
        # A shard's numbers are the same whoever loads it; those of a rank's part are its own.
        part = self.rank if request.shard is None else request.shard
        with generators_kept():
            samples = self._seeded_samples(request) if self.seeded else None
            seed_generators(request.seed, request.epoch, request.stop, part)
            if samples is None:
                samples = self._plain_samples(request.indices)
            return _parcel(samples, request.size, request.stop, self.collate)

    def _seeded_samples(self, request: Request) -> list[Any]:
        samples = []
        for index in request.indices:
            seed_generators(request.seed, request.epoch, index)
            try:
                samples.append(self.dataset[index])
            except Exception as error:
                error.add_note(f"while sample {index} of the dataset was loaded")
                raise
        return samples

    def _plain_samples(self, indices: list[int]) -> list[Any]:
        fetch = getattr(self.dataset, "__getitems__", None)
        samples: list[Any] = fetch(indices) if fetch is not None else [self.dataset[index] for index in indices]
        return samples


class _Stream(IterableDataset[Parcel]):
    """The user's IterableDataset, which gives this rank's part of each global batch, each from one DataLoader worker.

    Every process reads the whole stream, and so knows where it ends: all ranks stop after the same number of batches.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int,
        world: World,
        place: Place,
        collate: Collate,
        seeded: bool,
        drop_last: bool,
    ) -> None:
        self.dataset = dataset
        self.global_batch_size = world.world_size * batch_size
        self.world = world
        self.collate = collate
        self.seeded = seeded
        self.drop_last = drop_last
        # Shared, so that persistent workers begin where the loader is to begin.
        self._shared_place = torch.zeros(3, dtype=torch.int64).share_memory_()
        self.place = place

    @property
    def place(self) -> Place:
        """Where the next iteration begins."""
        return Place(*self._shared_place.tolist())

    @place.setter
    def place(self, place: Place) -> None:
        self._shared_place[:] = torch.tensor(dataclasses.astuple(place))

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __iter__(self) -> Iterator[Parcel]:
        place, stop = self.place, self.place.samples
        worker = get_worker_info()
        turn, num_workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        items = self._items(place)
        with self._generators_kept():
            deque(islice(items, stop), maxlen=0)  # those that were handed out before
        for number in count():
            with self._generators_kept():
                dealt = list(islice(items, self.global_batch_size))
                if not dealt or (self.drop_last and len(dealt) < self.global_batch_size):
                    return
                stop += len(dealt)
                if number % num_workers != turn:
                    continue
                if self.seeded:
                    seed_generators(place.seed, place.epoch, stop, self.world.rank)
                own = dealt[self.world.rank :: self.world.world_size]
                parcel = _parcel(own or dealt[:1], len(own), stop, self.collate)
            yield parcel

    def batches_after(self, samples: int) -> int:
        """Batches of each rank that are left; a TypeError where the dataset has no length."""
        left = max(0, len(self) - samples)
        return left // self.global_batch_size if self.drop_last else -(-left // self.global_batch_size)

    def is_over(self, samples: int) -> bool:
        """Nobody knows before the stream ends."""
        return False

    def _items(self, place: Place) -> Iterator[Any]:
        """All items, each with the random numbers that belong to it; run it with the generators kept."""
        if self.seeded:
            seed_generators(place.seed, place.epoch)
        items = iter(self.dataset)
        for number in count():
            if self.seeded:
                seed_generators(place.seed, place.epoch, number)
            try:
                yield next(items)
            except StopIteration:
                return

    def _generators_kept(self) -> AbstractContextManager[None]:
        return generators_kept() if self.seeded else nullcontext()


def _parcel(samples: list[Any], size: int, stop: int, collate: Collate) -> Parcel:
    batch = collate(samples)
    return size, stop, batch if size else _cut(batch)


def _cut(batch: Any) -> Any:
    """`batch` with every tensor in it cut to length 0; what is made of no tensors, lists or mappings stays whole."""
    match batch:
        case torch.Tensor() | np.ndarray():
            return batch[:0] if batch.ndim else batch
        case MutableMapping():  # which may hold more than its items
            clone = copy.copy(batch)
            clone.update({key: _cut(value) for key, value in batch.items()})
            return clone
        case Mapping():
            return type(batch)({key: _cut(value) for key, value in batch.items()})  # type: ignore[call-arg]
        case tuple() if hasattr(batch, "_fields"):
            return type(batch)(*map(_cut, batch))
        case list() | tuple():
            return type(batch)(map(_cut, batch) if any(map(_is_cut, batch)) else ())
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        parts = {field.name: _cut(getattr(batch, field.name)) for field in dataclasses.fields(batch) if field.init}
        return dataclasses.replace(batch, **parts)
    return batch


def _is_cut(part: Any) -> bool:
    return isinstance(part, (torch.Tensor, np.ndarray, Mapping, list, tuple)) or dataclasses.is_dataclass(part)


def _as_it_is(parcel: Any) -> Any:
    return parcel


def _draws_nothing(dataset: object) -> bool:
    """Whether it is surely made of tensors alone; a subclass may do anything."""
    if type(dataset) is Subset:
        return _draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_draws_nothing, dataset.datasets))
    return type(dataset) is TensorDataset


def _epoch_after(place: Place) -> Place:
    return Place(place.seed, place.epoch + 1)


# ---- what may be asked for


def _refuse(others: Mapping[str, object]) -> None:
    for name in others:
        if name in _REFUSED:
            raise TypeError(f"loader() takes no {name}=: {_REFUSED[name]}")
        raise TypeError(f"loader() has no parameter {name!r}")


def _check_integer(name: str, value: object, least: int, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is not an int: it is {meaning}")
    if value < least:
        raise ValueError(f"{name}={value} is below {least}: it is {meaning}")


def _check_seed(seed: int) -> None:
    _check_integer("seed", seed, -(1 << 63), "a number of 64 bits, the same on all ranks")
    if seed >= 1 << 63:
        raise ValueError(f"seed={seed} does not fit into 64 bits")


def _length(dataset: Any) -> int:
    """Of a dataset with indices."""
    for method in ("__len__", "__getitem__"):
        if not hasattr(type(dataset), method):
            raise TypeError(
                f"{type(dataset).__name__} is no dataset, it has no {method}; one that is read from beginning to end "
                "is a torch.utils.data.IterableDataset"
            )
    length = len(dataset)
    if not length:
        raise ValueError(f"the dataset is empty: {type(dataset).__name__} of length 0")
    return length


def _check_something_is_left(sampler: GlobalBatchSampler) -> None:
    if not len(sampler):
        raise ValueError(
            f"drop_last=True would leave nothing: {sampler.length} samples are fewer than the "
            f"{sampler.global_batch_size} of one global batch, world_size={sampler.world_size} times batch_size"
        )


def _check_stream(dataset: object, shuffle: bool, pad: bool) -> None:
    if shuffle or pad:
        raise ValueError(
            f"{'shuffle' if shuffle else 'pad'}=True needs a dataset with indices, and {type(dataset).__name__} is an "
            "IterableDataset. It may shuffle by itself: with the loader's seeding it does so alike on all ranks"
        )
