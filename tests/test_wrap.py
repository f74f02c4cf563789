"""Wrapping: states between all of its kinds, own loops against torch's DDP, options and what is refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ddpnb
from ddpnb.train.ballot import NUM_NUMBERS

from .ranks import on_ranks, refused

pytestmark = pytest.mark.usefixtures("group_of_one")

DIM = 6

State = dict[str, torch.Tensor]


class Net(nn.Module):
    """With buffers, and a name that looks like a wrapper's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, 8)
        self.norm = nn.BatchNorm1d(8)
        self.module = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.module(self.norm(self.first(x)).tanh())
        return output


def net(seed: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]


def batches(
    num: int, dtype: torch.dtype = torch.float32, size: int = 4, rank: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A rank's inputs (size, DIM) and classes (size,); None: this one's."""
    generator = torch.Generator().manual_seed(7 + (ddpnb.rank() if rank is None else rank))
    for _ in range(num):
        inputs = torch.randn(size, DIM, generator=generator, dtype=torch.float64)
        yield inputs.to(dtype), torch.randint(3, (size,), generator=generator)


def joint_batches(num: int, sizes: tuple[int, int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What two ranks have together."""
    for (inputs, targets), (others, other_targets) in zip(
        batches(num, size=sizes[0], rank=0), batches(num, size=sizes[1], rank=1), strict=True
    ):
        yield torch.cat([inputs, others]), torch.cat([targets, other_targets])


def cloned(state: dict[str, Any]) -> State:
    return {name: value.clone() for name, value in state.items()}


def differing(expected: State, actual: State) -> list[str]:
    """Names of what is not the same bit by bit."""
    assert list(expected) == list(actual)
    return [name for name in expected if not torch.equal(expected[name], actual[name])]


def farthest(expected: State, actual: State) -> float:
    """The largest difference between two states."""
    assert expected.keys() == actual.keys()
    return max(float((expected[name] - actual[name]).abs().max()) for name in expected)


class Stack(nn.Module):
    """Layers before, within and after blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).relu()
        return self.last(x)


def _half_stack() -> tuple[torch.dtype, torch.dtype]:
    model = ddpnb.wrap(Stack(), "fsdp", precision="bf16")
    outputs = model(torch.ones(2, DIM))
    outputs.sum().backward()
    gradient = ddpnb.unwrap(model).blocks[0].weight.grad  # type: ignore[index, union-attr]
    assert gradient is not None
    return outputs.dtype, gradient.dtype


def test_layers_before_and_after_sharded_blocks_compute_in_half_precision_too() -> None:
    assert 2 * [(torch.float32, torch.float32)] == on_ranks(2, _half_stack)


# ---- states


KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "dp": DataParallel,  # wrap(model, "dp") is for a world of one
    "ddp": ddpnb.wrap,
    "compile": compiled,
    "ddp(compile)": lambda model: ddpnb.wrap(compiled(model)),
    "compile(ddp)": lambda model: compiled(ddpnb.wrap(model)),
    "fsdp": lambda model: ddpnb.wrap(model, "fsdp"),
    "ddp(bf16)": lambda model: ddpnb.wrap(model, precision="bf16"),
    "compile(fsdp)": lambda model: compiled(ddpnb.wrap(model, "fsdp")),
    "torch's own ddp": DistributedDataParallel,
}


def _all_cells() -> list[str]:
    """What went wrong, by cell."""
    wrong = []
    for source, wrap_source in KINDS.items():
        model = net(1)
        model(torch.randn(5, DIM))  # the buffers move
        whole = cloned(model.state_dict())
        giver = wrap_source(model)
        for raw in (False, True):
            state = giver.state_dict() if raw else ddpnb.state_dict(giver)
            if not raw and differing(whole, state):
                wrong.append(f"state_dict({source})")
            for target, wrap_target in KINDS.items():
                taker = wrap_target(net(2))
                ddpnb.load_state_dict(taker, state)
                if differing(whole, ddpnb.state_dict(taker)):
                    wrong.append(f"{source} -> {target}, raw {raw}")
    return wrong


def test_a_state_goes_from_any_wrapping_into_any_other() -> None:
    assert [[], []] == on_ranks(2, _all_cells)


class Chain(nn.Module):
    """A wrapper of somebody's own, with a weight of its own: `scale`, `module.scale`, `module.module.scale` …"""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(1))
        self.module = Chain(depth - 1) if depth else nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x) * self.scale  # type: ignore[no-any-return]


