"""`save_checkpoint()` and `load_checkpoint()`, for loops of your own, and for inference in the kernel.

Runs in: worker (and in the kernel, for inference)
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .. import checkpoints
from ..checkpoints import File, Manifest
from ..context import world_size
from ..errors import CheckpointError
from ..world import World
from . import checks, generators, objects, snapshot
from .loading import Loader
from .membership import join
from .reduction import gather
from .resuming import Reader, difference, seal, versions
from .snapshot import Tree, write_file
from .wrapping import named_state

Value = TypeVar("Value")

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
"""What a file system says that cannot lock a folder; NFS wants it opened for writing, which no folder can be."""


def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    epoch: int,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    loader: Loader | None = None,
    state: Any = (),
) -> None:
    """Save a training at the end of an epoch; call it on all ranks.

        for epoch in range(first, epochs):
            ...
            ddpnb.save_checkpoint("digits", epoch=epoch, model=model, optimizer=optimizer)

    stands for

        if rank == 0:
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, new)
            os.replace(new, path)                       # with every file synced, and its sha256 noted
        dist.barrier()

    Rank 0 writes, a folder whose `model.pt` and `optimizer.pt` `torch.load` reads without ddpnb. The checkpoint that
    was there stays until the new one is on the disk. Random numbers of all ranks are saved as well.

    Args:
        path: of the folder; one that holds a checkpoint, and nothing else, is replaced.
        epoch: the one that has just ended, counted from 0.
        model: wrapped or not; sharded weights are gathered.
        optimizer: over its parameters.
        scheduler: of the learning rate.
        scaler: of the gradients.
        loader: made by `ddpnb.loader`, whose position is saved.
        state: objects of your own with `state_dict()` and `load_state_dict()`; those of rank 0 are saved.

    Raises:
        CheckpointError: it could not be written; on all ranks. What was there before stands.
        TypeError, ValueError: an argument that cannot be.
    """
    _check(model, optimizer, loader)
    own = objects.checked(state)
    if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
        raise ValueError(f"epoch={epoch!r}: the number of the epoch that has just ended, 0 or more")
    target, world = Path(os.path.realpath(path)), _world()  # a link to a folder stays one
    kept = _whole if world.rank == 0 else _given
    weights = snapshot.plain(named_state(model), "model", kept)
    moments = None if optimizer is None else snapshot.plain(optimizer.state_dict(), "optimizer", kept)
    numbers = gather(generators.take())

    def write() -> None:
        tensors: dict[str, torch.Tensor] = {}
        record = {
            "position": {"epoch": epoch + 1},
            "loader": None if loader is None else loader.state_dict(),
            "layout": "whole",
            "optimizer": type(optimizer).__name__,
            "objects": objects.recorded(objects.named(scheduler, scaler, own), tensors),
            "versions": versions(),
            "threads": torch.get_num_threads(),
            "world_size": world.world_size,
        }
        files: dict[str, Any] = {f"rank-{rank}.pt": {"generators": each} for rank, each in enumerate(numbers)}
        files |= {"model.pt": weights, "state.json": record}
        if moments is not None:
            files["optimizer.pt"] = moments
        if tensors:
            files["state.pt"] = snapshot.plain(tensors, "state", _whole)
        _write(target, epoch + 1, world.world_size, files)

    _alike(f"{target} could not be saved", write if world.rank == 0 else lambda: None)


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    loader: Loader | None = None,
    state: Any = (),
    missing_ok: bool = False,
) -> int:
    """Load a checkpoint, and say which epoch is the first still to be run; call it on all ranks, or in the kernel.

        first = ddpnb.load_checkpoint("digits", model=model, optimizer=optimizer, missing_ok=True)
        for epoch in range(first, epochs):

    stands for

        checkpoint = torch.load(path, map_location="cpu", weights_only=True)     # on every rank
        model.module.load_state_dict(checkpoint["model"])                        # which copies to its own device
        optimizer.load_state_dict(checkpoint["optimizer"])
        first = checkpoint["epoch"] + 1

    Rank 0 looks whether it is there and whole, every byte of it, and all ranks do the same. Nothing in it is executed.

    Args:
        path: of a folder that `save_checkpoint` or a `Loop` has written, of a run, whose newest whole checkpoint is
            taken, or of a file by `torch.save` that holds {"model", "optimizer", "epoch"} or a model's state alone.
        model: wrapped or not; weights may have been saved by any number of ranks, wrapped in any way.
        optimizer: over its parameters; with it each rank's random numbers are put back, if there are as many ranks.
        scheduler: of the learning rate.
        scaler: of the gradients.
        loader: made by `ddpnb.loader`; goes on where it was, on any number of ranks.
        state: objects of your own, as many as were saved.
        missing_ok: where nothing is there, load nothing and return 0.

    Raises:
        FileNotFoundError: nothing is there; on all ranks.
        CheckpointError: it is damaged, of another model, or holds more than tensors and plain values; on all ranks.
    """
    _check(model, optimizer, loader)
    wanted = objects.named(scheduler, scaler, objects.checked(state))
    found = _found(Path(os.path.realpath(path)))
    if found is None:
        if missing_ok:
            return 0
        raise FileNotFoundError(f"there is no checkpoint at {path}; missing_ok=True begins afresh where there is none")
    source, expected = found
    failure = f"{source} could not be loaded"

    def read() -> _Contents:
        try:
            found = _of_file(source) if source.is_file() else _of_folder(source, model, optimizer, wanted, loader)
        except CheckpointError:
            _refuse_another(source, expected)
            raise
        _refuse_another(source, expected)
        found.hold(model=model, optimizer=optimizer, loader=loader, **wanted)
        if model is not None:
            snapshot.fitted_to_model(model, found.parts["model"], source)
        if optimizer is not None:
            snapshot.fitted_to_optimizer(optimizer, found.parts["optimizer"], source)
        return found

    def put(parts: Mapping[str, Any]) -> None:
        if model is not None:
            snapshot.put_into_model(model, parts["model"], source)
        if optimizer is not None:
            snapshot.put_into_optimizer(optimizer, parts["optimizer"], source)
        for name, each in wanted.items():
            each.load_state_dict(parts[name])
        if loader is not None:
            loader.load_state_dict(parts["loader"])
        if "generators" in parts:
            generators.put_back(parts["generators"])

    # What does not fit is found before anything is changed, and before a collective that a failed rank would not join.
    contents = _alike(failure, read)
    _alike(failure, lambda: put(contents.parts))
    return contents.epoch


def _world() -> World:
    """Where this process stands; one that is alone, such as the kernel, needs no group, and none is made for it."""
    return join() if dist.is_initialized() or world_size() > 1 else World()


def _alike(what: str, action: Callable[[], Value]) -> Value:
    """What the action gives on this rank; where it fails on one rank, all of them raise.

    Raises:
        CheckpointError: what has failed, and why.
    """
    error = None
    try:
        value = action()
    except Exception as failure:
        error = failure
    texts = gather(None if error is None else _reason(error))
    failed = [rank for rank, text in enumerate(texts) if text is not None]
    if not failed:
        return value
    who = "" if failed[0] == 0 else f" on rank {failed[0]}"
    cause = None if isinstance(error, CheckpointError) else error
    raise CheckpointError(f"{what}{who}: {texts[failed[0]]}") from cause


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError | OSError) else f"{type(error).__name__}: {error}"


def _check(model: object, optimizer: object, loader: object) -> None:
    for name, value, kind in (
        ("model", model, nn.Module),
        ("optimizer", optimizer, Optimizer),
        ("loader", loader, Loader),
    ):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name}= takes a {kind.__name__}, not a {type(value).__name__}")


def _whole(value: torch.Tensor, _: str) -> torch.Tensor:
    """A copy in memory of its own: a view would be written with all that it is a view of."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().to("cpu", copy=True)


