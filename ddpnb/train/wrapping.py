"""Making a model ready for all ranks, and getting the bare one and its weights back.

    model = ddpnb.wrap(Net())              # on this rank's device, gradients averaged over the ranks
    ddpnb.state_dict(model)                # full, on the CPU, with the names of Net, whatever the wrapping

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Mapping, Set
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..context import device
from .batchnorm import convert_sync_batchnorm
from .compression import CommHook, register_comm_hook
from .membership import join
from .precision import Autocast, Precision, check_precision, half_dtype, mark
from .replica import Replica
from .sharding import shard

Strategy = Literal["ddp", "dp", "fsdp", "none"]

_STRATEGIES = ("ddp", "dp", "fsdp", "none")
_WRAPPERS = (DistributedDataParallel, DataParallel, Autocast)
_PREFIXES = ("module.", "_orig_mod.")


def wrap(
    model: nn.Module,
    strategy: Strategy = "ddp",
    *,
    sync_batchnorm: bool = False,
    precision: Precision = "fp32",
    comm_hook: CommHook | None = None,
    **options: Any,
) -> nn.Module:
    """Put `model` on this rank's device and make it train with those of the other ranks.

        model = ddpnb.wrap(Net(), sync_batchnorm=True, precision="bf16")

    stands for

        net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(Net()).to(device)
        model = DistributedDataParallel(net, device_ids=[local_rank])      # and autocast around each forward

    Args:
        model: the bare model, or one that `torch.compile` has taken. Call it on all ranks; the weights of rank 0 count.
        strategy: "ddp": each rank has the whole model, gradients are averaged in each backward. "fsdp": each rank has a
            part of every weight (`fully_shard`), for models too large for one device. "dp": `nn.DataParallel` over the
            GPUs of this one process, in a world of one. "none": only the device and the precision; ranks train apart.
        sync_batchnorm: turn every BatchNorm into `ddpnb.SyncBatchNorm`, which sees the batches of all ranks. On the CPU
            torch's own `nn.SyncBatchNorm` is replaced in any case: it needs a GPU.
        precision: "bf16", "fp16": compute the forward in it; outputs and weights stay float32. With "fp16" a `Loop`
            scales the loss; an own loop needs a `torch.amp.GradScaler`.
        comm_hook: how gradients travel with "ddp". "fp16", "bf16": in half the bytes. "powersgd": as low-rank factors.
        options: DistributedDataParallel's own (`bucket_cap_mb`, `gradient_as_bucket_view`, `static_graph`,
            `find_unused_parameters` …), or those of `fully_shard` (`reshard_after_forward` …).

    Returns:
        What to call in place of `model`; `unwrap` gives the bare one back.

    Raises:
        TypeError: `model` is no module.
        ValueError: an option that cannot be, or a model that cannot be trained so.
    """
    _check(model, strategy, precision, comm_hook, options)
    world = join()
    here = device()
    bare = unwrap(model)
    if sync_batchnorm:
        convert_sync_batchnorm(bare)
    elif here.type == "cpu":
        convert_sync_batchnorm(bare, nn.SyncBatchNorm)
    model.to(here)
    if strategy == "fsdp":
        shard(bare, half_dtype(precision), options)
        return model
    if precision != "fp32":
        model = Autocast(model, half_dtype(precision))
    match strategy:
        case "ddp":
            replica = Replica(model, here, comm_hook, **options)
            register_comm_hook(replica, comm_hook)
            return replica
        case "dp":
            return _data_parallel(model, here, world.world_size, options)
        case "none":
            mark(model, half_dtype(precision))
            return model


def unwrap(model: nn.Module) -> nn.Module:
    """The bare model within DDP, DataParallel, `torch.compile` and ddpnb's own wrapping, however they are nested.

    Stands for `model.module`. A model under "fsdp" is the bare one already, with its weights sharded.
    """
    while True:
        if isinstance(model, _WRAPPERS):
            model = model.module
        elif _is_compiled(model):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def state_dict(model: nn.Module) -> dict[str, Any]:
    """The model's state, whole, on the CPU, with the names of the bare model, whatever the wrapping.

        torch.save(ddpnb.state_dict(model), "weights.pt")       # Net().load_state_dict(torch.load("weights.pt"))

    stands for `{name: value.cpu() for name, value in model.module.state_dict().items()}`. Values are copies. With
    "fsdp" all ranks have to call it, for each weight is gathered from all of them, and each has the whole.
    """
    return {name: _whole(value) for name, value in named_state(model).items()}


def named_state(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """The model's own state, not copied, with the names of the bare model. Sharded values are this rank's."""
    bare = unwrap(model)
    bare_name = _naming(bare)
    return {bare_name(name): value for name, value in bare.state_dict(keep_vars=keep_vars).items()}


def load_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state into a model, both wrapped in whatever way; stands for `model.module.load_state_dict(state)`.

    Args:
        model: wrapped or bare. With "fsdp" all ranks have to call it, and the weights of rank 0's state count.
        state: of a bare model or of a wrapped one, whose prefixes `module.` and `_orig_mod.` are left out. The weights
            of a sharded one are gathered: all ranks have to call it.

    Raises:
        RuntimeError: names or shapes do not fit.
    """
    bare = unwrap(model)
    bare_name = _naming(bare)
    own = {bare_name(name): (name, value) for name, value in bare.state_dict().items()}
    fitting = {}
    for name, value in without_prefixes(state, own.keys()).items():
        own_name, own_value = own.get(name, (name, None))
        fitting[own_name] = spread(value, own_value)
    bare.load_state_dict(fitting)


