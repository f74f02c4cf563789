"""DDP as ddpnb has it: torch's own class, which also knows windows of micro-batches and carries a ballot.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ..context import stopwatch
from .ballot import Ballot, BucketBallot, CollectiveBallot, new_slip, slip_in, trigger_of
from .compression import check_comm_hook
from .reduced import Reduction


class Turn(Protocol):
    """Whoever hands out micro-batches, a `Loop` say."""

    is_last: bool
    """Whether the present micro-batch is its window's last, whose backward is reduced over the ranks."""


class Replica(DistributedDataParallel):
    """One rank's copy of a model. Made by `wrap`.

    Args:
        module: the model, on `here`.
        here: its device.
        comm_hook: that will be registered.
        options: of `DistributedDataParallel`.
    """

    def __init__(self, module: nn.Module, here: torch.device, comm_hook: str | None, **options: Any) -> None:
        check_comm_hook(comm_hook)
        if here.type == "cuda":
            options.setdefault("device_ids", [here.index])
        rides = comm_hook is None and not options.get("find_unused_parameters")
        trigger = trigger_of(module) if rides else None
        slip = new_slip(trigger) if trigger is not None else None
        with slip_in(module, slip):
            super().__init__(module, **options)
        self._trained = self._trainable()
        self._hidden = (slip,)  # a tuple: of a bare parameter nn.Module would take notice
        self._turn: weakref.ref[Turn] | None = None
        self._reduction: Reduction | None = None
        self._ballots = [self._first_ballot()]
        if dist.get_world_size() > 2 and not self.static_graph and not self.find_unused_parameters:
            self._settle_buckets()
        self._reduction = self._watched_reduction()

    @property
    def ballot(self) -> Ballot:
        """What counts the numbers of this model's steps."""
        return self._ballots[-1]

    @property
    def is_timed(self) -> bool:
        """Whether the session's stopwatch hears of each reduction."""
        return self._reduction is not None

    def follow(self, turn: Turn) -> None:
        """Reduce gradients only in the last micro-batch of the windows that `turn` hands out, while it exists.

        Held weakly: a loop that is left by a break or an exception is gone, and every backward is reduced again.
        """
        if self._turn is not None and self._turn() is not None:
            raise RuntimeError("another Loop or window over this model is still under way: leave its `for` first")
        self._turn = weakref.ref(turn)
        if isinstance(self.ballot, CollectiveBallot):
            self.ballot.is_awaited = False  # own loops have not counted theirs

    def refuse_changed(self) -> None:
        """Raise where parameters were frozen or unfrozen after wrapping: DDP does not notice, and ranks drift apart."""
        now = self._trainable()
        for name, each in self.module.named_parameters():
            was_trained, is_trained = id(each) in self._trained, id(each) in now
            if is_trained > was_trained or (was_trained > is_trained and not self.find_unused_parameters):
                raise RuntimeError(
                    f"{name!r} was {'unfrozen' if is_trained else 'frozen'} after wrap(), or came to the model later: "
                    "DDP reduces the parameters that required a gradient then. Change the model first, then wrap it, "
                    "as often as it changes: ddpnb.wrap(ddpnb.unwrap(model))."
                )

    def _trainable(self) -> frozenset[int]:
        return frozenset(id(each) for each in self.module.parameters() if each.requires_grad)

    def expect_backward(self) -> None:
        """Have the next backward reduced, which reaches every parameter, whether a forward has run or not."""
        if not self.ballot.is_awaited:
            self._pre_forward()  # type: ignore[no-untyped-call]
        outputs = [each.reshape(-1)[:1] for each in self.module.parameters() if each.requires_grad]
        self._post_forward(outputs)  # type: ignore[no-untyped-call]
        self._await_backward()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As DDP's; without the reduction before a window's last micro-batch, as under `no_sync()`."""
        turn = self._turn() if self._turn is not None else None
        asked = self.require_backward_grad_sync
        is_reduced = asked and (turn is None or turn.is_last)
        if is_reduced != asked:  # a module's attributes are slow to set
            self.require_backward_grad_sync = is_reduced
        try:
            outputs = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except Exception as error:
            _explain(error, inputs, kwargs)
            raise
        finally:
            if is_reduced != asked:
                self.require_backward_grad_sync = asked
        if is_reduced and torch.is_grad_enabled():
            self._await_backward()
        return outputs

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """As DDP's. What it makes of the buckets nobody knows: the numbers go apart from now on."""
        super().register_comm_hook(state, hook)
        self._ballots.append(CollectiveBallot(self.device))

    def __getstate__(self) -> dict[str, Any]:
        """As DDP's, for `copy` and `pickle`, without what is of this very model: its hooks, its loop."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        del state["_ballots"], state["_reduction"]
        return {**state, "_turn": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As DDP's, with a ballot of its own."""
        with slip_in(state["_modules"]["module"], *state["_hidden"]):
            super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._trained = self._trainable()
        self._ballots = [self._first_ballot()]
        self._reduction = self._watched_reduction()

    @_disable_dynamo  # it traces none of DDP's own methods either
    def _sync_buffers(self) -> None:
        """As DDP's: before a forward all ranks wait for the buffers of rank 0."""
        began = monotonic()
        super()._sync_buffers()  # type: ignore[no-untyped-call]
        stopwatch().waited(began)

    def _settle_buckets(self) -> None:
        """Have the buckets as they stay from the first step on.

        DDP begins with buckets in one order and deals them anew after the first backward. A sum over three or more
        ranks depends, in its last bit, on where in a bucket a number lies: a run that is resumed, whose first step is a
        later one, would end with other bits than one that was not interrupted.
        """
        kept = [(each, each.grad) for each in self.module.parameters()]
        self.module.zero_grad(set_to_none=True)
        self.expect_backward()
        nothing(self.module).backward()
        self.reducer._rebuild_buckets()
        for each, grad in kept:
            each.grad = grad
        first = self.ballot
        if isinstance(first, BucketBallot):
            first.count()
        first.is_awaited = False

    def _await_backward(self) -> None:
        for each in self._ballots:
            each.is_awaited = True
        if self._reduction is not None:
            self._reduction.is_awaited = True

    def _first_ballot(self) -> Ballot:
        (slip,) = self._hidden
        trigger = trigger_of(self.module)
        # Where the model has parameters() of its own making, DDP has not found the slip.
        if slip is None or trigger is None or not any(each is slip for each in self._module_parameters):
            return CollectiveBallot(self.device)
        ballot = BucketBallot(slip, trigger)
        weakref.finalize(self, ballot.close)
        return ballot

    def _watched_reduction(self) -> Reduction | None:
        trigger = trigger_of(self.module)
        if trigger is None:
            return None
        reduction = Reduction(trigger)
        weakref.finalize(self, reduction.close)
        return reduction


