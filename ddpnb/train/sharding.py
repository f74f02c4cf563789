"""Models whose weights are spread over the ranks: FSDP2's `fully_shard`.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

from .precision import mark

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def shard(model: nn.Module, dtype: torch.dtype | None, options: Mapping[str, Any]) -> None:
    """Shard the model in place over all ranks: each block of it by itself, and what remains as a whole.

    A block's weights are gathered before it computes and let go after, so that a rank never holds more than one block
    beside its own part. Blocks are what a `ModuleList` holds, and what a `Sequential` does that is in no other block.

    Args:
        model: the bare model on this rank's device, the same on all ranks.
        dtype: to compute in; None: the weights' own. Gradients are added up in float32, outputs come in float32.
        options: of `fully_shard`.
    """
    _take_weights_of_rank_zero(model)
    precise = torch.float32 if dtype else None
    own = {
        "mesh": init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=precise, output_dtype=precise),
    }
    if dtype is not None:
        # Their statistics are float32, and torch's kernels want weights like them.
        policy = MixedPrecisionPolicy(param_dtype=precise, reduce_dtype=precise, output_dtype=dtype)
        for norm in [each for each in model.modules() if isinstance(each, _BatchNorm) and _has_weights(each)]:
            fully_shard(norm, **{**own, **options, "mp_policy": policy})
    # What a block puts out goes into other layers, which compute in `dtype` too: only the model's output is cast back.
    within = {**own, "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=precise)}
    for module in dict.fromkeys([*_blocks(model), model]):  # each once, however often it is used
        if not isinstance(module, FSDPModule):
            fully_shard(module, **{**(own if module is model else within), **options})
    mark(model, dtype)


def _blocks(module: nn.Module, within: bool = False) -> Iterator[nn.Module]:
    """The blocks of a model, inner ones first.

    Args:
        within: the module is, or belongs to, a block.
    """
    holds_blocks = isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and not within)
    for child in module.children():
        is_block = holds_blocks and not isinstance(child, _CONTAINERS) and _has_weights(child)
        yield from _blocks(child, within or is_block)
        if is_block:
            yield child


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _take_weights_of_rank_zero(model: nn.Module) -> None:
    for value in [*model.parameters(), *model.buffers()]:
        dist.broadcast(value.detach(), 0)
