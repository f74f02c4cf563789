"""From micro-batches to the gradients of one optimizer step, the same as one process has with the joint batch.

Each micro-batch's mean loss counts as much as the samples it was made of; gradients are reduced over the ranks in a
window's last backward only; and the sum of all weights, which only all ranks together know, rides along (`ballot`).

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from .ballot import NUM_NUMBERS, Ballot, CollectiveBallot, OwnBallot
from .batchnorm import SyncBatchNorm
from .replica import Replica, Turn, nothing

# What the numbers of a ballot are.
_WEIGHT, _SAMPLES, _STOP, _MORE, _SAVE, _BUSY, _FAILED, _SQUARES = range(NUM_NUMBERS)


class Votes(NamedTuple):
    """What one rank says with a micro-batch; only those of a window's last are counted."""

    is_last: bool
    """It is the window's last: gradients are reduced."""
    more: bool = False
    """This rank has another window in this epoch."""
    stop: bool = False
    """It wants to stop."""
    save: bool = False
    """It wants a checkpoint."""
    busy: bool = False
    """It is still writing the one before."""
    failed: bool = False
    """It could not write that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """What a window's last backward has brought about, the same on all ranks."""

    scale: float
    """What the gradients are still to be multiplied by to be those of the mean over all samples; 0 without samples."""
    norm: float
    """Norm of all gradients together once they are scaled; nan or inf where one is."""
    num_samples: int
    """Samples of the window, on all ranks together."""
    wants_stop: bool
    """A rank wants to stop."""
    has_more: bool
    """A rank has another window in this epoch."""
    wants_save: bool
    """A rank wants a checkpoint."""
    is_busy: bool
    """A rank is still writing the one before."""
    has_failed: bool
    """A rank could not write that."""


