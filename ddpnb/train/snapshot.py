"""What a checkpoint holds, between objects of torch and files.

Model and optimizer become *trees*: dicts and lists of tensors and plain values, which `torch.load(weights_only=True)`
reads without ddpnb. With sharded weights each rank has files of its own, in which a part is a dict of four: the tensor,
the dimension along which the whole was cut, where this part begins, and the size of the whole.

Runs in: worker (and in the kernel, for inference)
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from .. import checkpoints
from ..checkpoints import File
from ..errors import CheckpointError
from .wrapping import load_state_dict, named_state, spread, unwrap, without_prefixes

_PART = "ddpnb.part"
_MOST_NAMED = 5  # names that an error lists of each kind

Tree = Any


# ---- objects -> trees


def plain(value: Any, path: str, leaf: Callable[[torch.Tensor, str], Any]) -> Tree:
    """The value with each tensor replaced by `leaf(tensor, path)`; containers become plain dicts and lists.

    Raises:
        CheckpointError: something in it is neither, so that reading it back would mean to execute code.
    """
    match value:
        case torch.Tensor():
            return leaf(value, path)
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return {_key(key, path): plain(item, f"{path}/{key}", leaf) for key, item in value.items()}
        case tuple():
            return tuple(plain(item, f"{path}/{index}", leaf) for index, item in enumerate(value))
        case list():
            return [plain(item, f"{path}/{index}", leaf) for index, item in enumerate(value)]
    raise CheckpointError(
        f"{path} is of type {type(value).__name__}: a checkpoint holds tensors, numbers, strings, None, and dicts, "
        "lists and tuples of them"
    )


def _key(key: object, path: str) -> str | int:
    if not isinstance(key, str | int):
        raise CheckpointError(f"{path} has a key of type {type(key).__name__}: keys are str or int")
    return key


def part_of(value: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any] | None]:
    """This rank's own tensor, and where it belongs in the whole; None where it is the whole."""
    if not isinstance(value, DTensor):
        return value.detach(), None
    (placement,) = value.placements
    own = value.to_local().detach()
    if not isinstance(placement, Shard):
        return own, None
    whole, ranks = value.shape[placement.dim], value.device_mesh.size()
    begin = min(value.device_mesh.get_local_rank() * -(-whole // ranks), whole)
    return own, {"dim": placement.dim, "begin": begin, "size": whole}


def as_part(tensor: torch.Tensor, place: dict[str, Any] | None) -> Tree:
    """What stands in a tree for it."""
    return tensor if place is None else {_PART: tensor, **place}


def changed_by_forwards(model: nn.Module, optimizer: Optimizer) -> frozenset[str]:
    """Names, in `named_state`, of what may change before the optimizer steps: all that is not trained by it."""
    trained = {id(each) for group in optimizer.param_groups for each in group["params"] if each.requires_grad}
    state = named_state(model, keep_vars=True)
    return frozenset(name for name, value in state.items() if id(value) not in trained)


def parts(state: Mapping[str, Any]) -> dict[str, Tree]:
    """A state of sharded values with this rank's own parts in place of them, as they lie between two steps."""
    return {
        name: as_part(*part_of(value)) if isinstance(value, torch.Tensor) else value for name, value in state.items()
    }


def write_file(path: Path, content: Any) -> File:
    """Write a tree, or a `.json` file; as `checkpoints.write`."""
    if path.suffix == ".json":
        return checkpoints.write_json(path, content)
    return checkpoints.write(path, lambda sink: torch.save(content, sink))  # type: ignore[arg-type]


# ---- trees -> objects


def load(path: Path) -> Tree:
    """Read a file of tensors and plain values; never executes what is in it.

    Its tensors lie in the file itself, mapped into memory, until they are copied: a file that may be written over in
    place, as those of others may, is for `read`.

    Raises:
        CheckpointError: it holds something else, or cannot be read.
    """
    return _load(path, mmap=zipfile.is_zipfile(path))


def read(path: Path) -> Tree:
    """As `load`, into memory of its own."""
    return _load(path, mmap=False)


def _load(path: Path, mmap: bool) -> Tree:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(_refusal(path, str(error))) from None
    except Exception as error:  # of any kind: the bytes may say anything
        raise CheckpointError(f"{path} cannot be read: {_first_line(error) or type(error).__name__}") from None


def _refusal(path: Path, reason: str) -> str:
    """Why torch's reader for tensors and plain values did not go on."""
    foreign = re.search(r"(?i:unsupported) (?:global: )?GLOBAL ([\w.]+)", reason)
    if foreign is None and "Unsupported operand" in reason:
        return f"{path} cannot be read: it was not written by torch.save, or is damaged"
    return (
        f"{path} holds more than tensors and plain values{f' ({foreign[1]})' if foreign else ''}: reading it could "
        "execute code, and was refused. If you trust who wrote it, read it with torch.load(…, weights_only=False) and "
        "save its tensors anew"
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def joined(trees: Sequence[Tree]) -> Tree:
    """One tree from those of all ranks: parts put together, all else as the first has it."""
    first = trees[0]
    if isinstance(first, Mapping) and _PART in first:
        parts = sorted(trees, key=lambda each: int(each["begin"]))
        return torch.cat([each[_PART] for each in parts], first["dim"])
    if isinstance(first, Mapping):
        return {key: joined([each[key] for each in trees]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(joined(each) for each in zip(*trees, strict=True))
    return first


def fitted_to_model(model: nn.Module, state: Any, source: Path) -> dict[str, Any]:
    """A state with the model's own names; nothing is changed yet.

    Raises:
        CheckpointError: it is of another model; names and shapes of what differs.
    """
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{source} holds no model's state: that is a dict of tensors by name")
    own = named_state(model)
    fitted = without_prefixes(state, own.keys())
    if differences := _differences(own, fitted):
        raise CheckpointError(f"{source} is a checkpoint of another model: {'; '.join(differences)}")
    return fitted


def put_into_model(model: nn.Module, state: Any, source: Path) -> None:
    """Load a state into a model, wrapped or sharded in whatever way.

    Raises:
        CheckpointError: it is of another model; names and shapes of what differs.
    """
    load_state_dict(model, fitted_to_model(model, state, source))


def _differences(own: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    missing = [repr(name) for name in own if name not in state]
    unknown = [repr(name) for name in state if name not in own]
    reshaped = [
        f"{name!r} is {_kind(state[name])} there and {_kind(own[name])} here"
        for name in own
        if name in state and _kind(own[name]) != _kind(state[name])
    ]
    words = {"it does not have": missing, "this model does not have": unknown, "": reshaped}
    return [f"{word} {_some(found)}".strip() for word, found in words.items() if found]


def _kind(value: object) -> str:
    """A tensor's shape; anything goes for what a module adds of its own."""
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else "no tensor"


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + rest


def load_buffers(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Have these values in the model's buffers."""
    own = dict(unwrap(model).named_buffers())
    for name, value in buffers.items():
        own[name].copy_(value)


def fitted_to_optimizer(optimizer: Optimizer, state: Any, source: Path) -> Tree:
    """A state of this kind of optimizer over as many parameters; nothing is changed yet.

    Raises:
        CheckpointError: it is of an optimizer of another kind, or over other parameters.
    """
    here = f"{source} is not of this optimizer, a {type(optimizer).__name__}"
    try:
        groups = state["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        states = [state["state"].get(index, {}) for group in groups for index in group["params"]]
        settings = set().union(*groups) - _OF_SCHEDULERS
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{source} holds no optimizer's state") from None
    own_sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own_sizes:
        raise CheckpointError(
            f"{here}: it has {_numbers(sizes)} parameters in its groups, and this one {_numbers(own_sizes)}"
        )
    # Another torch may know a setting more, or less: of another kind is what lacks one and has another.
    lacks, knows = optimizer.defaults.keys() - settings, settings - set().union(*optimizer.param_groups)
    if lacks and knows:
        raise CheckpointError(f"{here}: it has {_some(sorted(knows))}, and not {_some(sorted(lacks))}")
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, (parameter, kept) in enumerate(zip(own, states, strict=True)):
        for name in _LIKE_PARAMETER & kept.keys():
            if (value := kept[name]) is not None and value.shape != parameter.shape:
                raise CheckpointError(
                    f"{here}: {name} of parameter {number} is {tuple(value.shape)} there, and the parameter here is "
                    f"{tuple(parameter.shape)}"
                )
    return state


_OF_SCHEDULERS = {"initial_lr", "params"}
_LIKE_PARAMETER = {"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
"""What optimizers keep that has the parameter's shape."""


def _numbers(sizes: Sequence[int]) -> str:
    return " + ".join(map(str, sizes))


def put_into_optimizer(optimizer: Optimizer, state: Any, source: Path) -> None:
    """Load a state into an optimizer over the same parameters; sharded ones take their parts.

    Raises:
        CheckpointError: it is of an optimizer of another kind, or over other parameters.
    """
    state = fitted_to_optimizer(optimizer, state, source)
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    found = {
        index: {name: _like(value, parameter) for name, value in state["state"][index].items()}
        for parameter, index in zip(own, indices, strict=True)
        if index in state["state"]
    }
    optimizer.load_state_dict({"state": found, "param_groups": state["param_groups"]})


def _like(value: Any, parameter: torch.Tensor) -> Any:
    """A copy of what an optimizer keeps for a parameter, in parts where that is."""
    if not isinstance(value, torch.Tensor):
        return value
    own = spread(value, parameter) if value.shape == parameter.shape else value
    return own.clone() if own is value else own
