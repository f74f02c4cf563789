"""The exact mean of per-sample values over a data set that all ranks share.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..context import device, should_stop
from .batches import num_samples, to_device
from .exact import ExactSum
from .loading import Loader
from .reduction import gather
from .replica import Replica

Values = torch.Tensor | dict[str, torch.Tensor]


def evaluate(model: nn.Module, fn: Callable[..., Values], loader: Iterable[Any]) -> float | dict[str, float]:
    """As `Loop.evaluate`."""
    sums: dict[str | None, ExactSum] = {}
    if _is_sharded(model):
        _refuse_uneven(loader)
    with _evaluating(model), torch.no_grad():
        for batch in loader:
            if isinstance(loader, Loader):
                should_stop()  # a stop is acknowledged here, and obeyed by the loop; all ranks ask equally often
            batch = to_device(batch, device())
            size = num_samples(batch)
            if size == 0 and not _is_sharded(model):
                continue  # nothing to say; a sharded model's forward is everybody's
            for name, values in _named(_call(fn, batch)).items():
                _check(name, values, size)
                sums.setdefault(name, ExactSum()).add(values.detach().double().cpu().numpy())
    joint = _over_ranks(sums)
    if not any(each.count for each in joint.values()):
        raise ValueError("evaluate() got no sample: the loader is empty on every rank")
    means = {name: each.mean() for name, each in joint.items()}
    return means[None] if None in means else {str(name): mean for name, mean in means.items()}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and the buffers of rank 0 everywhere, as DDP has them at its next forward."""
    modes = {module: module.training for module in model.modules()}
    replicas = [each for each in model.modules() if isinstance(each, Replica)]
    syncs = [replica.require_forward_param_sync for replica in replicas]
    for replica in replicas:
        if replica.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            for buffer in replica.modules_buffers:
                dist.broadcast(buffer.detach(), 0)
        # Ranks may have different numbers of batches: no forward in here is a collective.
        replica.require_forward_param_sync = False
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for replica, sync in zip(replicas, syncs, strict=True):
            replica.require_forward_param_sync = sync


def _refuse_uneven(loader: Any) -> None:
    """Raise, on all ranks, where they have different numbers of batches: a sharded model's forwards are collectives."""
    counts = gather(len(loader) if hasattr(loader, "__len__") else None)
    if len(set(counts)) > 1:
        raise ValueError(
            f"the ranks have {', '.join(map(str, counts))} batches to evaluate, and a sharded model needs equally "
            "many: use ddpnb.loader(dataset, batch_size)"
        )


def _call(fn: Callable[..., Values], batch: Any) -> Values:
    if isinstance(batch, tuple | list):
        return fn(*batch)
    return fn(batch)


def _named(values: Any) -> dict[str | None, torch.Tensor]:
    return dict(values) if isinstance(values, dict) else {None: values}


def _check(name: str | None, values: object, size: int | None) -> None:
    what = "evaluate()'s function" if name is None else f"{name!r} of evaluate()'s function"
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"{what} gives a tensor with a value for each sample, not {type(values).__name__}")
    if values.dim() != 1 or (size is not None and len(values) != size):
        raise ValueError(f"{what} gives one value per sample, shape ({size},), not {tuple(values.shape)}")


def _over_ranks(sums: dict[str | None, ExactSum]) -> dict[str | None, ExactSum]:
    """Add up over the ranks; whole numbers travel as text, they are longer than any integer of a tensor."""
    own = {name or "": [hex(each.total), each.count, each.special] for name, each in sums.items()}
    joint: dict[str | None, ExactSum] = {}
    everyone = gather(own)
    if len({tuple(sorted(theirs)) for theirs in everyone if theirs}) > 1:
        raise ValueError(
            f"evaluate()'s function gives other names on other ranks: {[sorted(each) for each in everyone]}"
        )
    for theirs in everyone:
        for name, (total, count, special) in theirs.items():
            found = joint.setdefault(name or None, ExactSum())
            found.total += int(total, 16)
            found.count += count
            found.special += special
    return joint


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())
