"""SyncBatchNorm on real ranks against `nn.BatchNorm` in one process, on the batches joined."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as TorchKernels
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from ddpnb.train.batchnorm import SyncBatchNorm, _joint_batch_norm, _merge, _moments, convert_sync_batchnorm
from ddpnb.train.membership import join

from .ranks import on_ranks, refused

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
CHANNELS = 3
BATCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}  # by the input's dimensions


@dataclass(frozen=True)
class Case:
    """Two training steps and an evaluation."""

    split: tuple[int, ...] = (4, 2)  # each rank's batch size
    shape: tuple[int, ...] = (5, 2)  # beside batch and channels
    dtype: torch.dtype = torch.float64
    mean: float = 0.5
    memory_format: torch.memory_format = torch.contiguous_format
    options: dict[str, Any] = field(default_factory=dict)

    def batches(self) -> list[Tensor]:
        """Joint batches: of each training step, and one for evaluation."""
        random = torch.Generator().manual_seed(1)
        size = (sum(self.split), CHANNELS, *self.shape)
        values = [torch.randn(size, generator=random, dtype=torch.float64) + self.mean for _ in range(3)]
        return [batch.to(self.dtype).contiguous(memory_format=self.memory_format) for batch in values]

    def prepared(self, layer: nn.Module) -> nn.Module:
        """The layer with parameters that are neither ones nor zeros."""
        with torch.no_grad():
            for number, parameter in enumerate(layer.parameters()):
                parameter.copy_(torch.linspace(0.5, 1.5, CHANNELS) - number)
        return layer.to(self.dtype)

    def reference(self, dtype: torch.dtype | None = None) -> Outcome:
        """What one process makes of the joint batches."""
        layer = self.prepared(BATCH_NORMS[2 + len(self.shape)](CHANNELS, **self.options))
        return outcome(layer.to(dtype), [batch.to(dtype) for batch in self.batches()])

    def on_ranks(self, device: str = "cpu") -> list[Outcome]:
        """What the ranks make of their parts of them."""
        return on_ranks(len(self.split), own_outcome, self, device)


@dataclass(frozen=True)
class Outcome:
    outputs: list[Tensor]  # of both steps and of the evaluation, rows of the batch first
    input_grads: list[Tensor]
    parameter_grads: list[Tensor]
    buffers: list[Tensor]


def own_outcome(case: Case, device: str) -> Outcome:
    layer = case.prepared(SyncBatchNorm(CHANNELS, **case.options)).to(device)
    return outcome(layer, [batch.split(case.split)[join().rank].to(device) for batch in case.batches()])


def outcome(layer: nn.Module, batches: list[Tensor]) -> Outcome:
    *training, evaluation = batches
    inputs = [batch.detach().clone().requires_grad_() for batch in training]
    outputs = [layer(batch) for batch in inputs]
    # A loss that is a sum over the samples, and differs between values and steps.
    sum(((output + 0.3) ** 3).sum() * (step + 1) for step, output in enumerate(outputs)).backward()
    outputs.append(layer.eval()(evaluation))
    return Outcome(
        [output.detach().cpu() for output in outputs],
        [batch.grad.cpu() for batch in inputs],
        [parameter.grad.cpu() for parameter in layer.parameters()],
        [buffer.cpu() for buffer in layer.buffers()],
    )


def error(expected: Tensor, actual: Tensor) -> float:
    """Largest difference, in units of the largest value or of 1."""
    assert expected.shape == actual.shape
    return float((expected - actual).abs().max() / expected.abs().max().clamp(min=1)) if expected.numel() else 0.0


def largest_error(expected: Outcome, ranks: Sequence[Outcome]) -> float:
    """Outputs and input gradients joined, parameter gradients added, each rank's buffers."""
    joined = [torch.cat(parts) for parts in zip(*(rank.outputs + rank.input_grads for rank in ranks), strict=True)]
    added = [torch.stack(parts).sum(0) for parts in zip(*(rank.parameter_grads for rank in ranks), strict=True)]
    pairs = [
        *zip(expected.outputs + expected.input_grads, joined, strict=True),
        *zip(expected.parameter_grads, added, strict=True),
        *(pair for rank in ranks for pair in zip(expected.buffers, rank.buffers, strict=True)),
    ]
    return max(error(*pair) for pair in pairs)