class Original(nn.Module):
    """Has a part that is called as torch.compile calls what it has taken."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(x)  # type: ignore[no-any-return]


class Counting(nn.Module):
    """Keeps what is no tensor in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.counts = nn.Linear(DIM, 3), {"calls": 0}

    def get_extra_state(self) -> dict[str, int]:
        return self.counts

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.counts = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts["calls"] += 1
        return self.last(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [lambda: Chain(2), lambda: Chain(0), Original, lambda: nn.Sequential(Original())])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "fsdp" not in kind])
def test_a_part_that_is_called_like_a_wrapper_keeps_its_name(make: Callable[[], nn.Module], kind: str) -> None:
    bare, other = make(), make()
    whole = cloned(bare.state_dict())
    wrapped = KINDS[kind](bare)
    ddpnb.load_state_dict(other, wrapped.state_dict())

    assert ddpnb.unwrap(wrapped) is bare
    assert [] == differing(whole, ddpnb.state_dict(wrapped))
    assert [] == differing(whole, other.state_dict())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "plain"])
def test_a_state_is_what_plain_torch_loads_and_does_not_follow_the_training(kind: str) -> None:
    model = KINDS[kind](net())
    before = ddpnb.state_dict(model)
    kept = cloned(before)
    one_by_one(model, sgd(model), batches(2))
    after = ddpnb.state_dict(model)
    plain = net(5)
    plain.load_state_dict(after, strict=True)

    assert [] == differing(kept, before)
    assert {"first.weight", "module.bias", "norm.running_mean"} <= set(differing(before, after))
    assert {("cpu", torch.Tensor, False)} == {(v.device.type, type(v), v.requires_grad) for v in after.values()}
    assert [] == differing(after, plain.state_dict())


def test_a_state_that_is_no_tensor_is_a_copy_too() -> None:
    model = ddpnb.wrap(Counting())
    state = ddpnb.state_dict(model)
    model(torch.ones(1, DIM))

    assert {"calls": 0} == state["_extra_state"]


def test_a_model_with_compiled_blocks_has_the_names_of_the_bare_one() -> None:
    bare, model, other = nn.Sequential(net(1), net(2)), nn.Sequential(net(3), net(4)), nn.Sequential(net(5), net(6))
    for part in (0, 1):
        model[part] = compiled(model[part])
    wrapped = ddpnb.wrap(model)
    ddpnb.load_state_dict(wrapped, bare.state_dict())
    other.load_state_dict(ddpnb.state_dict(wrapped))

    assert [] == differing(bare.state_dict(), other.state_dict())


@pytest.mark.parametrize("change", [lambda state: state.pop("first.weight"), lambda state: state.update(more=1)])
def test_a_state_of_something_else_is_refused(change: Callable[[State], Any]) -> None:
    state = ddpnb.state_dict(net())
    change(state)

    with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key"):
        ddpnb.load_state_dict(ddpnb.wrap(net()), state)


# ---- an own loop, against torch's DDP


