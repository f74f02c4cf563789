"""Steps that have the same bits for any number of ranks: what `Loop(exact=True)` makes its steps of.

Sums of floats depend on the order of the addends, a batch's gradients on its size, dropout on the generator's past. So
nothing here may depend on who computes it: a global batch is cut into *shards*, always the same; each is computed as if
it were alone, with random numbers and statistics of its own and in one thread; and their gradients are added along one
`tree`. How many ranks there are only says who computes which.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm
from torch.utils.hooks import RemovableHandle

from ..context import device
from ..world import World
from .batchnorm import SyncBatchNorm
from .buffers import Buffers
from .epoch import Epoch
from .loading import Loader
from .membership import join
from .reduction import gather
from .replica import Replica, Turn
from .sampling import Cut, GlobalBatchSampler, hashed, seed_generators
from .steps import Gradients, Steps, Votes
from .tree import Node, Tree

_SYNCHRONISED = (SyncBatchNorm, nn.SyncBatchNorm)
_TRAINING = 1
"""Tells the random numbers of a shard's training from those of its loading."""


class ShardSteps(Steps):
    """The backwards of a model, shard by shard.

    Args:
        model: from `wrap`, as DDP; in a world of one also without.
        loader: `ddpnb.loader` of a dataset with indices.
        accumulate: how many of the loader's global batches make one.
        num_shards: of a global batch.

    Raises:
        TypeError, ValueError: something that cannot be the same for any number of ranks.
    """

    def __init__(self, model: nn.Module, loader: Any, accumulate: int, num_shards: int) -> None:
        self._world = join()
        self._sampler = _checked(loader, accumulate, self._world)
        _check_shards(num_shards, self._world)
        _check_model(model, self._world)
        self._buffers = Buffers(model)
        super().__init__(model, accumulate=1, batch_size=1)
        self._loader: Loader = loader
        self._device = device()
        self._cut = Cut(num_shards, accumulate)
        self._tree = Tree(num_shards)
        # A full shard's mean loss counts as it is.
        self._weight = self._sampler.global_batch_size * accumulate / num_shards

    # ---- one epoch, one step, one shard begins

    def follow(self, turn: Turn) -> None:
        """As `Steps.follow`; DDP reduces nothing, and this process computes in one thread, as long as `turn` exists.

        Raises:
            ValueError: the ranks do not agree in what the steps depend on; on all ranks.
        """
        self._compare()
        alone = _Alone()
        super().follow(alone)
        weakref.finalize(turn, _leave, self._buffers.keep_apart(), torch.get_num_threads(), alone)
        torch.set_num_threads(1)
        if self._replica is not None:
            self._replica.require_forward_param_sync = False  # DDP would begin with a broadcast of the buffers

    @property
    def is_timed(self) -> bool:
        """As `Steps.is_timed`: DDP reduces nothing."""
        return False

    def look_again(self) -> None:
        """As `Steps.look_again`."""
        super().look_again()
        self._groups: dict[torch.dtype, list[int]] = {}  # {dtype: indices of parameters}
        for index, each in enumerate(self._parameters):
            self._groups.setdefault(each.dtype, []).append(index)

    def epoch(self, num_taken: int = 0) -> ShardEpoch:
        """Begin the loader's next epoch, or what is left of it after so many micro-batches.

        Raises:
            RuntimeError: the number of threads was changed.
        """
        if torch.get_num_threads() != 1:
            raise RuntimeError(
                f"torch.set_num_threads({torch.get_num_threads()}) within a Loop(exact=True), which computes in one "
                "thread: how a sum is split among threads changes its last bits. Leave it out."
            )
        return ShardEpoch(self, self._loader, self._cut, num_taken)

    def begin_step(self, num_samples: int) -> list[int | None]:
        """Begin a global batch of so many samples; which of its shards are this rank's, [None] if there are none."""
        self._shards = self._cut.shards(num_samples, self._world.world_size)  # [rank]
        self._nodes: list[Node[list[Tensor]]] = []
        self._rows: list[Tensor] = []
        self._buffers.begin_step()
        return list(self._shards[self._world.rank]) or [None]

    def begin_shard(self, shard: int | None) -> None:
        """What comes is of this shard: the random numbers, the statistics."""
        self._shard = shard
        self._buffers.begin_shard()
        numbers = (self._loader.seed, self._loader.epoch, self._loader.samples, -1 if shard is None else shard)
        seed_generators(*numbers, _TRAINING)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(hashed(*numbers, _TRAINING))

    # ---- a shard's backward

    def backward(self, loss: Tensor, weight: float, num_samples: int, votes: Votes) -> None:
        """As `Steps.backward`, of one shard. What weighs nothing leaves no trace."""
        if weight == 0:
            self.pass_over(num_samples, votes)
            return
        self._refuse_own_gradients()
        self._run(loss, weight, reduce=False)
        are_used = [each.grad is not None for each in self._parameters]
        head = torch.tensor([weight / self._weight, num_samples, *are_used], dtype=torch.float64)
        self._add(self._take_gradients(), torch.cat([head, self._buffers.statistics()]))
        self._votes = votes

    def pass_over(self, num_samples: int, votes: Votes) -> None:
        """As `Steps.pass_over`: a shard that has nothing to add, whether its forward has run or not."""
        if self._shard is not None:
            row = torch.zeros(self._width, dtype=torch.float64)
            row[1] = num_samples
            self._add(None, row)
        self._votes = votes

    @property
    def _width(self) -> int:
        """Numbers of a row, all that a shard says beside its gradients.

        Its weight, samples, which parameters have a gradient, statistics.
        """
        return 2 + len(self._parameters) + self._buffers.num_statistics

    def _add(self, gradients: list[Tensor] | None, row: Tensor) -> None:
        assert self._shard is not None
        self._rows.append(row)
        self._tree.extend(self._nodes, [Node(self._shard, self._shard + 1, gradients)], _added)

    def _take_gradients(self) -> list[Tensor]:
        """The gradients of all parameters, which have none then; zeros where the loss does not depend on one."""
        gradients = []
        for each in self._parameters:
            grad, each.grad = each.grad, None
            if grad is None:
                grad = torch.zeros_like(each)
            elif grad.is_sparse:
                raise TypeError("exact=True adds dense gradients only: make the embedding without sparse=True")
            gradients.append(grad.detach().contiguous())  # also a norm depends on how the numbers lie
        return gradients

    # ---- all shards together

    def gradients(self) -> Gradients:
        """As `Steps.gradients`: those of the mean over the global batch, on every rank the same bits."""
        self._buffers.refuse_changed()
        rows, (wants_stop, wants_save, is_busy, has_failed) = self._exchange_rows()
        shares, counts = rows[:, 0].tolist(), rows[:, 1]
        are_used, statistics = rows[:, 2:].split([len(self._parameters), self._buffers.num_statistics], dim=1)
        gradients = self._exchange_gradients(shares)
        if gradients is not None:
            for parameter, gradient, is_used in zip(self._parameters, gradients, are_used.any(0).tolist(), strict=True):
                parameter.grad = gradient if is_used else None
        self._buffers.apply(statistics[rows[:, 0] > 0])
        weight = 0.0
        for share in shares:  # in order: sum() of another Python rounds otherwise
            weight += share
        scale = 1 / weight if weight > 0 else 0.0
        norm = float(get_total_norm(self._grads()))
        return Gradients(
            scale=scale,
            norm=norm * scale,
            num_samples=int(counts.sum()),
            wants_stop=wants_stop,
            has_more=self._votes.more,
            wants_save=wants_save,
            is_busy=is_busy,
            has_failed=has_failed,
        )

    def _exchange_rows(self) -> tuple[Tensor, list[bool]]:
        """The rows of all shards that have samples, (shards, width), and what is the wish of a rank."""
        wishes = [self._votes.stop, self._votes.save, self._votes.busy, self._votes.failed]
        most = len(self._shards[0])
        own = torch.zeros(len(wishes) + most * self._width, dtype=torch.float64)
        said = torch.cat([own.new_tensor(wishes), *self._rows])
        own[: len(said)] = said
        every = _of_all_ranks(own.to(self._device), self._world).cpu()  # (ranks, wishes and rows)
        rows = every[:, len(wishes) :].view(-1, most, self._width)
        joint = torch.cat([rows[rank, : len(shards)] for rank, shards in enumerate(self._shards)])
        return joint, every[:, : len(wishes)].any(0).tolist()

    def _exchange_gradients(self, shares: list[float]) -> list[Tensor] | None:
        """The sum over all shards of each parameter's gradients; None where no shard has something to add."""
        if self._world.world_size == 1:
            return self._tree.root(self._nodes, _added)
        layout = [self._nodes_of(shards, shares) for shards in self._shards]
        if not any(shares):
            return None
        own = [node.value for node in self._nodes if node.value is not None]
        joint: list[Tensor] = list(self._parameters)  # each is replaced
        for dtype, indices in self._groups.items():
            shapes = [self._parameters[index].shape for index in indices]
            flat = [torch.cat([gradients[index].view(-1) for index in indices]) for gradients in own]
            length = sum(shape.numel() for shape in shapes)
            root = self._exchange_nodes(flat, layout, torch.empty(0, dtype=dtype, device=self._device), length)
            for index, shape, part in zip(indices, shapes, root.split([each.numel() for each in shapes]), strict=True):
                joint[index] = part.view(shape)
        return joint

    def _nodes_of(self, shards: range, shares: list[float]) -> list[Node[bool]]:
        """The nodes that are left to a rank; of the others only their places are known here."""
        nodes: list[Node[bool]] = []
        leaves = (Node(shard, shard + 1, True if shares[shard] else None) for shard in shards)
        self._tree.extend(nodes, leaves, lambda left, right: True)
        return nodes

    def _exchange_nodes(self, own: list[Tensor], layout: list[list[Node[bool]]], like: Tensor, length: int) -> Tensor:
        """The root, (length,), from this rank's nodes. Each rank finishes the tree for a slice of the numbers.

        So a rank sends and receives what a ring all-reduce does, times the nodes that it has.
        """
        num_ranks = self._world.world_size
        size = -(-length // num_ranks)
        sent = like.new_zeros(len(own), num_ranks * size)
        for row, node in zip(sent, own, strict=True):
            row[:length] = node
        sent = sent.view(-1, num_ranks, size).transpose(0, 1).contiguous()  # (ranks, own nodes, size)
        counts = [sum(node.value is not None for node in nodes) for nodes in layout]
        received = like.new_empty(sum(counts), size)
        width = size * like.element_size()
        dist.all_to_all_single(
            _bytes(received), _bytes(sent), [count * width for count in counts], [len(own) * width] * num_ranks
        )
        slices = iter(received)
        nodes = [
            Node(node.begin, node.end, next(slices) if node.value is not None else None)
            for each in layout
            for node in each
        ]
        part = self._tree.root(nodes, Tensor.add_)
        assert part is not None
        whole = like.new_empty(num_ranks * size)
        dist.all_gather_into_tensor(_bytes(whole), _bytes(part))
        return whole[:length]

    def _compare(self) -> None:
        """Raise ValueError, on all ranks, where they differ in what all steps depend on."""
        sampler = self._sampler
        own = {
            "world_size * batch_size * accumulate": sampler.global_batch_size * self._cut.num_joined,
            "shards": self._cut.num_shards,
            "the dataset's length": sampler.length,
            "shuffle": sampler.shuffle,
            "drop_last": sampler.drop_last,
            "the loader's position": self._loader.state_dict(),
            "the model's parameters": sum(each.numel() for each in self._parameters),
            "BatchNorm's statistics": self._buffers.num_statistics,
        }
        every = gather(own)
        for name, value in every[0].items():
            values = [each[name] for each in every]
            if any(each != value for each in values):
                raise ValueError(f"exact=True needs the same on all ranks, and {name} is, by rank, {values}")


class ShardEpoch(Epoch):
    """An epoch whose windows are global batches, and whose micro-batches are this rank's shards of them."""

    def __init__(self, steps: ShardSteps, loader: Loader, cut: Cut, num_taken: int) -> None:
        self._rest = loader.in_shards(cut)
        super().__init__(self._rest, cut.num_joined, len(loader), is_joint=False)
        self._begin = self.num_taken = num_taken
        self._steps, self._position = steps, loader
        self._shards: list[int | None] = []  # what is left of the window

    @property
    def place(self) -> dict[str, int]:
        """As `Epoch.place`: behind the window, from its first micro-batch on."""
        return self._position.state_dict()

    @property
    def num_left(self) -> int:
        """Global batches of the loader that are left, `accumulate` to a window."""
        return self._position.batches_left()

    @property
    def has_more(self) -> bool:
        """As `Epoch.has_more`; all ranks know it alike."""
        return self.num_left > 0

    @property
    def is_last(self) -> bool:
        """As `Epoch.is_last`."""
        return not self._shards

    def take(self) -> Any:
        """As `Epoch.take`; and the random numbers are the shard's from now on."""
        begin = self._position.samples
        batch = next(self._rest)
        self.num_taken += 1
        if not self._shards:
            self._shards = self._steps.begin_step(self._position.samples - begin)
        self._steps.begin_shard(self._shards.pop(0))
        self.num_samples = self._position.local_samples
        return batch


class _Alone:
    """The turn of a rank whose backwards DDP never reduces."""

    is_last = False


def _leave(handles: list[RemovableHandle], num_threads: int, _: _Alone) -> None:
    """The loop is left, and its turn with it: everything is as before."""
    for handle in handles:
        handle.remove()
    torch.set_num_threads(num_threads)


def _added(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(left, right)
    return left


def _of_all_ranks(own: Tensor, world: World) -> Tensor:
    """Every rank's tensor of one dimension, (ranks, length)."""
    every = own.new_empty(world.world_size, len(own))
    if world.world_size == 1:
        return every.copy_(own)
    dist.all_gather_into_tensor(every.view(-1), own)
    return every


def _bytes(tensor: Tensor) -> Tensor:
    """Its memory, since not every backend knows every dtype."""
    return tensor.view(-1).view(torch.uint8)


# ---- what cannot be exact


def _checked(loader: Any, accumulate: int, world: World) -> GlobalBatchSampler:
    sampler = loader.batch_sampler if isinstance(loader, Loader) else None
    if not isinstance(sampler, GlobalBatchSampler):
        what = f"a {type(loader).__name__}" if not isinstance(loader, Loader) else "an IterableDataset"
        raise TypeError(
            f"exact=True cuts the global batches of ddpnb.loader(dataset, …), whose dataset has indices, and got {what}"
        )
    if (sampler.rank, sampler.world_size) != (world.rank, world.world_size):
        raise ValueError(
            f"the loader deals to rank {sampler.rank} of {sampler.world_size}, and this is rank {world.rank} of "
            f"{world.world_size}: with exact=True leave out its world="
        )
    if sampler.pad:
        raise ValueError("pad=True repeats samples until world_size divides them: with exact=True leave it out")
    if sampler.drop_last and accumulate > 1:
        raise ValueError(
            f"accumulate={accumulate} with drop_last=True: with exact=True a global batch is what is dropped. Let "
            f"batch_size be {accumulate} times as large, and leave accumulate out: a rank holds one shard at a time."
        )
    return sampler


def _check_shards(num_shards: object, world: World) -> None:
    if not isinstance(num_shards, int) or isinstance(num_shards, bool):
        raise TypeError(f"shards is a whole number, not {num_shards!r}")
    if num_shards < 1:
        raise ValueError(f"shards={num_shards}: at least 1")
    if num_shards < world.world_size:
        raise ValueError(
            f"shards={num_shards} for {world.world_size} ranks: each needs one. The number is to be the same for every "
            "world size, at least the largest, and best a multiple of all"
        )


def _check_model(model: nn.Module, world: World) -> None:
    parts = list(model.modules())
    replica = next((each for each in parts if isinstance(each, Replica)), None)
    if any(isinstance(each, FSDPModule) for each in parts):
        raise ValueError("exact=True adds whole gradients, and strategy='fsdp' shards them: use wrap(model)")
    if any(isinstance(each, nn.DataParallel) for each in parts):
        raise ValueError("strategy='dp' splits a batch among the GPUs there are: with exact=True use wrap(model)")
    if world.world_size > 1 and not any(isinstance(each, DistributedDataParallel) for each in parts):
        raise ValueError(
            "exact=True trains one model on all ranks, and this one is wrapped for none: use ddpnb.wrap(model)"
        )
    if replica is not None and replica._comm_hooks:
        raise ValueError("exact=True has its own way to add gradients: leave out comm_hook, DDP reduces nothing")
    if replica is not None and replica.static_graph:
        raise ValueError("static_graph=True reduces in DDP's first backward: with exact=True leave it out")
    synchronised = [name for name, each in model.named_modules() if isinstance(each, _SYNCHRONISED)]
    if synchronised:
        raise ValueError(
            f"{synchronised[0].removeprefix('module.')!r} normalises over the joint batch of all ranks, and with "
            "exact=True each shard is normalised by itself: wrap the model without sync_batchnorm"
        )
    if any(hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) is not None for each in parts):
        raise ValueError(
            "torch.compile makes other code for other shapes and in another order on each rank, whose last bits "
            "differ: with exact=True leave it out"
        )