# ---- the joint batch


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("split", [(3, 3), (4, 2), (6, 0), (0, 6), (1, 1), (1, 0, 4)])
def test_ranks_compute_what_one_process_does_with_their_batches_joined(
    split: tuple[int, ...], dtype: torch.dtype
) -> None:
    case = Case(split=split, dtype=dtype)

    assert largest_error(case.reference(), case.on_ranks()) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("shape", "memory_format"),
    [
        ((), torch.contiguous_format),
        ((7,), torch.contiguous_format),
        ((2, 3, 4), torch.contiguous_format),
        ((5, 2), torch.channels_last),
        ((2, 3, 4), torch.channels_last_3d),
    ],
)
def test_inputs_of_every_shape_and_layout_are_normalised(
    shape: tuple[int, ...], memory_format: torch.memory_format, dtype: torch.dtype
) -> None:
    case = Case(shape=shape, memory_format=memory_format, dtype=dtype)
    ranks = case.on_ranks()

    assert largest_error(case.reference(), ranks) <= TOLERANCE[dtype]
    assert all(value.is_contiguous(memory_format=memory_format) for value in ranks[0].outputs + ranks[0].input_grads)


@pytest.mark.parametrize(
    "options", [{"momentum": None}, {"momentum": 0.7, "eps": 0.1}, {"affine": False}, {"bias": False}], ids=str
)
def test_every_option_means_what_it_means_for_one_process(options: dict[str, Any]) -> None:
    case = Case(options=options)

    assert largest_error(case.reference(), case.on_ranks()) <= TOLERANCE[torch.float64]


def test_without_running_statistics_training_is_joint_and_evaluation_is_each_ranks_own() -> None:
    case = Case(options={"track_running_stats": False})
    expected, ranks = case.reference(), case.on_ranks()
    own = nn.BatchNorm2d(CHANNELS, track_running_stats=False).eval()
    evaluations = [case.prepared(own)(part).detach() for part in case.batches()[-1].split(case.split)]
    expected.outputs[-1] = torch.cat(evaluations)

    assert [] == ranks[0].buffers
    assert largest_error(expected, ranks) <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("mean", [100.0, 1e5])
def test_data_far_from_zero_lose_no_digits(mean: float) -> None:
    case = Case(mean=mean, dtype=torch.float32)

    assert largest_error(case.reference(torch.float64), case.on_ranks()) <= TOLERANCE[torch.float32]


def test_a_world_of_one_and_a_process_alone_compute_what_batchnorm_does() -> None:
    case = Case(split=(6,), dtype=torch.float32)
    expected = case.reference()

    assert 0.0 == largest_error(expected, case.on_ranks())
    assert not dist.is_initialized()
    assert 0.0 == largest_error(expected, [outcome(case.prepared(SyncBatchNorm(CHANNELS)), case.batches())])


# ---- half precision