class TwoHeads(nn.Module):
    """Two parts that have nothing in common, and a buffer, which DDP sends around in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1))
        self.one, self.two = nn.Linear(DIM, 3), nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x), self.two(x)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.use_reentrant = nn.Linear(DIM, 8), nn.Linear(8, 3), use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.first, x.requires_grad_(), use_reentrant=self.use_reentrant)
        return checkpoint(self.second, hidden.tanh(), use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.words(x.abs().long().clamp(max=9)).sum(1))  # type: ignore[no-any-return]


Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
Body = Callable[[nn.Module, torch.optim.Optimizer, Batches], None]


def one_by_one(model: nn.Module, optimizer: torch.optim.Optimizer, given: Batches) -> None:
    for inputs, targets in given:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def gradients_kept_as_zeros(model: nn.Module, optimizer: torch.optim.Optimizer, given: Batches) -> None:
    for inputs, targets in given:
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def accumulating(model: Any, optimizer: torch.optim.Optimizer, given: Batches) -> None:
    for number, (inputs, targets) in enumerate(given):
        is_last = number % 3 == 2
        with contextlib.nullcontext() if is_last else model.no_sync():
            F.cross_entropy(model(inputs), targets).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def two_forwards_before_a_backward(model: nn.Module, optimizer: torch.optim.Optimizer, given: Batches) -> None:
    for (inputs, targets), (others, other_targets) in zip(given, given, strict=False):
        optimizer.zero_grad()
        first, second = model(inputs), model(others)
        (F.cross_entropy(first, targets) + F.cross_entropy(second, other_targets)).backward()
        optimizer.step()


def a_forward_without_gradients_between(model: nn.Module, optimizer: torch.optim.Optimizer, given: Batches) -> None:
    for inputs, targets in given:
        optimizer.zero_grad()
        outputs = model(inputs)
        with torch.no_grad():
            teacher = model(inputs * 1.1)
        (F.cross_entropy(outputs, targets) + F.mse_loss(outputs, teacher)).backward()
        optimizer.step()


def a_forward_that_is_left_without_a_backward(model: Any, optimizer: torch.optim.Optimizer, given: Batches) -> None:
    for number, (inputs, targets) in enumerate(given):
        optimizer.zero_grad()
        model(inputs)
        with model.no_sync() if number % 2 else contextlib.nullcontext():
            F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def a_gradient_penalty(model: nn.Module, optimizer: torch.optim.Optimizer, given: Batches) -> None:
    for inputs, targets in given:
        optimizer.zero_grad()
        outputs = model(inputs.requires_grad_())
        (slope,) = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
        (F.cross_entropy(outputs, targets) + slope.norm()).backward()
        optimizer.step()


def a_backward_for_each_part(model: nn.Module, optimizer: torch.optim.Optimizer, given: Batches) -> None:
    for inputs, targets in given:
        optimizer.zero_grad()
        first, second = model(inputs)
        F.cross_entropy(first, targets).backward()
        F.cross_entropy(second, targets).backward()
        optimizer.step()


def one_part_at_a_time(model: nn.Module, optimizer: torch.optim.Optimizer, given: Batches) -> None:
    for number, (inputs, targets) in enumerate(given):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs)[number % 2], targets).backward()
        optimizer.step()


def two_backwards_through_one_graph(model: nn.Module, optimizer: torch.optim.Optimizer, given: Batches) -> None:
    for inputs, targets in given:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()


def an_error_in_a_forward_that_is_caught(model: nn.Module, optimizer: torch.optim.Optimizer, given: Batches) -> None:
    for inputs, targets in given:
        optimizer.zero_grad()
        with contextlib.suppress(RuntimeError):
            model(inputs[:, 1:])
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def ranks_with_uneven_batches(model: Any, optimizer: torch.optim.Optimizer, given: Batches) -> None:
    with model.join(divide_by_initial_world_size=False):
        one_by_one(model, optimizer, given)
        if ddpnb.rank():
            one_by_one(model, optimizer, batches(3, next(model.parameters()).dtype))


def a_hook_of_ones_own(model: Any, optimizer: torch.optim.Optimizer, given: Batches) -> None:
    model.register_comm_hook(None, fp16_compress_hook)
    one_by_one(model, optimizer, given)


def a_clipped_norm(model: nn.Module, optimizer: torch.optim.Optimizer, given: Batches) -> None:
    for inputs, targets in given:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def compiled_around(model: nn.Module, optimizer: torch.optim.Optimizer, given: Batches) -> None:
    one_by_one(compiled(model), optimizer, given)


def a_copy(model: nn.Module, optimizer: torch.optim.Optimizer, given: Batches) -> None:
    one_by_one(model, optimizer, given)
    copied = copy.deepcopy(model)
    one_by_one(copied, sgd(copied), batches(3, next(model.parameters()).dtype))
    one_by_one(model, optimizer, batches(2, next(model.parameters()).dtype))
    model.load_state_dict(copied.state_dict())


def a_pickled_copy(model: nn.Module, optimizer: torch.optim.Optimizer, given: Batches) -> None:
    one_by_one(model, optimizer, given)
    copied = pickle.loads(pickle.dumps(model))
    one_by_one(copied, sgd(copied), batches(3, next(model.parameters()).dtype))
    model.load_state_dict(copied.state_dict())


def _ignoring_its_first_weight() -> nn.Module:
    model = net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["first.weight"])
    return model


def _frozen_first() -> nn.Module:
    model = net()
    model.first.requires_grad_(False)
    return model


def _of_two_dtypes() -> nn.Module:
    torch.manual_seed(0)

    class Up(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.double()

    return nn.Sequential(nn.Linear(DIM, 8), Up(), nn.Linear(8, 3, dtype=torch.float64))


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return made


OWN_LOOPS: list[tuple[Body, Callable[[], nn.Module], dict[str, Any]]] = [
    (one_by_one, net, {}),
    (one_by_one, net, {"gradient_as_bucket_view": True}),
    (one_by_one, net, {"bucket_cap_mb": 0.0001}),
    (one_by_one, net, {"static_graph": True}),
    (one_by_one, net, {"find_unused_parameters": True}),
    (one_by_one, net, {"forward_sync_buffers": False}),
    (one_by_one, lambda: net(dtype=torch.float64), {}),
    (one_by_one, _ignoring_its_first_weight, {}),
    (one_by_one, _frozen_first, {}),
    (one_by_one, _of_two_dtypes, {}),
    (one_by_one, _seeded(Sparse), {}),
    (one_by_one, _seeded(lambda: Checkpointed(True)), {}),
    (one_by_one, _seeded(lambda: Checkpointed(False)), {}),
    (one_by_one, lambda: compiled(net()), {}),
    (gradients_kept_as_zeros, net, {}),
    (gradients_kept_as_zeros, net, {"gradient_as_bucket_view": True}),
    (accumulating, net, {}),
    (accumulating, lambda: net(dtype=torch.float64), {"gradient_as_bucket_view": True}),
    (two_forwards_before_a_backward, net, {"forward_sync_buffers": False}),
    (a_forward_without_gradients_between, net, {}),
    (a_forward_that_is_left_without_a_backward, net, {}),
    (a_gradient_penalty, net, {}),
    (a_gradient_penalty, lambda: net(dtype=torch.float64), {}),
    (a_backward_for_each_part, _seeded(TwoHeads), {}),
    (one_part_at_a_time, _seeded(TwoHeads), {"find_unused_parameters": True}),
    (two_backwards_through_one_graph, net, {}),
    (an_error_in_a_forward_that_is_caught, net, {}),
    (ranks_with_uneven_batches, net, {}),
    (a_hook_of_ones_own, net, {}),
    (a_clipped_norm, net, {}),
    (compiled_around, net, {}),
    (a_copy, net, {}),
    (a_copy, net, {"find_unused_parameters": True}),
    (a_pickled_copy, net, {"gradient_as_bucket_view": True}),
]


def _as_torch(body: Body, make: Callable[[], nn.Module], options: dict[str, Any]) -> list[str]:
    """What is not as torch's DDP has it."""
    results = []
    for wrapping in (DistributedDataParallel, ddpnb.wrap):
        model = wrapping(make(), **options)
        before = cloned(model.state_dict())
        body(model, sgd(model), batches(6, next(model.parameters()).dtype))
        results.append(cloned(model.state_dict()))
        assert differing(before, results[-1])
    return differing(*results)


