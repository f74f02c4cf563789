"""Batch normalisation over the joint batch of all ranks, on the CPU as well.

`nn.SyncBatchNorm` refuses CPU tensors as soon as there is a process group, and DDP refuses the layer itself there, by
its type. The one here computes the same over gloo, and on a GPU it calls torch's own kernels.

Runs in: worker (and wherever else the model is called)
"""

from __future__ import annotations

from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import Function, once_differentiable
from torch.nn.modules._functions import SyncBatchNorm as _TorchKernels
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from ..context import stopwatch


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation in which each rank's batch is a part of one joint batch.

        layer = SyncBatchNorm(8)
        output = layer(input)              # (batch, 8, …), the batch may differ between ranks, or be empty

    N ranks compute what one process would with `nn.BatchNorm2d(8)(torch.cat(inputs))`: outputs, gradients and running
    statistics. Parameter gradients are each rank's own share of the sum; DDP reduces them like all others. Half
    precision is computed in fp32 and given back in the input's type. Names in the state dict are BatchNorm's.

    In training mode every forward is one all_gather, under `torch.no_grad()` too, and every backward one all_reduce:
    all ranks have to call the layer equally often, those with an empty batch included. In eval mode a rank is on its
    own: with running statistics there is nothing to share, and without them its own batch's are used, as in torch's
    layer. With a world of one, or no process group, this is `nn.BatchNorm`. `torch.compile` leaves a layer that shares
    out of its graphs. Gradients of gradients are refused there.

    Gradient accumulation does not enlarge the batch that is normalised: each micro-batch, joint over the ranks, has
    statistics of its own (https://github.com/pytorch/pytorch/issues/46516).

    Args:
        num_features: channels, the input's second dimension.
        eps: added to the variance.
        momentum: weight of the new batch in the running statistics, running = (1 - momentum) * running + momentum *
            new; it has nothing to do with an optimizer's. None: all batches since the last reset weigh the same.
        affine: learn a weight and a bias for each channel.
        track_running_stats: keep a running mean and (unbiased) variance for eval mode.
        process_group: ranks whose batches are joined; None: all.
        device: where parameters and buffers are made.
        dtype: their type.
        bias: False: learn a weight alone.

    Raises:
        ValueError: the input is not of shape (batch, num_features, …), or in training mode the joint batch has one
            value per channel, which has no variance (this on every rank; torch's GPU kernels do not check it).
        TypeError: the input has no floating-point type.

    Source: torch/nn/modules/_functions.py, `SyncBatchNorm`.
    """

    process_group: dist.ProcessGroup | None = None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias)
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:
        """Normalise each channel of `input` (batch, num_features, …); the output has its shape and type."""
        group = self._group() if self.training else None
        return super().forward(input) if group is None else self._normalise_jointly(input, group)

    def _group(self) -> dist.ProcessGroup | None:
        if not dist.is_initialized():
            return None
        group = dist.group.WORLD if self.process_group is None else self.process_group
        return group if dist.get_world_size(group) > 1 else None

    # Not in a compiled graph: a compiler may reorder collectives, and ranks whose batches differ in size compile apart,
    # so that they could meet in different ones. The public torch.compiler.disable would import torch._dynamo together
    # with this module; torch's own does so at the first call, when DDP has done it long since.
    @_disable_dynamo
    def _normalise_jointly(self, input: Tensor, group: dist.ProcessGroup) -> Tensor:
        self._check_input_dim(input)
        running_mean, running_var, factor = None, None, 0.0
        if self.track_running_stats:
            running_mean, running_var, factor = self.running_mean, self.running_var, self._count_batch()
        return _joint_batch_norm(input, self.weight, self.bias, running_mean, running_var, self.eps, factor, group)

    def _count_batch(self) -> float:
        """Count one more batch; its weight in the running statistics."""
        assert self.num_batches_tracked is not None  # there whenever statistics are tracked
        self.num_batches_tracked.add_(1)
        return 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    def _check_input_dim(self, input: Tensor) -> None:
        name = f"SyncBatchNorm({self.num_features})"
        if input.dim() < 2 or input.size(1) != self.num_features:
            raise ValueError(f"{name} takes (batch, {self.num_features}, …), and got an input of {tuple(input.shape)}")
        if not input.is_floating_point():
            raise TypeError(f"{name} takes floating-point numbers, and got {input.dtype}: pass input.float()")


def convert_sync_batchnorm(module: nn.Module, kind: type[_BatchNorm] = _BatchNorm) -> nn.Module:
    """Turn every batch normalisation of a model, or the one that it is, into a `SyncBatchNorm`; return the model.

        model = convert_sync_batchnorm(model)       # before DDP wraps it

    stands for `nn.SyncBatchNorm.convert_sync_batchnorm(model)`, and also converts an `nn.SyncBatchNorm`. A layer stays
    the same object and changes its class, as a lazy module does when it learns its shape: its parameters, buffers,
    mode, hooks and process group are untouched, and a layer used in two places remains one.

    Args:
        module: a model, or one layer.
        kind: which layers: BatchNorm1d, 2d and 3d and torch's SyncBatchNorm; `nn.SyncBatchNorm`: these only.

    Raises:
        ValueError: a layer is a lazy one that has seen no batch yet, or one with a `forward` or a parametrization of
            its own, which would be lost. The model is as it was.
    """
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, kind) and not isinstance(layer, SyncBatchNorm)
    }
    for name, layer in layers.items():
        _check_convertible(name, layer)
    for layer in layers.values():
        layer.__class__ = SyncBatchNorm
    return module


def _check_convertible(name: str, layer: _BatchNorm) -> None:
    kind = type(layer)
    where = f"{name!r}, a {kind.__name__}," if name else f"this {kind.__name__}"
    if isinstance(layer, LazyModuleMixin):
        raise ValueError(
            f"{where} does not know its number of channels yet, and cannot become a SyncBatchNorm: "
            "call the model on one batch first"
        )
    if kind.forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward) or is_parametrized(layer):
        raise ValueError(
            f"{where} has a forward() or a parametrization of its own, which would be lost in a SyncBatchNorm: "
            "derive its class from ddpnb.SyncBatchNorm, or parametrize the converted layer"
        )


# ---- one joint batch
#
# Statistics, vectors of one number per channel, are float64: they cost nothing beside the batch, a count stays exact
# beyond 2^24, and data with a mean of 100 keeps the digits that an fp32 mean would round away.


def _joint_batch_norm(
    input: Tensor,  # (batch, channels, …)
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    eps: float,
    factor: float,
    group: dist.ProcessGroup,
) -> Tensor:
    """`F.batch_norm` in training mode, over the batches of a group; `factor` is the new batch's weight there."""
    world_size = dist.get_world_size(group)
    output: Tensor
    if input.is_cuda:
        # An empty batch takes part in fp32: torch would send its zeros in half precision to peers that speak fp32.
        sent = input if input.numel() else _widened(input)
        output = _TorchKernels.apply(sent, weight, bias, running_mean, running_var, eps, factor, group, world_size)
        return output.to(input.dtype)
    local = _moments(input)
    parts = [torch.empty_like(local) for _ in range(world_size)]
    began = monotonic()
    dist.all_gather(parts, local, group=group)
    stopwatch().waited(began)
    mean, squares, count = _merge(torch.stack(parts))
    if count == 1:
        raise ValueError(
            "Expected more than 1 value per channel when training, "
            f"got input size {torch.Size([1, *input.shape[1:]])} on all ranks together"
        )
    if running_mean is not None and running_var is not None and count:
        running_mean.copy_(torch.lerp(running_mean.double(), mean, factor))
        running_var.copy_(torch.lerp(running_var.double(), squares / (count - 1), factor))
    inverse_std = (squares / max(count, 1) + eps).rsqrt()
    output = _Normalise.apply(input, weight, bias, mean, inverse_std, count, group)  # type: ignore[no-untyped-call]
    return output


def _moments(input: Tensor) -> Tensor:
    """Each channel's mean and sum of squared deviations from it, and how many values: (2 * channels + 1,)."""
    count = input.size(0) * input.shape[2:].numel()
    if not count:
        return input.new_zeros(2 * input.size(1) + 1, dtype=torch.float64)
    values = _widened(input.detach())
    dims = _all_but_channels(values)
    rough = values.mean(dims)
    deviations = values - _along_channels(rough, values)
    rounding = deviations.mean(dims).double()  # how far the true mean is from the rough one
    squares = deviations.square().sum(dims).double() - count * rounding.square()
    return torch.cat([rough.double() + rounding, squares, squares.new_tensor([count])])


def _merge(parts: Tensor) -> tuple[Tensor, Tensor, int]:
    """Moments of the joint batch from those of its parts, (parts, 2 * channels + 1): mean, squared deviations, count.

    The difference E[x²] - E[x]² would lose its digits where the mean is large beside the deviation; no difference is
    taken here but of means.

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """
    channels = parts.size(1) // 2
    means, squares, counts = parts.split([channels, channels, 1], dim=1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count.clamp(min=1)
    return mean, (squares + counts * (means - mean).square()).sum(0), int(count)


class _Normalise(Function):
    """weight * (input - mean) * inverse_std + bias, where mean and inverse_std come from inputs of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,  # (batch, channels, …)
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        inverse_std: Tensor,
        count: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, inverse_std)
        ctx.count, ctx.group = count, group
        deviations, rounding = _deviations(input, mean)
        scale = inverse_std if weight is None else inverse_std * weight
        offset = -rounding * scale if bias is None else bias - rounding * scale
        output = torch.addcmul(_along_channels(offset, deviations), deviations, _along_channels(scale, deviations))
        return output.to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse_std = ctx.saved_tensors
        deviations, rounding = _deviations(input, mean)
        grad = grad_output.to(deviations.dtype)
        dims = _all_but_channels(grad)
        grad_bias = grad.sum(dims).double()
        covariance = (grad * deviations).sum(dims).double() - rounding * grad_bias  # Σ grad * (input - mean)
        grad_input = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([grad_bias, covariance])  # a copy: the parameters' gradients stay this rank's own
            began = monotonic()
            dist.all_reduce(sums, group=ctx.group)
            stopwatch().waited(began)
            mean_grad, mean_covariance = sums / max(ctx.count, 1)
            scale = inverse_std if weight is None else inverse_std * weight
            slope = scale * inverse_std.square() * mean_covariance
            offset = rounding * slope - scale * mean_grad
            # scale * (grad - mean_grad) - slope * (input - mean)
            grad_input = torch.addcmul(_along_channels(offset, grad), grad, _along_channels(scale, grad)).addcmul_(
                deviations, _along_channels(slope, grad), value=-1
            )
        # All are wider than what they belong to; autograd converts them.
        return (
            grad_input,
            covariance * inverse_std if ctx.needs_input_grad[1] else None,
            grad_bias if ctx.needs_input_grad[2] else None,
            *(None, None, None, None),
        )


def _deviations(input: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """input - mean in the input's own precision, and what rounding the mean to it leaves to be subtracted yet."""
    values = _widened(input)
    rough = mean.to(values.dtype)
    return values - _along_channels(rough, values), mean - rough


def _widened(input: Tensor) -> Tensor:
    return input.to(torch.promote_types(input.dtype, torch.float32))


def _all_but_channels(input: Tensor) -> list[int]:
    return [0, *range(2, input.dim())]


def _along_channels(vector: Tensor, like: Tensor) -> Tensor:
    """(channels,) as (1, channels, 1, …), so that it broadcasts over `like`, and of its type."""
    return vector.to(like.dtype).view(-1, *[1] * (like.dim() - 2))
