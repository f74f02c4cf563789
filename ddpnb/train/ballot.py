"""A few numbers that all ranks add up at each optimizer step, without a collective of their own where it can be.

A training step has to know what only all ranks together know: how many samples the step was made of, whether anybody
wants to stop. A small all-reduce of its own would cost a tenth of a 5 ms step. So a DDP model's gradient buckets carry
the numbers: they are the gradient of a small parameter that belongs to the buckets and to nothing else, neither to
`parameters()` nor to a state dict. Where buckets round what they carry, or there are none, one all-reduce does it.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from ..context import stopwatch

NUM_NUMBERS = 8
"""How many there are."""

_NAME = "_ddpnb_ballot"
_EXACT = (torch.float32, torch.float64)


class Ballot(Protocol):
    """Adds up numbers over all ranks, once per optimizer step."""

    is_awaited: bool
    """A forward has run, or was made up for, whose backward will be reduced over the ranks and has not come yet."""

    def put(self, numbers: list[float]) -> None:
        """Say this rank's numbers, NUM_NUMBERS of them, before the step's last backward."""

    def count(self) -> list[float]:
        """Their sums over all ranks, after that backward; on every rank the same."""


class OwnBallot:
    """The ballot of a rank that trains by itself."""

    is_awaited = False

    def put(self, numbers: list[float]) -> None:
        """As `Ballot.put`."""
        self._numbers = numbers

    def count(self) -> list[float]:
        """As `Ballot.count`."""
        return self._numbers


class CollectiveBallot:
    """One all-reduce in each step, of numbers in float64."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_awaited = False

    def put(self, numbers: list[float]) -> None:
        """As `Ballot.put`."""
        self._numbers = numbers

    def count(self) -> list[float]:
        """As `Ballot.count`."""
        sums = torch.tensor(self._numbers, dtype=torch.float64, device=self._device)
        began = monotonic()
        dist.all_reduce(sums)
        stopwatch().waited(began)
        self.is_awaited = False
        return sums.tolist()


class BucketBallot:
    """Rides in a DDP model's gradient buckets.

    DDP knows a parameter, `slip`, whose gradient is set during each backward that is reduced: as soon as that of
    another one, `trigger`, is there. Forward and loss know nothing of it.

    Args:
        slip: the parameter whose gradient the numbers are.
        trigger: a parameter that gets a gradient in every backward.
    """

    def __init__(self, slip: nn.Parameter, trigger: nn.Parameter) -> None:
        self.is_awaited = False
        self._num_ranks = dist.get_world_size()
        self._slip = slip
        self._nothing = self._numbers = torch.zeros_like(slip)
        self._hook = trigger.register_post_accumulate_grad_hook(self._cast)

    def put(self, numbers: list[float]) -> None:
        """As `Ballot.put`."""
        self._slip.grad = None  # own loops leave theirs, and a backward that failed
        self._numbers = torch.tensor(numbers, dtype=self._slip.dtype, device=self._slip.device)

    def count(self) -> list[float]:
        """As `Ballot.count`."""
        assert self._slip.grad is not None, "no backward was reduced since the numbers were put"
        means = self._slip.grad.tolist()
        self._slip.grad, self._numbers = None, self._nothing
        return [mean * self._num_ranks for mean in means]  # DDP makes a mean

    def close(self) -> None:
        """Let go of the trigger, which may outlive the model around it."""
        self._hook.remove()

    def _cast(self, _: torch.Tensor) -> None:
        # Before DDP's own hook of the trigger: the slip is never the last to come, whose hook ends the reduction.
        if self.is_awaited:
            self.is_awaited = False
            torch.autograd.backward(self._slip, self._numbers)


def trigger_of(module: nn.Module) -> nn.Parameter | None:
    """The first parameter that DDP reduces; None where there is none, and for a script, which takes no slip."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return next((each for name, each in module.named_parameters() if each.requires_grad and name not in ignored), None)


def new_slip(trigger: nn.Parameter) -> nn.Parameter | None:
    """A parameter for the numbers; None where buckets of the trigger's dtype would round them."""
    return nn.Parameter(trigger.new_zeros(NUM_NUMBERS)) if trigger.dtype in _EXACT else None


@contextmanager
def slip_in(module: nn.Module, slip: nn.Parameter | None) -> Iterator[None]:
    """Let `slip` be the module's first parameter, so that DDP finds it, and its gradient comes last but one."""
    if slip is None:
        yield
        return
    parameters = module._parameters
    own = dict(parameters)
    parameters.clear()
    parameters.update({_NAME: slip, **own})
    try:
        yield
    finally:
        del parameters[_NAME]