def _all_own_loops() -> dict[str, list[str]]:
    return {
        f"{number}. {body.__name__} {options}": _as_torch(body, make, options)
        for number, (body, make, options) in enumerate(OWN_LOOPS)
    }


def test_an_own_loop_has_the_bits_of_torchs_ddp() -> None:
    for differences in on_ranks(2, _all_own_loops):
        assert len(OWN_LOOPS) == len(differences)
        assert {} == {name: each for name, each in differences.items() if each}


# ---- nothing of the ballot shows


def test_a_wrapped_model_shows_what_torchs_ddp_shows() -> None:
    shown = []
    for wrapping in (DistributedDataParallel, ddpnb.wrap):
        model: Any = wrapping(net())
        one_by_one(model, sgd(model), batches(2))
        shown.append(
            {
                "parameters": [(name, tuple(value.shape)) for name, value in model.named_parameters()],
                "without names": [tuple(value.shape) for value in model.parameters()],
                "within": [name for name, _ in model.module.named_parameters()],
                "of the root itself": [name for name, _ in model.module.named_parameters(recurse=False)],
                "buffers": [name for name, _ in model.named_buffers()],
                "state": list(model.state_dict()),
                "optimizer": [len(group["params"]) for group in sgd(model).param_groups],
                "norm": float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
                "text": str(model).replace("Replica", "DistributedDataParallel"),
            }
        )

    assert shown[0] == shown[1]
    assert isinstance(model, DistributedDataParallel)
    assert model.module is ddpnb.unwrap(model)


def test_a_wrapping_that_is_gone_leaves_nothing_with_the_bare_model() -> None:
    bare = net()
    for _ in range(3):
        model = ddpnb.wrap(bare)
        one_by_one(model, sgd(model), batches(2))
    gone = weakref.ref(model)
    assert bare.first.weight._post_accumulate_grad_hooks
    del model
    gc.collect()

    assert gone() is None
    assert not bare.first.weight._post_accumulate_grad_hooks