def half_step(dtype: torch.dtype, own_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    layer = SyncBatchNorm(CHANNELS, dtype=own_dtype)
    batch = Case().batches()[0].to(dtype).split((4, 2))[join().rank].requires_grad_()
    output = layer(batch)
    output.square().sum().backward()
    return output.detach(), batch.grad, layer.weight.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("own_dtype_is_fp32", [True, False])
def test_half_precision_is_computed_in_fp32_and_rounded_once(dtype: torch.dtype, own_dtype_is_fp32: bool) -> None:
    own_dtype = torch.float32 if own_dtype_is_fp32 else dtype
    expected = nn.BatchNorm2d(CHANNELS)(Case().batches()[0].to(dtype).float()).detach()

    ranks = on_ranks(2, half_step, dtype, own_dtype)

    output = torch.cat([rank[0] for rank in ranks])
    assert (dtype, dtype, own_dtype) == tuple(value.dtype for value in ranks[0])
    torch.testing.assert_close(output.float(), expected, rtol=torch.finfo(dtype).eps / 2, atol=1e-6)


# ---- on a GPU, by torch's kernels


def test_torchs_kernels_still_take_what_they_are_given() -> None:
    taken = list(inspect.signature(TorchKernels.forward).parameters)

    assert ["input", "weight", "bias", "running_mean", "running_var", "eps"] == taken[1:7]
    assert ["momentum", "process_group", "world_size"] == taken[7:]


@pytest.mark.gpu
@pytest.mark.parametrize("split", [(4, 2), (5, 1, 2)])
def test_a_gpu_computes_what_one_process_does(split: tuple[int, ...]) -> None:
    case = Case(split=split)

    assert largest_error(case.reference(), case.on_ranks("cuda")) <= 1e-9


@pytest.mark.gpu
def test_an_empty_batch_in_half_precision_takes_part_on_a_gpu() -> None:
    case = Case(split=(6, 0), dtype=torch.bfloat16, options={"affine": False})

    full, empty = case.on_ranks("cuda")

    assert [torch.bfloat16] * 3 == [output.dtype for output in empty.outputs]
    assert largest_error(case.reference(torch.float32), [full]) <= 0.05


# ---- collectives


class Collectives(TorchDispatchMode):
    """Notes every collective that this process calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace.startswith("c10d"):
            self.names.append(function._schema.name.removeprefix("c10d::").rstrip("_"))
        return function(*args, **(kwargs or {}))


def collectives_of(act: Callable[[], Any]) -> list[str]:
    with Collectives() as seen:
        act()
    return seen.names


def count_collectives() -> dict[str, list[str]]:
    layer = SyncBatchNorm(CHANNELS)
    batch = torch.randn(2, CHANNELS, requires_grad=True)
    seen = {
        "forward": collectives_of(lambda: layer(batch)),
        "backward": collectives_of(layer(batch).sum().backward),
        "backward, input without gradient": collectives_of(layer(batch.detach()).sum().backward),
    }
    with torch.no_grad():
        seen["forward, no_grad"] = collectives_of(lambda: layer(batch))
    layer.eval()
    seen["eval"] = collectives_of(layer(batch).sum().backward) + collectives_of(lambda: layer(batch))
    unbuffered = SyncBatchNorm(CHANNELS, track_running_stats=False).eval()
    seen["eval, no statistics"] = collectives_of(lambda: unbuffered(batch))
    return seen


def test_a_step_is_one_all_gather_and_one_all_reduce_and_evaluation_none() -> None:
    expected = {
        "forward": ["allgather"],
        "backward": ["allreduce"],
        "backward, input without gradient": [],
        "forward, no_grad": ["allgather"],
        "eval": [],
        "eval, no statistics": [],
    }

    assert [expected] * 2 == on_ranks(2, count_collectives)
    assert [{act: [] for act in expected}] == on_ranks(1, count_collectives)


def statistics_in_groups() -> Tensor:
    rank = join().rank
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    layer = SyncBatchNorm(1, momentum=1.0, process_group=groups[rank // 2])
    layer(torch.tensor([[0.0], [2.0]]) + 10 * rank)
    return layer.running_mean


def test_only_the_ranks_of_the_process_group_share() -> None:
    assert [6.0, 6.0, 21.0] == [float(mean) for mean in on_ranks(3, statistics_in_groups)]


# ---- batches that are too small


def try_one_value(shape: tuple[int, ...]) -> tuple[str, Tensor]:
    layer = SyncBatchNorm(CHANNELS)
    rank = join().rank
    with pytest.raises(ValueError, match="Expected more than 1 value") as caught:
        layer(torch.zeros(1 - rank, *shape))
    return str(caught.value), layer(torch.zeros(2, *shape))


@pytest.mark.parametrize("shape", [(CHANNELS,), (CHANNELS, 1, 1)])
def test_one_value_per_channel_is_refused_on_all_ranks_in_batchnorms_words(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value") as caught:
        BATCH_NORMS[1 + len(shape)](CHANNELS)(torch.zeros(1, *shape))

    ranks = on_ranks(2, try_one_value, shape)

    assert [f"{caught.value} on all ranks together"] * 2 == [text for text, _ in ranks]
    assert all(output.eq(0).all() for _, output in ranks)  # the ranks are still in step


def test_a_joint_batch_of_nothing_changes_nothing() -> None:
    case = Case(split=(0, 0))
    expected = case.reference()

    assert 0.0 == largest_error(expected, case.on_ranks())
    assert [0.0, 1.0, 2] == [float(buffer.max()) for buffer in expected.buffers]


# ---- the formulas, without processes


@pytest.mark.parametrize("sizes", [(6,), (3, 3), (5, 0, 1), (0, 0, 6)])
@pytest.mark.parametrize("mean", [0.0, 1e6])
def test_merged_moments_are_those_of_the_whole(sizes: tuple[int, ...], mean: float) -> None:
    whole = torch.randn(6, CHANNELS, 4, dtype=torch.float64) + mean

    merged_mean, squares, count = _merge(torch.stack([_moments(part) for part in whole.split(sizes)]))

    assert 24 == count
    torch.testing.assert_close(merged_mean, whole.mean([0, 2]), rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(squares / count, whole.var([0, 2], correction=0), rtol=1e-9, atol=0)


def check_gradients() -> bool:
    join()
    torch.manual_seed(0)
    batch = torch.randn(4, CHANNELS, 2, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(CHANNELS, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def joint(*tensors: Tensor | None) -> Tensor:
        return _joint_batch_norm(*tensors, None, None, 1e-5, 0.0, dist.group.WORLD)

    return torch.autograd.gradcheck(joint, (batch, weight, bias)) and torch.autograd.gradcheck(
        joint, (batch, None, None)
    )


def test_the_gradients_are_the_derivatives() -> None:
    assert [True] == on_ranks(1, check_gradients)


# ---- in a model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.second, self.last = nn.Linear(4 * 9, 5), nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 1)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norm(self.first(images)).relu().flatten(1)
        return self.head(self.last(self.second(hidden)).tanh())


def trained(split: tuple[int, ...], wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Tensor]:
    """State after three steps on the sum over all samples, of which this rank has its part."""
    torch.manual_seed(0)
    net = Net().double()
    images = torch.randn(3, sum(split), 1, 5, 5, dtype=torch.float64)
    rank, world_size = (join().rank, join().world_size) if len(split) > 1 else (0, 1)
    model = wrap(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for batch in images:
        optimizer.zero_grad()
        loss = model(batch.split(split)[rank]).square().sum() * world_size  # DDP takes the mean over the ranks
        loss.backward()
        optimizer.step()
    return net.state_dict()


def in_ddp(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(convert_sync_batchnorm(net))


def compiled(net: nn.Module) -> nn.Module:
    return torch.compile(in_ddp(net), backend="aot_eager")


@pytest.mark.parametrize("split", [(4, 3), (7, 0), (1, 2, 4)])
def test_a_conv_net_under_ddp_learns_as_one_process_does(split: tuple[int, ...]) -> None:
    expected = trained((sum(split),), lambda net: net)

    for state in on_ranks(len(split), trained, split, in_ddp):
        assert expected.keys() == state.keys()
        assert max(error(expected[name], state[name]) for name in expected) <= TOLERANCE[torch.float64]


def test_a_compiled_model_learns_as_one_process_does() -> None:
    expected = trained((7,), lambda net: net)

    for state in on_ranks(2, trained, (4, 3), compiled):
        assert max(error(expected[name], state[name]) for name in expected) <= TOLERANCE[torch.float64]


def test_importing_the_module_does_not_import_dynamo() -> None:
    code = "import sys, ddpnb.train.batchnorm; print('torch._dynamo' in sys.modules)"

    assert "False\n" == subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


# ---- bad input


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_input_of_another_shape_or_type_is_refused_before_anything_is_sent(world_size: int) -> None:
    takes = "SyncBatchNorm(3) takes"

    assert f"{takes} (batch, 3, …), and got an input of (2, 4)" in refused(
        world_size, ValueError, SyncBatchNorm(3), torch.zeros(2, 4)
    )
    assert f"{takes} (batch, 3, …), and got an input of (3,)" in refused(
        world_size, ValueError, SyncBatchNorm(3), torch.zeros(3)
    )
    assert f"{takes} floating-point numbers, and got torch.int64: pass input.float()" in refused(
        world_size, TypeError, SyncBatchNorm(3), torch.zeros(2, 3, dtype=torch.int64)
    )


# ---- conversion


def test_the_constructor_is_torchs() -> None:
    ours, torchs = (inspect.signature(kind).parameters.values() for kind in (SyncBatchNorm, nn.SyncBatchNorm))

    assert [(p.name, p.kind, p.default) for p in torchs] == [(p.name, p.kind, p.default) for p in ours]


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_conversion_keeps_all_that_a_layer_has(kind: type[nn.Module]) -> None:
    layer = kind(CHANNELS, eps=0.1, momentum=None, dtype=torch.float64).eval()
    group = object() if kind is nn.SyncBatchNorm else None
    if group:
        layer.process_group = group
    parameters, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())

    converted = convert_sync_batchnorm(layer)

    assert SyncBatchNorm is type(converted)
    assert (0.1, None, False, group) == (converted.eps, converted.momentum, converted.training, converted.process_group)
    assert list(buffers) == ["running_mean", "running_var", "num_batches_tracked"]
    assert all(parameters[name] is parameter for name, parameter in converted.named_parameters())
    assert all(buffers[name] is buffer for name, buffer in converted.named_buffers())


def test_every_layer_of_a_model_is_converted_and_a_shared_one_stays_shared() -> None:
    norm = nn.BatchNorm1d(2)
    model = nn.Sequential(norm, nn.Sequential(nn.Linear(2, 2), norm), nn.InstanceNorm1d(2), SyncBatchNorm(2))
    names, children = list(model.state_dict()), list(model)

    converted = convert_sync_batchnorm(model)

    assert converted is model
    assert [SyncBatchNorm, nn.Sequential, nn.InstanceNorm1d, SyncBatchNorm] == [type(child) for child in model]
    assert model[0] is model[1][1]
    assert names == list(model.state_dict())
    assert all(before is after for before, after in zip(children, model, strict=True))


def test_torchs_own_layers_alone_can_be_converted() -> None:
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2), nn.SyncBatchNorm(2)), nn.SyncBatchNorm)

    assert [nn.BatchNorm1d, SyncBatchNorm] == [type(layer) for layer in model]


def test_a_converted_layer_can_be_copied_and_loads_a_batchnorms_state() -> None:
    layer = nn.BatchNorm1d(2)
    layer(torch.randn(3, 2))

    copied = copy.deepcopy(convert_sync_batchnorm(nn.BatchNorm1d(2)))

    assert "<All keys matched successfully>" == str(copied.load_state_dict(layer.state_dict()))
    assert layer.running_mean.equal(copied.running_mean)


class WithActivation(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.LazyBatchNorm2d(), "call the model on one batch first"),
        (nn.LazyBatchNorm2d(affine=False, track_running_stats=False), "call the model on one batch first"),
        (WithActivation(2), "forward"),
        (weight_norm(nn.BatchNorm2d(2), dim=None), "parametrization"),
    ],
)
def test_a_layer_that_would_not_survive_is_named_and_the_model_is_as_it_was(layer: nn.Module, reason: str) -> None:
    model = nn.Sequential(nn.BatchNorm2d(2), layer)

    with pytest.raises(ValueError, match=rf"^'1', a {type(layer).__name__}, .*{reason}"):
        convert_sync_batchnorm(model)
    assert nn.BatchNorm2d is type(model[0])


def test_a_lazy_layer_that_has_seen_a_batch_is_converted() -> None:
    layer = nn.LazyBatchNorm1d()
    layer(torch.randn(3, 2))

    assert SyncBatchNorm is type(convert_sync_batchnorm(layer))
