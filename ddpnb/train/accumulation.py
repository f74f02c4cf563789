"""Gradient accumulation for own loops.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .checks import check_loader
from .epoch import Epoch, batch_size, num_batches_of_all
from .membership import join
from .steps import Steps
from .turns import Turns, check_loss


def accumulate(model: nn.Module, loader: Iterable[Any], steps: int = 1) -> Iterator[Window]:
    """One epoch of `loader` in windows of `steps` micro-batches, for a loop of your own.

        for window in ddpnb.accumulate(model, loader, steps=4):
            for inputs, targets in window:
                window.backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()

    stands for

        optimizer.zero_grad()
        for number, (inputs, targets) in enumerate(window):
            with model.no_sync() if number < 3 else nullcontext():           # around forward and backward
                loss = F.cross_entropy(model(inputs), targets)
                (loss * len(inputs) * world_size / samples_of_the_window_on_all_ranks).backward()
        optimizer.step()

    After a window's last backward the gradients are those of the mean over all its samples on all ranks, whatever the
    sizes of its batches; the last window of the epoch has what is left. Each window begins with zero gradients.

    Args:
        model: made by `wrap`.
        loader: of this rank.
        steps: micro-batches of each rank in a window.

    Raises:
        ValueError: `steps` below 1, or a rank without a single batch.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"steps={steps!r}: a whole number, at least 1")
    join()
    model.zero_grad(set_to_none=True)
    own = Steps(model, steps, batch_size(loader) or 1)
    check_loader(loader, own.joins_ranks)
    return _windows(own, Epoch(loader, steps, num_batches_of_all(loader, own.joins_ranks), own.joins_ranks))


class Window:
    """Micro-batches of one optimizer step. Made by `accumulate`; gone through once."""

    def __init__(self, steps: Steps, epoch: Epoch) -> None:
        self._steps = steps
        self._epoch = epoch
        self._turns: weakref.ref[_Turns] | None = None
        self.has_more = True
        """Whether another window comes in this epoch; known once this one is complete."""
        self.norm: float | None = None
        """Norm of all gradients together, once they are complete."""

    def __iter__(self) -> Iterator[Any]:
        """The batches, on this rank's device."""
        if self._turns is not None:
            raise RuntimeError("a window is gone through once: its batches are not kept")
        turns = _Turns(self._epoch)
        self._turns = weakref.ref(turns)
        self._steps.follow(turns)
        return turns

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Add the gradients of the batch at hand; with the window's last they are reduced over the ranks and scaled.

        Args:
            loss: a scalar, the mean over what the batch is made of.
            weight: of how much, where that is not its samples.

        Raises:
            RuntimeError: no batch waits for it.
            TypeError, ValueError: the loss is no scalar or has no gradient, or the weight is negative.
        """
        turns = self._turns() if self._turns is not None else None
        if turns is None or not turns.is_waiting:
            raise RuntimeError(
                "window.backward(loss) once for each batch, within `for … in window`: no batch waits for it"
            )
        check_loss(loss)
        self._steps.backward(loss, turns.weigh(weight), turns.num_samples or 0, turns.votes())
        turns.is_waiting = False
        if turns.is_last:
            gradients = self._steps.gradients()
            self._steps.scale(gradients.scale)
            self.norm, self.has_more = gradients.norm, gradients.has_more

    @property
    def is_complete(self) -> bool:
        """Whether its last backward is made."""
        return self.norm is not None


class _Turns(Turns):
    """The iterator of a window."""

    def __init__(self, epoch: Epoch) -> None:
        super().__init__("window.backward(loss)")
        self._own = epoch

    def __iter__(self) -> _Turns:
        return self

    def __next__(self) -> Any:
        if self.epoch is not None and self.is_last and not self.is_waiting:
            raise StopIteration
        return self.hand_out(self._own)


def _windows(steps: Steps, epoch: Epoch) -> Iterator[Window]:
    has_more = epoch.has_more
    while has_more:
        window = Window(steps, epoch)
        yield window
        if not window.is_complete:
            raise RuntimeError("the next window was asked for before the last one had gone through all its batches")
        has_more = window.has_more