# ---- with a Loop


class Listing(nn.Module):
    """Says by itself what its parameters are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, value in self.inner.named_parameters():
            yield f"inner.{name}", value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def _scripted(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return ddpnb.wrap(torch.jit.script(model))  # type: ignore[no-untyped-call]


def _with_own_hook(model: nn.Module) -> nn.Module:
    def hook(_, bucket):  # type: ignore[no-untyped-def]  # torch takes no annotation that is a text
        """Right for gradients, which are small here, and for nothing else that may be in a bucket."""
        whole = bucket.buffer().clamp(-5, 5) / dist.get_world_size()
        return dist.all_reduce(whole, async_op=True).get_future().then(lambda done: done.value()[0])  # type: ignore

    wrapped: Any = ddpnb.wrap(model)
    wrapped.register_comm_hook(None, hook)
    return wrapped  # type: ignore[no-any-return]


def _interrupted_before_its_numbers_were_counted(model: nn.Module) -> nn.Module:
    wrapped: Any = ddpnb.wrap(model)
    wrapped.ballot.put(torch.full((NUM_NUMBERS,), 3.0))
    wrapped(torch.ones(2, DIM)).sum().backward()
    return wrapped  # type: ignore[no-any-return]


LOOPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "wrapped": ddpnb.wrap,
    "copied": lambda model: copy.deepcopy(ddpnb.wrap(model)),
    "pickled": lambda model: pickle.loads(pickle.dumps(ddpnb.wrap(model))),
    "with a hook of one's own": _with_own_hook,
    "as a script": _scripted,
    "with parameters() of its own": lambda model: ddpnb.wrap(Listing(model)),
    "after an interrupt": _interrupted_before_its_numbers_were_counted,
}


def _looped(model: nn.Module) -> list[torch.Tensor]:
    loop = ddpnb.Loop(model, sgd(model), list(batches(4, size=3 + ddpnb.rank())), epochs=1, accumulate=2, checks=False)
    for inputs, targets in loop:
        loop.update(F.cross_entropy(model(inputs), targets))
    assert loop.samples == 4 * (3 + 4)
    return list(ddpnb.state_dict(model).values())


def _looped_alone(model: nn.Module) -> list[torch.Tensor]:
    given = joint_batches(4, (3, 4))
    windows = (
        (torch.cat([inputs, others]), torch.cat([targets, other_targets]))
        for (inputs, targets), (others, other_targets) in zip(given, given, strict=True)
    )
    one_by_one(model, sgd(model), windows)
    return list(model.state_dict().values())


def test_a_loop_is_exact_however_its_model_came_to_be() -> None:
    def distances() -> dict[str, float]:
        found = {}
        for name, wrapping in LOOPED.items():
            torch.manual_seed(0)
            model = nn.Linear(DIM, 3)
            expected = _looped_alone(copy.deepcopy(model))
            actual = _looped(wrapping(model))
            found[name] = max(float((want - have).abs().max()) for want, have in zip(expected, actual, strict=True))
        return found

    for found in on_ranks(2, distances):
        assert list(LOOPED) == list(found)
        assert {} == {name: distance for name, distance in found.items() if not distance <= 1e-6}


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
def test_a_batch_is_skipped_whatever_ran_before(options: dict[str, Any]) -> None:
    def skipping() -> list[tuple[int, State]]:
        found = []
        for accumulate, calls in ((1, False), (1, True), (2, False), (2, True)):
            model = ddpnb.wrap(_seeded(TwoHeads)(), **options)
            one_part_at_a_time(model, sgd(model), batches(2 if options else 0))
            loop = ddpnb.Loop(model, sgd(model), list(batches(6)), epochs=1, accumulate=accumulate, checks=False)
            for number, (inputs, targets) in enumerate(loop):
                skips = number % 3 == ddpnb.rank()
                first, second = model(inputs) if calls or not skips else (inputs, inputs)
                if skips:
                    loop.skip()
                elif options:
                    loop.update(F.cross_entropy(first, targets))
                else:
                    loop.update(F.cross_entropy(first + second, targets))
            found.append((loop.step, ddpnb.state_dict(model)))
        return found

    for (step, state), (other_step, other) in zip(*on_ranks(2, skipping), strict=True):
        assert step == other_step in (3, 6)
        assert [] == differing(state, other)


# ---- strategies


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x) * self.gate(x).sigmoid()  # type: ignore[no-any-return]


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)  # type: ignore[no-any-return]


def deep(seed: int) -> Deep:
    torch.manual_seed(seed)
    return Deep()


def test_a_sharded_model_trains_as_one_process_block_by_block() -> None:
    def sharded(options: dict[str, Any]) -> tuple[State, list[str], float]:
        model = ddpnb.wrap(deep(ddpnb.rank()), "fsdp", **options)  # rank 0's weights count
        one_by_one(model, sgd(model), batches(6))
        own = sum(value.to_local().numel() for value in model.parameters() if isinstance(value, DTensor))
        whole = sum(value.numel() for value in model.parameters())
        units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        return ddpnb.state_dict(model), units, own / whole

    alone = deep(0)
    one_by_one(alone, sgd(alone), joint_batches(6, (4, 4)))

    for options in ({}, {"reshard_after_forward": False}):
        for state, units, share in on_ranks(2, sharded, options):
            assert ["", "blocks.0", "blocks.1", "blocks.2", "last.0", "last.1"] == units
            assert farthest(alone.state_dict(), state) <= 1e-5
            assert 0.4 < share < 0.6


def test_blocks_are_found_within_lists_sequences_and_dicts() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        nn.ModuleDict({"a": nn.ModuleList([shared, nn.Sequential(shared)])}),
        deep(0),
    )
    ddpnb.wrap(model, "fsdp")

    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    assert ["", "0.0", "1.a.0", "2", "2.blocks.0", "2.blocks.1", "2.blocks.2"] == units


def test_none_lets_each_rank_train_by_itself() -> None:
    def apart() -> State:
        model = ddpnb.wrap(net(), "none")
        one_by_one(model, sgd(model), batches(3))
        return ddpnb.state_dict(model)

    for rank, state in enumerate(on_ranks(2, apart)):
        alone = net()
        one_by_one(alone, sgd(alone), batches(3, rank=rank))
        assert farthest(alone.state_dict(), state) <= 1e-6


def test_dp_says_on_a_cpu_that_it_passes_everything_through() -> None:
    with pytest.warns(UserWarning, match="passes everything through: there is no GPU") as caught:
        model = ddpnb.wrap(net(), "dp")
    alone = net()
    for each in (alone, model):
        one_by_one(each, sgd(each), batches(3))

    assert isinstance(model, DataParallel)
    assert __file__ == caught[0].filename
    assert [] == differing(alone.state_dict(), ddpnb.state_dict(model))


def test_dp_is_refused_where_there_are_other_ranks() -> None:
    text = refused(2, ValueError, lambda: ddpnb.wrap(net(), "dp") and None)

    assert "strategy='dp' is for one process that uses all GPUs, and this is one of 2 ranks" in text


# ---- precision


class Watched(nn.Module):
    """Tells what its weights were multiplied in; gives tensors in a dict and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(DIM, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.seen: list[torch.dtype] = []
        self.fails = False

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = self.norm(self.first(x))
        logits = self.last(hidden)
        self.seen.append(logits.dtype)
        if self.fails:
            raise ValueError("mine")
        return {"logits": logits, "others": (logits.sum(), logits.argmax(1), "text")}


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def test_a_forward_is_computed_in_its_precision_and_gives_float32() -> None:
    def computed() -> list[str]:
        wrong = []
        for strategy in ("ddp", "fsdp", "none"):
            for precision, dtype in DTYPES.items():
                torch.manual_seed(0)
                model = ddpnb.wrap(Watched(), strategy, precision=precision)  # type: ignore[arg-type]
                outputs = model(next(batches(1))[0])
                outputs["logits"].sum().backward()
                total, classes, text = outputs["others"]
                dtypes = [outputs["logits"].dtype, total.dtype, classes.dtype, text]
                weights = {value.dtype for value in model.parameters()} | {
                    value.grad.dtype for value in model.parameters() if value.grad is not None
                }
                bare: Any = ddpnb.unwrap(model)
                if [dtype] != bare.seen or [torch.float32, torch.float32, torch.int64, "text"] != dtypes:
                    wrong.append(f"{strategy} {precision}: {bare.seen} {dtypes}")
                if {torch.float32} != weights:
                    wrong.append(f"{strategy} {precision}: {weights}")
        return wrong

    assert [[], []] == on_ranks(2, computed)


@pytest.mark.parametrize("strategy", ["ddp", "none"])
def test_autocast_is_off_after_a_forward_that_failed(strategy: Any) -> None:
    bare = Watched()
    model = ddpnb.wrap(bare, strategy, precision="bf16")
    bare.fails = True
    with pytest.raises(ValueError, match="mine"):
        model(torch.ones(4, DIM))

    assert [torch.bfloat16] == bare.seen
    assert not torch.is_autocast_enabled("cpu")


def test_a_model_without_weights_is_computed_in_its_precision_too() -> None:
    model = ddpnb.wrap(nn.Bilinear(2, 2, 1).requires_grad_(False), "none", precision="bf16")
    plain = ddpnb.wrap(nn.Flatten(), "none", precision="bf16")

    assert torch.float32 == model(torch.ones(1, 2), torch.ones(1, 2)).dtype
    assert torch.float32 == plain(torch.ones(2, 2, 2, dtype=torch.bfloat16)).dtype


# ---- how gradients travel


def _ranks_of_gradients(hook: Any) -> tuple[list[int], bool]:
    """Matrix rank of a gradient at each of 12 steps, and whether fp16 holds it exactly."""
    torch.manual_seed(0)
    model = ddpnb.wrap(nn.Linear(DIM, DIM, bias=False), comm_hook=hook)
    found = []
    for inputs, _ in batches(12, size=16):
        model.zero_grad()
        (model(inputs) ** 3).sum().backward()
        (grad,) = [value.grad for value in model.parameters()]
        assert grad is not None
        found.append(int(torch.linalg.matrix_rank(grad, rtol=1e-4)))
    return found, torch.equal(grad, grad.half().float())


def test_a_hook_by_name_changes_how_gradients_travel() -> None:
    def seen() -> dict[Any, tuple[list[int], bool]]:
        return {hook: _ranks_of_gradients(hook) for hook in (None, "fp16", "powersgd")}

    for found in on_ranks(2, seen):
        assert {None: ([DIM] * 12, False), "fp16": ([DIM] * 12, True)} == {hook: found[hook] for hook in (None, "fp16")}
        assert ([DIM] * 10 + [1] * 2, False) == found["powersgd"]


def test_bfloat16_gradients_are_refused_on_gloo_with_the_reason() -> None:
    with pytest.raises(ValueError, match="needs nccl: gloo cannot add bfloat16; use 'fp16' or 'powersgd'"):
        ddpnb.wrap(net(), comm_hook="bf16")


# ---- options and what is refused


def test_options_reach_ddp() -> None:
    model: Any = ddpnb.wrap(net(), bucket_cap_mb=3, gradient_as_bucket_view=True, find_unused_parameters=True)

    logged = model._get_ddp_logging_data()
    assert (3 * 1024 * 1024, 1, 1) == tuple(
        logged[name] for name in ("bucket_cap_bytes", "gradient_as_bucket_view", "find_unused_parameters")
    )


def _compiled_ddp() -> nn.Module:
    return compiled(ddpnb.wrap(net()))


REFUSED: list[tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = [
    (net, {"strategy": "zero"}, ValueError, "strategy is one of 'ddp', 'dp', 'fsdp', 'none', not 'zero'"),
    (net, {"precision": "fp8"}, ValueError, "precision is 'fp32', 'bf16' or 'fp16', not 'fp8'"),
    (net, {"comm_hook": "int8"}, ValueError, "comm_hook is 'fp16', 'bf16' or 'powersgd', not 'int8'"),
    (net, {"strategy": "fsdp", "comm_hook": "fp16"}, ValueError, "belongs to strategy='ddp', not to 'fsdp'"),
    (net, {"strategy": "none", "bucket_cap_mb": 1}, ValueError, "has no options, not even 'bucket_cap_mb'"),
    (net, {"bucket_cap": 1}, TypeError, "DistributedDataParallel.*unexpected keyword argument 'bucket_cap'"),
    (net, {"strategy": "fsdp", "bucket_cap_mb": 1}, TypeError, "fully_shard.*unexpected keyword.*'bucket_cap_mb'"),
    (net, {"strategy": "dp", "bucket_cap_mb": 1}, TypeError, "DataParallel.*unexpected keyword.*'bucket_cap_mb'"),
    (lambda: ddpnb.wrap(net()), {}, ValueError, "wrapped already"),
    (lambda: DistributedDataParallel(net()), {"strategy": "none"}, ValueError, "wrapped already"),
    (lambda: DataParallel(net()), {}, ValueError, "wrapped already"),
    (lambda: ddpnb.wrap(net(), "none", precision="bf16"), {}, ValueError, "wrapped already"),
    (lambda: ddpnb.wrap(net(), "fsdp"), {}, ValueError, "wrapped already"),
    (_compiled_ddp, {"strategy": "fsdp"}, ValueError, r"wrapped already; ddpnb.unwrap\(model\)"),
    (lambda: Net, {}, TypeError, "takes a torch.nn.Module, not type"),
    (lambda: nn.LazyLinear(3), {}, ValueError, "'weight' has no shape yet: call the model once"),
    (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False)),
        {},
        ValueError,
        "'1.running_mean' has no shape yet",
    ),
    (nn.ReLU, {}, ValueError, "no parameter that requires a gradient; strategy='none' is for those"),
    (lambda: net().requires_grad_(False), {"strategy": "fsdp"}, ValueError, "no parameter that requires a gradient"),
]


