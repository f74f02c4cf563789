"""One pass over a loader, in windows of micro-batches, of which every rank has equally many.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import monotonic
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ..context import stopwatch
from .batches import cut, num_samples
from .loading import Loader
from .reduction import gather

_NOTHING = object()


class Epoch:
    """Hands out the micro-batches of one epoch; a rank that has no more gets batches without samples.

    Args:
        loader: of this rank.
        accumulate: micro-batches in a window.
        num_batches: of the rank that has most, in a whole epoch; None: not known, then ranks ask each other after each
            window.
        is_joint: other ranks wait for this one's gradients.
        num_taken: micro-batches that were handed out before the run was interrupted in this epoch. Our own loader
            begins behind them; any other has to go through them.
    """

    def __init__(
        self, loader: Iterable[Any], accumulate: int, num_batches: int | None, is_joint: bool, num_taken: int = 0
    ) -> None:
        self._loader = loader
        self._batches: Iterator[Any] = iter(loader)
        self._accumulate = accumulate
        self._num_batches = num_batches
        self._is_joint = is_joint
        self._begin = self.num_taken = num_taken
        """Micro-batches handed out in this epoch."""
        if isinstance(loader, Loader):
            if num_batches is not None:
                self._num_batches = num_taken + loader.batches_left()
        else:
            for _ in range(num_taken):
                next(self._batches, _NOTHING)
        self._template: Any = _NOTHING
        self.num_samples: int | None = None
        """Of the micro-batch taken last; None where it holds no tensor to count by."""
        self._ahead: tuple[Any, int | None] = (_NOTHING, None)
        self._place = place_of(loader)
        if num_batches is None:
            self._ahead = self._fetch()
            is_empty = self._ahead[0] is _NOTHING
            refuse_empty(gather(is_empty) if is_joint else [is_empty])

    @property
    def is_first(self) -> bool:
        """Whether the micro-batch taken last is the first of this pass."""
        return self.num_taken == self._begin + 1

    @property
    def place(self) -> dict[str, int] | None:
        """The loader's position behind the micro-batch taken last; None for a loader that has none."""
        return self._place if self._num_batches is None else place_of(self._loader)

    @property
    def num_left(self) -> int | None:
        """Micro-batches that are left; None where that is not known."""
        return None if self._num_batches is None else self._num_batches - self.num_taken

    @property
    def has_more(self) -> bool:
        """Whether another window comes, as far as this rank knows."""
        if self._num_batches is not None:
            return self.num_taken < self._num_batches
        return self._ahead[0] is not _NOTHING

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch taken last is its window's last."""
        if self.num_taken % self._accumulate == 0:
            return True
        # Where ranks do not know each other's number, a window is always full: one may still have a batch.
        return not self.has_more and not (self._is_joint and self._num_batches is None)

    def take(self) -> Any:
        """The next micro-batch."""
        if self._num_batches is None:
            self._place = place_of(self._loader)
            (batch, self.num_samples), self._ahead = self._ahead, self._fetch()
        else:
            batch, self.num_samples = self._fetch()
        self.num_taken += 1
        if batch is _NOTHING:
            if self._template is _NOTHING:
                refuse_empty([True])  # its length had promised some
            self.num_samples = 0
            return cut(self._template)
        self._template = batch
        return batch

    def _fetch(self) -> tuple[Any, int | None]:
        """The loader's next batch and its samples, which our own loader knows whatever the batch is made of."""
        if isinstance(self._loader, Loader):
            return next(self._batches, _NOTHING), self._loader.local_samples
        began = monotonic()
        batch = next(self._batches, _NOTHING)
        size = num_samples(batch)
        stopwatch().fetched(began, size)
        return batch, size


def place_of(loader: object) -> dict[str, int] | None:
    """The loader's own position; None for one that has none."""
    return loader.state_dict() if isinstance(loader, Loader) else None


def num_batches_of_all(loader: Any, is_joint: bool) -> int | None:
    """Batches in an epoch of the rank that has most; None where only the end will tell.

    Args:
        loader: of this rank.
        is_joint: ask the other ranks.

    Raises:
        ValueError: a rank has none, on all ranks.
    """
    own = _num_batches(loader)
    counts = gather(own) if is_joint else [own]
    if any(count is None for count in counts):
        return None
    refuse_empty([count == 0 for count in counts])
    return max(map(int, counts))


def refuse_empty(are_empty: list[bool]) -> None:
    """Raise ValueError where a rank has not a single batch, [by rank]."""
    empty = [str(rank) for rank, is_empty in enumerate(are_empty) if is_empty]
    if empty:
        whose = "the loader" if len(are_empty) == 1 else f"the loader of rank {', '.join(empty)}"
        raise ValueError(f"{whose} has not a single batch: is the data set empty, or the batch larger than it?")


def _num_batches(loader: Any) -> int | None:
    if isinstance(getattr(loader, "dataset", None), IterableDataset) or not hasattr(loader, "__len__"):
        return None
    try:
        length: int = len(loader)
    except TypeError:  # a DataLoader has the method, whatever it loads
        return None
    return length


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell whatever shuffles which epoch it is: the loader itself, or its sampler."""
    each: Any
    for each in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)
            return


def batch_size(loader: Any) -> int | None:
    """Samples of a full batch of this rank, where the loader says it."""
    size = loader.batch_size if isinstance(loader, DataLoader) else None
    return size if isinstance(size, int) else None