# ---- how it is done


def _check(model: object, strategy: str, precision: str, comm_hook: object, options: Mapping[str, Any]) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"wrap() takes a torch.nn.Module, not {type(model).__name__}")
    if _is_sharded(model) or any(isinstance(each, _WRAPPERS) for each in model.modules()):
        raise ValueError("the model is wrapped already; ddpnb.unwrap(model) gives the bare one")
    if strategy not in _STRATEGIES:
        raise ValueError(f"strategy is one of {', '.join(map(repr, _STRATEGIES))}, not {strategy!r}")
    check_precision(precision)
    if comm_hook is not None and strategy != "ddp":
        raise ValueError(f"comm_hook={comm_hook!r} belongs to strategy='ddp', not to {strategy!r}")
    if options and strategy == "none":
        raise ValueError(f"strategy='none' has no options, not even {next(iter(options))!r}")
    named = [*model.named_parameters(), *model.named_buffers()]
    lazy = [name for name, value in named if nn.parameter.is_lazy(value)]
    if lazy:
        raise ValueError(f"{lazy[0]!r} has no shape yet: call the model once on a batch before it is wrapped")
    if strategy in ("ddp", "fsdp") and not any(value.requires_grad for value in model.parameters()):
        raise ValueError("the model has no parameter that requires a gradient; strategy='none' is for those")


def _data_parallel(model: nn.Module, here: torch.device, world_size: int, options: Mapping[str, Any]) -> nn.Module:
    if world_size > 1:
        raise ValueError(
            f"strategy='dp' is for one process that uses all GPUs, and this is one of {world_size} ranks; "
            "launch with nproc_per_node=1 (or 0), or use 'ddp'"
        )
    wrapped = DataParallel(model, **options)
    if here.type == "cpu":
        warnings.warn("nn.DataParallel passes everything through: there is no GPU", stacklevel=3)
    return wrapped


def _is_compiled(model: nn.Module) -> bool:
    # Where nothing has been compiled torch._dynamo may not be there, and its import takes seconds.
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _naming(bare: nn.Module) -> Callable[[str], str]:
    """Names in the bare model's state without those of wrappers around its parts, as of a block that is compiled."""
    paths = [
        path + "."
        for path, module in bare.named_modules(remove_duplicate=False)
        if isinstance(module, _WRAPPERS) or _is_compiled(module)
    ]

    def bare_name(name: str) -> str:
        for path in reversed(paths):  # inner ones first
            if name.startswith(path):
                name = path + name.removeprefix(path).partition(".")[2]
        return name

    return bare_name


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def spread(value: Any, own: Any) -> Any:
    """A value as the model has it: whole, or in parts."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(own, DTensor):
        return value
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements)


def without_prefixes(state: Mapping[str, Any], names: Set[str]) -> dict[str, Any]:
    """Leave out what wrapping has put before all names: as often as it takes for most to be the model's own."""
    candidates = [dict(state)]
    while (prefix := _common_prefix(candidates[-1])) is not None:
        candidates.append({name.removeprefix(prefix): value for name, value in candidates[-1].items()})
    return max(candidates, key=lambda each: len(names & each.keys()))


def _common_prefix(state: Mapping[str, Any]) -> str | None:
    return next((each for each in _PREFIXES if state and all(name.startswith(each) for name in state)), None)