@pytest.mark.parametrize(("make", "arguments", "kind", "words"), REFUSED)
def test_what_cannot_be_wrapped_is_refused_with_its_reason(
    make: Callable[[], Any], arguments: dict[str, Any], kind: type[Exception], words: str
) -> None:
    model = make()

    with pytest.raises(kind, match=words):
        ddpnb.wrap(model, **arguments)


# ---- batch normalisation


def _normed(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, 8), kind(8), nn.Tanh(), nn.Linear(8, 3))


NORMED: dict[str, Callable[[], nn.Module]] = {
    "asked for": lambda: ddpnb.wrap(_normed(nn.BatchNorm1d), sync_batchnorm=True),
    "torch's own": lambda: ddpnb.wrap(_normed(nn.SyncBatchNorm)),
    "torch's own, asked for": lambda: ddpnb.wrap(_normed(nn.SyncBatchNorm), sync_batchnorm=True),
    "compiled before": lambda: ddpnb.wrap(compiled(_normed(nn.SyncBatchNorm))),
    "compiled after": lambda: compiled(ddpnb.wrap(_normed(nn.BatchNorm1d), sync_batchnorm=True)),
    "sharded": lambda: ddpnb.wrap(_normed(nn.BatchNorm1d), "fsdp", sync_batchnorm=True),
}