class Steps:
    """The backwards of a model, window by window.

    Args:
        model: wrapped or not.
        accumulate: micro-batches in a window.
        batch_size: samples of a full micro-batch, the same on all ranks; losses are divided by what a window weighs.

    Raises:
        ValueError: the model is wrapped in a way that cannot do it.
    """

    def __init__(self, model: nn.Module, accumulate: int, batch_size: int) -> None:
        self._weight = float(accumulate * batch_size)
        self._model = model
        self._replica = next((each for each in model.modules() if isinstance(each, Replica)), None)
        self._sharded = [each for each in model.modules() if isinstance(each, FSDPModule)]
        self._synchronises = any(isinstance(each, SyncBatchNorm) for each in model.modules())
        self.look_again()
        self._num_averaged = dist.get_world_size() if self._replica or self._sharded else 1
        if self._replica is None and any(isinstance(each, DistributedDataParallel) for each in model.modules()):
            raise ValueError(
                "the model is wrapped by torch's own DistributedDataParallel, which cannot weigh the ranks' batches: "
                "use ddpnb.wrap(model, …), a DistributedDataParallel too, with the same options"
            )
        if accumulate > 1 and self._replica is not None and self._replica.static_graph:
            raise ValueError(
                "static_graph=True takes every backward of the first step for one that is reduced, and fails where "
                f"gradients are accumulated over {accumulate}: wrap the model without it"
            )
        self._ballot = self._make_ballot()
        self._begin()

    @property
    def joins_ranks(self) -> bool:
        """Whether gradients are reduced over several ranks."""
        return self._num_averaged > 1

    @property
    def is_timed(self) -> bool:
        """Whether the session's stopwatch hears of each step's end, when gradients are reduced."""
        return self._replica is not None and self._replica.is_timed

    def look_again(self) -> None:
        """Take the parameters that require a gradient now; between epochs some may be frozen or unfrozen.

        Raises:
            RuntimeError: they differ from those that DDP knows.
        """
        if self._replica is not None:
            self._replica.refuse_changed()
        self._parameters = [each for each in self._model.parameters() if each.requires_grad]

    def follow(self, turn: Turn) -> None:
        """Forwards of the model belong to the micro-batches that `turn` hands out, as long as it exists."""
        self._begin()
        self.clear()
        if self._replica is not None:
            self._replica.follow(turn)

    def backward(
        self,
        loss: torch.Tensor,
        weight: float,
        num_samples: int,
        votes: Votes,
    ) -> None:
        """Add the gradients of one micro-batch.

        Args:
            loss: mean over what it stands for, times the scaler's scale if there is one.
            weight: how much that was; 0 for a batch without samples.
            num_samples: of this rank's micro-batch.
            votes: what this rank says in the window's ballot.
        """
        if weight == 0 and not self._needs_every_rank and not math.isfinite(loss):
            # A mean over nothing is nan, and nan times 0 is nan.
            self.pass_over(num_samples, votes)
            return
        self._refuse_own_gradients()
        self._sum_of_weights += weight
        self._num_samples += num_samples
        self._num_backwards += 1
        if not votes.is_last:
            self._run(loss, weight, reduce=False)
            return
        said = votes.stop, votes.more, votes.save, votes.busy, votes.failed
        numbers = [self._sum_of_weights / self._weight, self._num_samples, *said, 0.0]
        rides = not isinstance(self._ballot, CollectiveBallot)
        if rides:
            self._ballot.put(numbers)
        self._run(loss, weight, reduce=True)
        if not rides:
            numbers[_SQUARES] = self._own_squares()
            self._ballot.put(numbers)

    def pass_over(self, num_samples: int, votes: Votes) -> None:
        """Add nothing for one micro-batch, whether its forward has run or not; the other ranks' gradients are reduced.

        Raises:
            RuntimeError: the model's own collectives need this rank's forward and backward.
        """
        if self._needs_every_rank:
            raise RuntimeError(
                "skip() on one rank would leave the others waiting: sharded weights and SyncBatchNorm need every rank "
                "in each batch; call the model and loop.update(loss, weight=0)"
            )
        if votes.is_last:
            if self._replica is not None:
                self._replica.expect_backward()
            self._num_backwards = 0  # the next is none of the user's
            self.backward(nothing(self._model), 0.0, num_samples, votes)
        else:
            self._num_samples += num_samples

    def gradients(self) -> Gradients:
        """After a window's last backward: what all ranks have."""
        for each in self._parameters:
            if each.grad is not None and each.grad.is_sparse:
                each.grad = each.grad.coalesce()  # so that its values can be measured and scaled where they are
        grads = self._grads()
        if self._replica is not None and len(grads) < len(self._parameters):
            self._refuse_unused(self._replica)
        weight, num_samples, stop, more, save, busy, failed, squares = self._ballot.count()
        scale = self._num_averaged / weight if weight > 0 else 0.0
        norm = math.sqrt(squares) if self._sharded else float(get_total_norm([_values(grad) for grad in grads]))
        self._begin()
        return Gradients(
            scale=scale,
            norm=norm * scale,
            num_samples=round(num_samples),
            wants_stop=stop > 0,
            has_more=more > 0,
            wants_save=save > 0,
            is_busy=busy > 0,
            has_failed=failed > 0,
        )

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        if factor != 1.0:
            torch._foreach_mul_([_values(grad) for grad in self._grads()], factor)

    def clear(self) -> None:
        """Have no gradients; as `model.zero_grad()`, which goes through all modules."""
        for parameter in self._parameters:
            parameter.grad = None

    def spoil(self) -> None:
        """Make a gradient infinite, so that a GradScaler finds here what was found elsewhere."""
        for grad in self._grads()[:1]:
            grad.fill_(math.inf)

    def _refuse_unused(self, replica: Replica) -> None:
        """Raise for parameters without gradient, for which DDP would wait at the next forward."""
        if not replica.find_unused_parameters and not replica.static_graph:
            names = [
                name for name, each in replica.module.named_parameters() if each.requires_grad and each.grad is None
            ]
            raise RuntimeError(
                f"the loss does not depend on {', '.join(map(repr, names))}, and DDP waits for every gradient: use it, "
                "or ddpnb.wrap(model, find_unused_parameters=True)"
            )

    def _begin(self) -> None:
        self._sum_of_weights = 0.0
        self._num_samples = 0
        self._num_backwards = 0

    @property
    def _needs_every_rank(self) -> bool:
        """Whether forwards and backwards are collectives, in each micro-batch."""
        return self.joins_ranks and (bool(self._sharded) or self._synchronises)

    def _refuse_own_gradients(self) -> None:
        """Raise where the user's own backward or zero_grad has meddled: the gradients would be wrong without a word."""
        first, last = self._parameters[0].grad, self._parameters[-1].grad
        if not self._num_backwards and self._sum_of_weights == 0 and (first is not None or last is not None):
            raise RuntimeError(
                "there are gradients before the window's first loss: leave out loss.backward(), give the sum of all "
                "losses to update() or window.backward(), and detach() what another model's loss uses"
            )
        if self._num_backwards and not self._sharded and all(each.grad is None for each in self._parameters):
            raise RuntimeError("the window's gradients are gone: leave out zero_grad(), each window begins with none")

    def _run(self, loss: torch.Tensor, weight: float, *, reduce: bool) -> None:
        for module in self._sharded:
            module.set_requires_gradient_sync(reduce, recurse=False)
        try:
            share = weight / self._weight
            (loss if share == 1.0 else loss * share).backward()
        finally:
            for module in self._sharded:
                module.set_requires_gradient_sync(True, recurse=False)

    def _make_ballot(self) -> Ballot:
        if self._replica is not None:
            return self._replica.ballot
        return CollectiveBallot(self._parameters[0].device) if self._sharded else OwnBallot()

    def _grads(self) -> list[torch.Tensor]:
        return [each.grad for each in self._parameters if each.grad is not None]

    def _own_squares(self) -> float:
        if not self._sharded:
            return 0.0
        own = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in self._grads()]
        return float(get_total_norm(own)) ** 2 if own else 0.0


def _values(grad: torch.Tensor) -> torch.Tensor:
    """What a gradient holds; of a sparse one, as embeddings may have, the values that it has."""
    return grad.values() if grad.is_sparse else grad