def nothing(module: nn.Module) -> torch.Tensor:
    """A zero whose backward reaches every parameter that requires a gradient; a sparse one where it has such."""
    sparse = {
        id(each.weight) for each in module.modules() if getattr(each, "sparse", False) and hasattr(each, "weight")
    }
    zeros = []
    for each in module.parameters():
        if each.requires_grad:
            first = torch.zeros(1, dtype=torch.long, device=each.device)
            some = F.embedding(first, each, sparse=True) if id(each) in sparse else each.reshape(-1)[:1]
            zeros.append(some.sum() * 0)
    return torch.stack([each.to(zeros[0].device) for each in zeros]).sum()


def _explain(error: Exception, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensors = [each for each in tree_leaves((inputs, kwargs)) if isinstance(each, torch.Tensor) and each.dim()]
    if tensors and not any(len(value) for value in tensors):
        error.add_note(_NO_SAMPLES)
    elif "Expected to have finished reduction" in str(error):
        error.add_note(_UNUSED)


_NO_SAMPLES = (
    "This rank has no sample in this batch: the last batches of an epoch are dealt out as they are, and a rank may get "
    "none. Either give all ranks equally many, ddpnb.loader(…, drop_last=True) or (…, pad=True), or let the model take "
    "a batch of size 0: x.flatten(1) in place of x.view(x.size(0), -1)."
)
_UNUSED = (
    "A parameter that the last loss did not depend on has no gradient, and DDP waits for it: use every parameter, or "
    "ddpnb.wrap(model, find_unused_parameters=True)."
)