def test_synchronised_batchnorm_trains_as_one_process() -> None:
    def states() -> dict[str, State]:
        found = {}
        for name, make in NORMED.items():
            model = make()
            one_by_one(model, sgd(model), batches(4))
            found[name] = ddpnb.state_dict(model)
        return found

    alone = _normed(nn.BatchNorm1d)
    one_by_one(alone, sgd(alone), joint_batches(4, (4, 4)))

    for found in on_ranks(2, states):
        distances = {name: farthest(alone.state_dict(), state) for name, state in found.items()}
        assert list(NORMED) == list(distances)
        assert {} == {name: distance for name, distance in distances.items() if not distance <= 1e-5}


def test_batchnorm_that_nobody_asked_to_synchronise_stays_as_it_is() -> None:
    model: Any = ddpnb.unwrap(ddpnb.wrap(nn.Sequential(nn.BatchNorm1d(DIM), nn.SyncBatchNorm(DIM))))

    assert [nn.BatchNorm1d, ddpnb.SyncBatchNorm] == [type(each) for each in model]


# ---- what an error says


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(DIM, 3)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.last(batch["x"].view(batch["x"].size(0), -1))  # type: ignore[no-any-return]


def test_a_forward_that_fails_without_samples_is_told_the_three_ways_out() -> None:
    model = ddpnb.wrap(Viewing())
    with pytest.raises(RuntimeError) as empty:
        model({"x": torch.ones(0, 2, 3)})
    with pytest.raises(RuntimeError) as other:
        model({"x": torch.ones(1, 2, 4)})

    (note,) = empty.value.__notes__
    for words in ("no sample in this batch", "drop_last=True", "pad=True", "x.flatten(1)"):
        assert words in note
    assert not hasattr(other.value, "__notes__")


def test_a_parameter_without_gradient_in_an_own_loop_is_told_its_option() -> None:
    def unused() -> None:
        torch.manual_seed(0)
        model = ddpnb.wrap(TwoHeads())
        one_part_at_a_time(model, sgd(model), batches(3))

    text = refused(2, RuntimeError, unused)

    assert "the last loss did not depend on" in text
    assert "ddpnb.wrap(model, find_unused_parameters=True)" in text
