"""What a shard's forward does to a model's buffers: kept apart, and applied when all shards are there.

In plain torch a forward in training mode changes the running statistics of BatchNorm at once. Here each shard has
statistics of its own, whoever computes it, and the model's move on by those of all shards, in their order.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

Statistics = dict[str, Tensor]

_STATISTICS = ("num_batches_tracked", "running_mean", "running_var")


class Buffers:
    """The buffers of a model in training, shard by shard.

    A shard's statistics are what a BatchNorm has that begins with zeros: after c forwards its momentum has made
    `new` of them, and the model's own would have become (1 - momentum) ** c * running + new. Without a momentum, where
    all forwards count the same, `new` is their mean.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [each for each in model.modules() if isinstance(each, _BatchNorm) and _tracks(each)]
        self._others = list(_others(model, self._layers))  # (name, module, key)
        self._lengths = [length for each in self._layers for length in (1, each.num_features, each.num_features)]
        self._own: dict[_BatchNorm, Statistics] = {}  # {layer: the model's, while the shard's are in}
        self._of_shard: dict[_BatchNorm, Statistics] = {}
        self._before: list[Tensor | None] = []

    @property
    def num_statistics(self) -> int:
        """How many numbers the statistics of a shard are."""
        return sum(self._lengths)

    def keep_apart(self) -> list[RemovableHandle]:
        """From now on, and until the handles are removed, forwards in training mode leave the model's alone."""
        return [
            handle
            for layer in self._layers
            for handle in (
                layer.register_forward_pre_hook(self._swap_in),
                layer.register_forward_hook(self._swap_out, always_call=True),
            )
        ]

    def begin_step(self) -> None:
        """Remember the buffers that are no statistics."""
        self._before = [_copy(module._buffers[key]) for _, module, key in self._others]

    def begin_shard(self) -> None:
        """Forwards belong to a new shard."""
        self._of_shard = {}

    def statistics(self) -> Tensor:
        """Of the present shard, (num_statistics,) in float64: each layer's number of forwards, means, variances."""
        rows = [torch.empty(0, dtype=torch.float64)]
        for layer in self._layers:
            rows += [each.reshape(-1).double() for each in (self._of_shard.get(layer) or _zeros(layer)).values()]
        return torch.cat([each.cpu() for each in rows])

    def refuse_changed(self) -> None:
        """Raise RuntimeError where a forward has changed a buffer that is no statistic, since the step began."""
        # By value: the version counter of a tensor does not see what F.batch_norm does to it.
        for (name, module, key), before in zip(self._others, self._before, strict=True):
            if not _are_same(before, module._buffers.get(key)):
                raise RuntimeError(
                    f"a forward has changed the buffer {name!r}, on this rank only: with exact=True ranks share the "
                    "running statistics of BatchNorm, and nothing else that a forward changes. Leave exact=True out, "
                    "or change the buffer after the step, on all ranks alike."
                )

    def apply(self, rows: Tensor) -> None:
        """Move the model's statistics on by those of shards, (shards, num_statistics), one after the other."""
        if not self._layers:
            return
        every = [_own(layer) for layer in self._layers]
        running = [each[name] for each in every for name in _STATISTICS[1:]]
        known = [float(each["num_batches_tracked"]) for each in every]
        for row in rows:
            parts = row.split(self._lengths)
            numbers = torch.cat(parts[::3]).tolist()  # of forwards, by layer
            new = [part.to(each) for part, each in zip(_without_counts(parts), running, strict=True)]
            factors = [_factors(*each) for each in zip(self._layers, known, numbers, strict=True)]
            torch._foreach_mul_(running, [kept for kept, _ in factors for _ in range(2)])
            torch._foreach_mul_(new, [share for _, share in factors for _ in range(2)])
            torch._foreach_add_(running, new)
            known = [sum(each) for each in zip(known, numbers, strict=True)]
        for each, number in zip(every, known, strict=True):
            each["num_batches_tracked"].fill_(number)

    def _swap_in(self, layer: nn.Module, _: object) -> None:
        assert isinstance(layer, _BatchNorm)
        if layer.training:
            self._own[layer] = _own(layer)
            layer._buffers.update(self._of_shard.setdefault(layer, _zeros(layer)))

    def _swap_out(self, layer: nn.Module, *_: object) -> None:
        assert isinstance(layer, _BatchNorm)
        if layer in self._own:
            layer._buffers.update(self._own.pop(layer))


def _tracks(layer: _BatchNorm) -> bool:
    return all(layer._buffers.get(name) is not None for name in _STATISTICS)


def _own(layer: _BatchNorm) -> Statistics:
    return {name: each for name in _STATISTICS if (each := layer._buffers[name]) is not None}  # none is: `_tracks`


def _zeros(layer: _BatchNorm) -> Statistics:
    return {name: torch.zeros_like(each) for name, each in _own(layer).items()}


def _others(model: nn.Module, layers: list[_BatchNorm]) -> Iterator[tuple[str, nn.Module, str]]:
    for path, module in model.named_modules():
        for key in module._buffers:
            if not (module in layers and key in _STATISTICS):
                yield f"{path}.{key}".removeprefix("module.").removeprefix("."), module, key


def _without_counts(parts: tuple[Tensor, ...]) -> list[Tensor]:
    return [each for index, each in enumerate(parts) if index % 3]


def _factors(layer: _BatchNorm, known: float, number: float) -> tuple[float, float]:
    """What the old statistics are multiplied by, and the new ones, after so many forwards and so many more."""
    if layer.momentum is not None:
        return (1 - layer.momentum) ** number, 1.0
    joint = known + number
    return (known / joint, number / joint) if joint else (1.0, 0.0)


def _copy(buffer: Tensor | None) -> Tensor | None:
    return buffer.clone() if buffer is not None else None


def _are_same(before: Tensor | None, after: Tensor | None) -> bool:
    if before is None or after is None:
        return before is after
    return before.dtype == after.dtype and torch.equal(_bits(before), _bits(after))


def _bits(buffer: Tensor) -> Tensor:
    """Bit by bit: a nan is equal to itself."""
    return buffer.detach().contiguous().reshape(-1).view(torch.uint8)
