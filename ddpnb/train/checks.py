"""The classic mistakes of distributed training, noticed at run time, each with its cure.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

import sys
import time
import warnings
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ..context import current_session, is_rank_zero, world_size
from ..messages import Noted
from .batchnorm import SyncBatchNorm
from .loading import Loader
from .precision import is_marked
from .reduction import gather
from .replica import Replica

_PACKAGE = __name__.partition(".")[0] + "."
_FEW_SAMPLES = 16
"""Local batches below which BatchNorm's statistics are too noisy. Source: Wu and He, Group Normalization, 2018."""

_epochs: WeakKeyDictionary[DistributedSampler[Any], int] = WeakKeyDictionary()
"""{sampler: the epoch it was last gone through for}"""


class TrainingWarning(UserWarning):
    """Something that trains, and not what was meant."""


def check_loader(loader: Any, joins_ranks: bool) -> None:
    """Before an epoch: data that all ranks share, an order that comes again.

    Args:
        loader: of the epoch.
        joins_ranks: gradients are reduced over several ranks.
    """
    if joins_ranks and _gives_all_to_everyone(loader):
        warn(
            "every rank goes through the whole data set: the DataLoader has no distributed sampler. Use "
            "ddpnb.loader(dataset, batch_size, shuffle=True), or DataLoader(…, sampler=DistributedSampler(dataset))."
        )
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.shuffle:
        if _epochs.get(sampler) == sampler.epoch:
            warn(
                "the samples come in the order of the epoch before: call loader.sampler.set_epoch(epoch) before each "
                "epoch, or use ddpnb.loader(), which goes on by itself."
            )
        _epochs[sampler] = sampler.epoch


def check_weights(model: nn.Module) -> None:
    """Before the first batch: a model for each rank, weights that differ."""
    if world_size() > 1 and not is_marked(model) and not any(map(_joins_ranks, model.modules())):
        warn(
            "the model is not wrapped: every rank trains weights of its own. Use ddpnb.wrap(model), or "
            "wrap(model, strategy='none') where that is meant."
        )
    for replica in model.modules():
        if isinstance(replica, Replica) and world_size() > 1:
            _check_parameters(replica)


def check_batchnorm(model: nn.Module, num_samples: int | None) -> None:
    """With the first batch: statistics of few samples."""
    if world_size() == 1 or num_samples is None or num_samples >= _FEW_SAMPLES:
        return
    own = [name for name, each in model.named_modules() if _is_local(each)]
    if own:
        warn(
            f"{own[0].replace('module.', '')!r} takes its statistics from {num_samples} samples, this rank's own. Use "
            "ddpnb.wrap(model, sync_batchnorm=True), which takes those of all ranks, or larger batches."
        )


def check_evaluation_loader(loader: Any) -> None:
    """Samples that a padding sampler repeats count twice in a mean."""
    sampler = getattr(loader, "sampler", None)
    if world_size() > 1 and isinstance(sampler, DistributedSampler) and not sampler.drop_last:
        repeated = sampler.total_size - len(sampler.dataset)  # type: ignore[arg-type]
        if repeated:
            warn(
                f"DistributedSampler repeats {repeated} of the samples to give all ranks equally many: the mean counts "
                "them twice. ddpnb.loader(dataset, batch_size) has each once."
            )


def _joins_ranks(module: nn.Module) -> bool:
    return isinstance(module, Replica | FSDPModule)


def _gives_all_to_everyone(loader: Any) -> bool:
    if not isinstance(loader, DataLoader) or isinstance(loader, Loader) or isinstance(loader.dataset, IterableDataset):
        return False
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return not any(hasattr(each, "set_epoch") or hasattr(each, "num_replicas") for each in samplers)


def _check_parameters(replica: Replica) -> None:
    named = list(replica.module.named_parameters())
    digests = gather({name: _digest(each) for name, each in named})
    differing = [name for name, _ in named if len({each.get(name) for each in digests}) > 1]
    if differing:
        warn(
            f"{differing[0]!r} differs between ranks{_and_others(differing)}: weights were changed or loaded on some "
            "ranks only. Load them on all ranks, or on rank 0 before wrap(), which hands them out."
        )


def _digest(value: torch.Tensor) -> str:
    """What tells tensors apart, bit by bit."""
    bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return blake2b(bits.numpy().data, digest_size=8).hexdigest()


def _is_local(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm) and module.training


def _and_others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more do)" if len(names) > 1 else ""


def warn(text: str) -> None:
    """Warn once for all ranks, which make the same mistake, of a line of the user's function; the view shows it."""
    if is_rank_zero():
        warnings.warn_explicit(text, TrainingWarning, *_place())
        session = current_session()
        if session is not None:
            session.tell(Noted(time=time.monotonic(), text=text))


def _place() -> tuple[str, int]:
    """Function and line outside of this package: the file of a cell's code is a path that says nothing."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_name}()", frame.f_lineno
