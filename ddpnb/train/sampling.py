"""Which sample comes when, and with which random numbers: functions of seed, epoch and place, for any number of ranks.

An epoch is one order over the whole dataset, the same on all ranks. It is cut into *global batches* of
`world_size * batch_size` places, and each is dealt out as cards are: rank r gets its places r, r + world_size, … So the
ranks' k-th batches together are the k-th batch of one process that takes as many at once; and of the last, partial
global batch no rank gets two samples more than another. A position is a number of places, of all ranks together: what
is left of an epoch can be dealt out to another number of ranks.

Or a global batch is cut into *shards* of neighbouring places, each of which is loaded, and computed, by itself on one
rank or another: what is in a shard does not depend on how many ranks there are.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch.utils.data import Sampler


@dataclass(frozen=True, slots=True)
class Place:
    """A position in an endless row of epochs; it means the same for any number of ranks."""

    seed: int
    epoch: int = 0
    samples: int = 0
    """Places of this epoch's order that have been handed out, to all ranks together."""


@dataclass(frozen=True, slots=True)
class Request:
    """What one rank is to load of one global batch.

    DataLoader workers are sent it as it is: a persistent worker learns the epoch from nothing else.
    """

    seed: int
    epoch: int
    indices: list[int]
    """Of the dataset; never empty."""
    size: int
    """How many of them count; 0: none was left for this rank, and one is loaded for the shape of its tensors."""
    stop: int
    """Position after the global batch."""
    shard: int | None = None
    """Which shard of the global batch it is; None: all that is this rank's."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How global batches are cut into shards, and these dealt out to ranks: contiguously and evenly."""

    num_shards: int
    """Of a global batch."""
    num_joined: int = 1
    """How many of the sampler's own global batches make one."""

    def places(self, num_samples: int) -> list[range]:
        """Each shard's places in a global batch of so many; a partial one leaves the last shards empty, if any."""
        return even_ranges(num_samples, self.num_shards)

    def shards(self, num_samples: int, world_size: int) -> list[range]:
        """Each rank's shards of a global batch of so many places, without empty ones; a rank may have none."""
        return even_ranges(min(num_samples, self.num_shards), world_size)


def even_ranges(length: int, num_parts: int) -> list[range]:
    """0 … length - 1 in contiguous parts, of which the first may be longer by one: 8 in 3 is 0-2, 3-5, 6-7."""
    size, num_longer = divmod(length, num_parts)
    bounds = [part * size + min(part, num_longer) for part in range(num_parts + 1)]
    return [range(*each) for each in pairwise(bounds)]


class GlobalBatchSampler(Sampler[Request]):
    """This rank's part of each global batch of an epoch, from `place` on: a batch sampler for `DataLoader`.

    Iterating changes nothing here: torch begins an iteration twice where it has workers.

        sampler = DistributedSampler(dataset, shuffle=True, seed=seed)       # what it stands for, but for the last
        batches = BatchSampler(sampler, batch_size, drop_last=False)         # global batch, and with pad=True for all

    Args:
        length: number of samples in the dataset.
        batch_size: samples of each rank in a full global batch.
        rank, world_size: whose part it is.
        place: where to begin.
        shuffle: a new order for each epoch; False: the dataset's own.
        drop_last: leave out the last global batch where it is not full.
        pad: fill up the last global batch with samples from the beginning of the order, to a multiple of world_size.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        place: Place,
        shuffle: bool = False,
        drop_last: bool = False,
        pad: bool = False,
    ) -> None:
        self.length = length
        self.rank = rank
        self.world_size = world_size
        self.global_batch_size = world_size * batch_size
        self.place = place
        self.cut: Cut | None = None
        """How the next iteration cuts global batches into shards; None: it deals them out whole."""
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.pad = pad

    def __iter__(self) -> Iterator[Request]:
        seed, epoch, begin = self.place.seed, self.place.epoch, self.place.samples
        order = epoch_order(self.length, seed, epoch) if self.shuffle else np.arange(self.length)
        cut, end = self.cut, self.end(begin)
        size = self.global_batch_size * (cut.num_joined if cut is not None else 1)
        for start in range(begin, end, size):
            stop = min(start + size, end)
            # Behind the order's end, where pad=True leads, it begins anew.
            dealt = order[np.arange(start, stop) % self.length].tolist()
            for shard, own in self._own(dealt, cut):
                yield Request(seed, epoch, own or dealt[:1], len(own), stop, shard)

    def _own(self, dealt: list[int], cut: Cut | None) -> list[tuple[int | None, list[int]]]:
        """What this rank loads of a global batch, as (shard, samples) each."""
        if cut is None:
            return [(None, dealt[self.rank :: self.world_size])]
        places = cut.places(len(dealt))
        shards = cut.shards(len(dealt), self.world_size)[self.rank]
        return [(shard, [dealt[place] for place in places[shard]]) for shard in shards] or [(None, [])]

    def __len__(self) -> int:
        """Batches in a whole epoch, the same on all ranks."""
        return self.batches_after(0)

    def batches_after(self, samples: int) -> int:
        """Batches of each rank in what is left of an epoch after so many samples."""
        return len(range(samples, self.end(samples), self.global_batch_size))

    def is_over(self, samples: int) -> bool:
        """Whether an epoch has no batch left after so many samples."""
        return self.end(samples) == samples

    def end(self, samples: int) -> int:
        """Position at which an epoch ends that is now at `samples`; there it is over."""
        left = max(0, self.length - samples)
        if self.drop_last:
            left -= left % self.global_batch_size
        if self.pad:
            left += -left % self.world_size
        return samples + left


def epoch_order(length: int, seed: int, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Shuffle 0 … length - 1; shape (length,), the same on every machine. A million takes 20 ms.

    Seed and epoch are hashed. `DistributedSampler` adds them: there, epoch 1 of seed 0 is epoch 0 of seed 1.

    Source: NEP 19 freezes the stream of NumPy's RandomState for ever; neither torch nor NumPy's newer generators
    promise that another version shuffles alike.
    """
    words = np.frombuffer(_digest(seed, epoch), np.uint32)
    return np.random.RandomState(words).permutation(length)


# ---- random numbers of a sample


def seed_generators(*numbers: int) -> None:
    """Seed Python's, NumPy's and torch's global CPU generators from a hash of these numbers; 15 µs.

    Only torch's CPU generator: `torch.manual_seed` would seed the GPU's as well, on which dropout draws.
    """
    digest = _digest(*numbers)
    random.seed(int.from_bytes(digest[:8], "little"))
    np.random.seed(int.from_bytes(digest[8:12], "little"))
    torch.default_generator.manual_seed(int.from_bytes(digest[12:16], "little"))


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put Python's, NumPy's and torch's global CPU generators back to where they were, whatever is drawn inside."""
    python, numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(of_torch)


def hashed(*numbers: int) -> int:
    """A number of 63 bits, as a seed."""
    return int.from_bytes(_digest(*numbers)[:8], "little") >> 1


def _digest(*numbers: int) -> bytes:
    return hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=32).digest()