def _given(value: torch.Tensor, _: str) -> None:
    """What a rank has to do that writes nothing: its part of a sharded tensor goes to the one that does."""
    if isinstance(value, DTensor):
        value.full_tensor()


# ---- writing


def _write(target: Path, epoch: int, world_size: int, files: Mapping[str, Any]) -> None:
    for folder in reversed(target.parents):
        checkpoints.make_folder(folder)
    with _draft_alone(target) as draft:
        _refuse_foreign(target)
        written: dict[str, File] = {name: write_file(draft / name, content) for name, content in files.items()}
        manifest = Manifest(step=0, epoch=epoch, world_size=world_size, files=written)
        checkpoints.publish(draft, target, manifest)


def _refuse_foreign(target: Path) -> None:
    """Raise where something would be lost that is not a checkpoint's."""
    if not target.exists():
        return
    try:
        strangers = checkpoints.strangers_in(target)
    except CheckpointError as error:
        raise CheckpointError(f"something else is there, and stays ({error}): choose another path") from None
    if strangers:
        raise CheckpointError(
            f"beside the checkpoint that is there lies {strangers[0]!r}, which would be lost: move it, or choose "
            "another path"
        )


@contextmanager
def _draft_alone(target: Path) -> Iterator[Path]:
    """An empty draft that no other process writes at the same time."""
    draft = checkpoints.begin(target)
    folder = os.open(draft, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(folder, draft)
        try:
            for left in draft.iterdir():  # by a save that was cut short
                left.unlink()
            yield draft
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    finally:
        os.close(folder)


def _lock(folder: int, draft: Path) -> None:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_still_there = draft.exists() and os.path.samestat(os.fstat(folder), draft.stat())
    except BlockingIOError:
        is_still_there = False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return
    if not is_still_there:  # or it was published by the other one, a moment ago
        raise CheckpointError("another process is writing there at this moment: give each a path of its own")


# ---- reading


@dataclass(frozen=True, slots=True)
class _Contents:
    """What was read, and compared; nothing of it has been put anywhere."""

    source: Path
    epoch: int
    parts: Mapping[str, Any]
    """{what the argument is called: its state}, "generators" beside; without what was not saved."""

    def hold(self, **wanted: object) -> None:
        """Raise where something is wanted that is not in it."""
        for name, each in wanted.items():
            if each is not None and name not in self.parts:
                there = ", ".join(self.parts) or "nothing of a training"
                raise CheckpointError(f"{self.source} holds no {name} (but {there}): leave {name.split('-')[0]}= out")


def _found(path: Path) -> tuple[Path, str | None] | None:
    """What is to be loaded, as rank 0 has found it, and its seal; None where nothing is there."""
    rank = _world().rank
    found = _alike(f"{path} could not be loaded", lambda: None if rank else _find(path))
    choice = gather(None if found is None else (str(found), seal(found)))[0]
    return None if choice is None else (Path(choice[0]), choice[1])


def _refuse_another(source: Path, expected: str | None) -> None:
    if text := difference(source, expected):
        raise CheckpointError(text) from None


def _find(path: Path) -> Path | None:
    for _ in range(_TRIES):
        there = checkpoints.standing(path)
        if not there.exists():
            return None
        if there.is_file():
            return there
        if not checkpoints.is_checkpoint(there):
            if of_run := checkpoints.published(there):
                return _newest_whole(of_run)
            there = checkpoints.origin_of(there) or there
        expected = seal(there)
        try:
            checkpoints.verify(there)
            return there
        except CheckpointError as error:
            damage = error
            if seal(there) == expected:
                break  # else a training that goes on has replaced it meanwhile
    raise damage


_TRIES = 3


def _newest_whole(candidates: list[Path]) -> Path:
    damage = []
    for candidate in candidates:
        try:
            checkpoints.verify(candidate)
        except CheckpointError as error:
            damage.append(str(error))
            continue
        for each in damage:
            checks.warn(f"{each}; an earlier checkpoint is used")
        return candidate
    raise CheckpointError(f"no checkpoint of the run is whole: {'; '.join(damage)}")


def _of_folder(
    source: Path,
    model: nn.Module | None,
    optimizer: Optimizer | None,
    wanted: Mapping[str, Any],
    loader: Loader | None,
) -> _Contents:
    reader = Reader(source, _world())
    record = reader.record
    trees = {"model": model, "optimizer": optimizer}
    parts = {name: reader.tree(name) for name, each in trees.items() if each is not None and reader.holds(name)}
    if optimizer is not None and "optimizer" in parts:
        if (then := record["optimizer"]) != (now := type(optimizer).__name__):
            raise CheckpointError(f"{source} was saved with {then}, and this is {now}")
        parts |= {"generators": own["generators"]} if (own := reader.of_rank()) is not None else {}
    if wanted:
        parts |= objects.states(wanted, reader)
    if loader is not None and record["loader"] is not None:
        parts["loader"] = record["loader"]
    return _Contents(source, int(record["position"]["epoch"]), parts)


_ALIASES = {
    "model": ("model", "model_state_dict", "state_dict"),
    "optimizer": ("optimizer", "optimizer_state_dict"),
    "scheduler": ("scheduler", "scheduler_state_dict", "lr_scheduler"),
    "scaler": ("scaler", "scaler_state_dict"),
}


def _of_file(source: Path) -> _Contents:
    """A file by `torch.save`, as most tutorials write it."""
    tree: Tree = snapshot.read(source)
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"{source} holds no dict, but a {type(tree).__name__}")
    if all(isinstance(value, torch.Tensor) for value in tree.values()):
        return _Contents(source, 0, {"model": tree})
    parts = {name: tree[alias] for name, aliases in _ALIASES.items() for alias in reversed(aliases) if alias in tree}
    return _Contents(source, int(tree["epoch"]) + 1 if "epoch" in tree else 0, parts)
