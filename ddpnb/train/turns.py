"""Batches handed out one by one, each of which has to be answered by a loss before the next.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..context import device
from .batches import to_device
from .epoch import Epoch
from .steps import Votes


class Turns:
    """What an iterator over micro-batches knows. Only the `for` that it serves holds it.

    So it is gone as soon as that is left, by a break or an exception too, and what depends on it is as before.
    """

    def __init__(self, answer: str) -> None:
        self._answer = answer
        self._device = device()
        self.epoch: Epoch | None = None
        self.is_last = True
        """Whether the batch at hand is its window's last."""
        self.is_waiting = False
        """A batch was handed out, and no loss has come."""
        self.num_samples: int | None = None
        """Of the batch at hand; None where it holds no tensor to count by."""

    def hand_out(self, epoch: Epoch) -> Any:
        """The next batch, on this rank's device.

        Raises:
            RuntimeError: the one before waits for its loss.
        """
        self.refuse_if_waiting()
        batch = to_device(epoch.take(), self._device)
        self.epoch, self.is_last, self.is_waiting = epoch, epoch.is_last, True
        self.num_samples = epoch.num_samples
        return batch

    def refuse_if_waiting(self) -> None:
        """Raise RuntimeError where a batch has not been answered."""
        if self.is_waiting:
            raise RuntimeError(
                f"a batch was asked for while the one before waits for its loss: {self._answer} for each"
            )

    def weigh(self, weight: float | torch.Tensor | None) -> float:
        """How much the loss of the batch at hand stands for: `weight`, or its samples; 0 where it has none."""
        if self.num_samples == 0:
            return 0.0
        if weight is None:
            if self.num_samples is None:
                raise TypeError("the batch has no tensor to count samples by: say weight=… with the loss")
            return float(self.num_samples)
        weight = float(weight)
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight={weight}: how much the mean loss stands for, 0 or more")
        return weight

    def votes(self, **said: bool) -> Votes:
        """What this rank says with the batch at hand: `stop`, `save`, `failed`."""
        assert self.epoch is not None
        return Votes(self.is_last, self.epoch.has_more, **said)


def check_loss(loss: object) -> None:
    """Raise TypeError or ValueError for what no backward can begin from."""
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"the loss is a tensor with a gradient, not {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(f"the loss is a scalar, not of shape {tuple(loss.shape)}: take its mean()")
    if not loss.requires_grad:
        raise ValueError("the loss has no gradient: was it made under no_grad(), detached, or without the model?")
