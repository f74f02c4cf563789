"""What a `Loop` saves of its training, when, and how it finds its way back into it.

    model.pt, optimizer.pt      rank 0's; with sharded weights each rank's own, model-0.pt, model-1.pt, …
    rank-0.pt, rank-1.pt, …     each rank's random numbers, and buffers where they differ between ranks
    state.json, state.pt        all else: position, scheduler, scaler, the user's own; and the tensors of those

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

import json
import math
import random
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from ..checkpoints import Manifest
from ..context import Session, current_session
from ..errors import CheckpointError
from ..messages import Saved
from ..world import World
from . import checks as mistakes
from . import generators, objects, snapshot
from .loading import Loader
from .membership import join
from .replica import Replica
from .resuming import Found, Reader, agree, changes, say, say_resumed, versions
from .sampling import hashed
from .saving import Draft, Mode, Saver, parse_every
from .steps import Gradients
from .wrapping import named_state, unwrap


class Position(NamedTuple):
    """Where a training stands, between two optimizer steps."""

    epoch: int
    """The epoch that goes on, or that comes next."""
    step: int
    samples: int
    skipped: int
    batches: int
    """Micro-batches of this epoch that each rank has been handed."""
    windows: int
    """Windows of this epoch that are done."""

    @property
    def is_midway(self) -> bool:
        """Whether the epoch has begun."""
        return self.batches > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What belongs together in a checkpoint."""

    model: nn.Module
    optimizer: Optimizer
    loader: Any
    objects: Mapping[str, Any]
    """What else has a state, by name."""
    shards: int | None = None
    """Of a global batch, where the bits are those of any number of ranks; None where they are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """When to save, and what to keep."""

    steps: int | None
    seconds: float | None
    keep: int
    best: str | None
    mode: Mode


def habit(every: object, keep: object, best: object, mode: object) -> Habit:
    """The options of a `Loop`, checked.

    Raises:
        TypeError, ValueError: one that cannot be.
    """
    steps, seconds = parse_every(every)
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        raise ValueError(f"keep={keep!r}: how many checkpoints stay, at least 1")
    if best is not None and not isinstance(best, str):
        raise TypeError(f"best={best!r}: the name of a value that is logged, such as 'accuracy'")
    if mode not in ("min", "max"):
        raise ValueError(f"mode={mode!r}: 'min' where less is better, else 'max'")
    return Habit(steps=steps, seconds=seconds, keep=keep, best=best, mode=mode)


class Keeper:
    """Saves and loads a training. Without a folder of the run's it does nothing, and costs nothing."""

    def __init__(self, training: Training, habit: Habit) -> None:
        self._training, self._habit = training, habit
        self._world, self._session = join(), current_session()
        self._saver: Saver | None = None
        self._reader: Reader | None = None
        self._own: Any = None  # of this rank, from the checkpoint
        self._epoch_generators: dict[str, Any] | None = None
        self._changing = frozenset[str]()
        self._layout = _layout_of(training.model, self._world)
        self._is_asked = False
        self._is_busy = False
        self._failure: CheckpointError | None = None
        self._has_warned = False
        self._saved_step = -1
        self._saves_seen = 0
        self._last_save = time.monotonic()
        found = self._claim()
        if found.run is not None and self._layout == "apart":
            mistakes.warn(
                "the ranks train weights of their own, which a run's checkpoints cannot hold: none is made. Wrap the "
                "model with 'ddp' or 'fsdp', or save with ddpnb.save_checkpoint()."
            )
            found = Found(None, None)
        if found.run is not None:
            objects.recorded(training.objects, {})  # what cannot be saved is refused now, and not an epoch later
            self._saver = Saver(
                found.run,
                self._world,
                habit.keep,
                habit.mode,
                before_handing_in=self._say_logged,
                on_saved=self._say_saved,
            )
            self._changing = snapshot.changed_by_forwards(training.model, training.optimizer)
        if found.checkpoint is not None:
            self._reader = Reader(found.checkpoint, self._world)

    def _claim(self) -> Found:
        """The run's folder and checkpoint, for the first Loop of a function; the next ones would get in its way."""
        session = self._session
        if session is not None and session in _claimed:
            if session.folder is not None:
                mistakes.warn(
                    "a second Loop in one run: the run's checkpoints are those of the first. Launch a function of its "
                    "own for it, or save what it trains with ddpnb.save_checkpoint()."
                )
            return Found(None, None)
        if session is None:
            return Found(None, None)
        _claimed.add(session)
        return agree()

    # ---- loading

    def load(self) -> Position | None:
        """Put the checkpoint into the training, but for the random numbers; where it stood. None: a fresh start.

        Raises:
            CheckpointError: it does not fit; on all ranks.
        """
        if self._reader is None:
            return None
        reader, training = self._reader, self._training
        record = reader.record
        here = reader.checkpoint
        if "step" not in record["position"]:
            raise CheckpointError(f"{here} was made by save_checkpoint(): load it with ddpnb.load_checkpoint()")
        if record["optimizer"] != type(training.optimizer).__name__:
            raise CheckpointError(
                f"{here} was saved with {record['optimizer']}, and this run has {type(training.optimizer).__name__}"
            )
        classes = {name: type(each).__name__ for name, each in training.objects.items()}
        if found := changes(record["classes"], classes):
            raise CheckpointError(f"{here} was saved with other objects: {', '.join(found)}")
        snapshot.put_into_model(training.model, reader.tree("model"), here)
        snapshot.put_into_optimizer(training.optimizer, reader.tree("optimizer"), here)
        position = Position(**record["position"])
        objects.put_back(training.objects, reader)
        self._load_loader(record, position)
        self._own = reader.of_rank()
        if self._own is not None and "buffers" in self._own:
            snapshot.load_buffers(training.model, self._own["buffers"])
        self._say_changes(record)
        say_resumed(here, reader.manifest)
        if self._session is not None:
            self._session.go_on_from(position.step)
            self._session.recall_settings(record.get("settings", {}))
        self._saved_step = position.step
        return position

    def _load_loader(self, record: Mapping[str, Any], position: Position) -> None:
        loader = self._training.loader
        if isinstance(loader, Loader):
            if record["loader"] is None:
                raise CheckpointError(_OTHER_LOADER)
            loader.load_state_dict(record["loader"])
        elif position.is_midway and (record["loader"] is not None or record["world_size"] != self._world.world_size):
            raise CheckpointError(_OTHER_LOADER)

    def put_back_before(self, position: Position) -> None:
        """The random numbers as they were before the epoch's iterator was made."""
        if self._own is None:
            _seed_anew(position.step, self._world.rank)
        else:
            states = self._own["epoch_generators"] if position.is_midway else self._own["generators"]
            if states is not None:
                self._put_generators(states)

    def put_back_after(self, position: Position) -> None:
        """The random numbers as they were, once the iterator stands where it stood."""
        if self._own is not None and position.is_midway:
            self._put_generators(self._own["generators"])
        self._own = self._reader = None

    def _say_changes(self, record: Mapping[str, Any]) -> None:
        now = self._circumstances()
        if found := changes(record["arguments"], now["arguments"]):
            say(
                f"launched with other arguments than the run it goes on from: {', '.join(found)}. What the checkpoint "
                "holds counts: weights, the optimizer's settings, the scheduler's, the loader's seed"
            )
        if found := changes(record["versions"], now["versions"]):
            say(f"resumed with other versions: {', '.join(found)}")
        if found := changes({"samples": record["length"]}, {"samples": now["length"]}):
            say(f"the data set has other {found[0]}: in this epoch some may be seen twice or never")
        if found := changes({"shards": record["shards"]}, {"shards": now["shards"]}):
            say(f"resumed with other {found[0]}: the bits are others")
        if self._training.shards is not None:
            return  # whatever the ranks and their threads
        if found := changes({"threads": record["threads"]}, {"threads": now["threads"]}):
            say(f"resumed with other {found[0]}: the last bits of all sums may differ")
        if record["world_size"] != (here := self._world.world_size):
            say(
                f"resumed on {here} rank{'s' * (here > 1)}, saved by {record['world_size']}: random numbers are drawn "
                "anew, and sums are made in another order"
            )

    # ---- saving

    def begin(self, turns: object) -> None:
        """As long as `turns` exists, this rank outlives its kernel by the time that a save takes."""
        if self._saver is not None and self._session is not None:
            self._session.outlive_kernel(True)
            self._saver.open()
            weakref.finalize(turns, self._session.outlive_kernel, False)
            weakref.finalize(turns, self._saver.close)

    def begin_epoch(self) -> None:
        """A plain loader draws from the global generators when its iterator is made: it will have to draw the same."""
        if self._saver is not None and not isinstance(self._training.loader, Loader):
            self._epoch_generators = self._take_generators()

    def _take_generators(self) -> dict[str, Any]:
        own = [each.get_state() for each in generators.of_loader(self._training.loader)]
        return {**generators.take(), "of loader": own}

    def _put_generators(self, states: Mapping[str, Any]) -> None:
        generators.put_back(states)
        for each, state in zip(generators.of_loader(self._training.loader), states["of loader"], strict=False):
            each.set_state(state)

    def _wants_save(self) -> bool:
        """Whether this rank asks for a checkpoint: rank 0 by the clock, the first of each node for its kernel."""
        session = self._session
        if session is None:
            return False
        if session.place.local_rank == 0 and (asked := session.num_saves_asked()) > self._saves_seen:
            self._saves_seen = asked
            return True
        seconds = self._habit.seconds
        return self._world.rank == 0 and seconds is not None and time.monotonic() - self._last_save >= seconds

    def said(self) -> dict[str, bool]:
        """What this rank says of saving in the ballot of the step at hand."""
        saver = self._saver
        if saver is None:
            return {}
        is_torn = saver.has_torn
        if is_torn:
            prefix = "model/"
            self._changing |= {path.removeprefix(prefix) for path in saver.stage.torn if path.startswith(prefix)}
            saver.stage.clear()
        return {"save": self._wants_save() or is_torn, "busy": saver.is_busy, "failed": saver.has_failed}

    def heard(self, gradients: Gradients) -> None:
        """What all ranks have said.

        Raises:
            CheckpointError: one could not write; on all ranks.
        """
        if self._saver is None:
            return
        self._is_asked |= gradients.wants_save
        self._is_busy = gradients.is_busy
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if gradients.has_failed:
            self._saver.raise_failure()

    def wait(self) -> None:
        """Before the optimizer moves."""
        if self._saver is not None:
            self._saver.stage.wait()

    def keep(self, position: Position, loader: Mapping[str, int] | None, *, epoch_done: bool, is_over: bool) -> None:
        """At the boundary between two steps, once the body of the loop is through: save if it is time.

        Args:
            position: where the training stands.
            loader: the loader's own position; None for one that has none.
            epoch_done: an epoch has just ended.
            is_over: no step follows: wait until it is saved, on all ranks.

        Raises:
            CheckpointError: where `is_over` and a rank could not write; on all ranks.
        """
        saver, habit = self._saver, self._habit
        if saver is None:
            return
        by_step = habit.steps is not None and position.step % habit.steps == 0
        by_epoch = epoch_done and (habit.best is not None or (habit.steps is None and habit.seconds is None))
        is_due = self._is_asked or is_over or by_step or by_epoch
        self._is_asked = False
        if is_due and position.step != self._saved_step:
            if self._is_busy:
                self._finish(saver, is_over)
            if self._failure is None:
                self._begin(saver, position, loader)
        if is_over:
            saver.finish()

    def _finish(self, saver: Saver, is_over: bool) -> None:
        """Wait for the one before; that it failed is raised by the next `update`, behind which the loop can go on."""
        try:
            saver.finish()
        except CheckpointError as error:
            if is_over:
                raise
            self._failure = error

    def _begin(self, saver: Saver, position: Position, loader: Mapping[str, int] | None) -> None:
        self._saved_step, self._last_save = position.step, time.monotonic()
        files = self._files(saver, position, loader)
        saver.begin(Draft(step=position.step, epoch=position.epoch, score=self._score(position.step), files=files))

    def _files(self, saver: Saver, position: Position, loader: Mapping[str, int] | None) -> dict[str, Any]:
        """What this rank writes: copies, or room for those that the saver's thread makes."""
        training, rank, stage, layout = self._training, self._world.rank, saver.stage, self._layout
        stage.clear()
        own: dict[str, Any] = {"generators": self._take_generators(), "epoch_generators": None}
        if position.is_midway:
            own["epoch_generators"] = self._epoch_generators
        if rank and self._has_own_buffers():
            own["buffers"] = stage.take("buffers", dict(unwrap(training.model).named_buffers()))
        files: dict[str, Any] = {f"rank-{rank}.pt": own}
        if rank == 0 or layout == "sharded":
            end = f"-{rank}" if layout == "sharded" else ""
            state = named_state(training.model)
            if layout == "sharded":
                state = snapshot.parts(state)  # a forward puts the whole in their place
            files[f"model{end}.pt"] = stage.leave("model", state, self._changing)
            files[f"optimizer{end}.pt"] = stage.leave("optimizer", training.optimizer.state_dict())
        if rank == 0:
            tensors: dict[str, torch.Tensor] = {}
            files["state.json"] = self._record(position, loader, layout, tensors)
            if tensors:
                files["state.pt"] = stage.take("state", tensors)
        return files

    def _record(
        self, position: Position, loader: Mapping[str, int] | None, layout: str, tensors: dict[str, torch.Tensor]
    ) -> dict[str, Any]:
        return {
            "position": position._asdict(),
            "loader": None if loader is None else dict(loader),
            "layout": layout,
            "optimizer": type(self._training.optimizer).__name__,
            "classes": {name: type(each).__name__ for name, each in self._training.objects.items()},
            "objects": objects.recorded(self._training.objects, tensors),
            "settings": {} if self._session is None else self._session.settings.values(),
            **self._circumstances(),
        }

    def _circumstances(self) -> dict[str, Any]:
        session = self._session
        return {
            "arguments": {} if session is None else json.loads(session.arguments),
            "versions": versions(),
            "threads": torch.get_num_threads(),
            "shards": self._training.shards,
            "length": _length_of(self._training.loader),
            "world_size": self._world.world_size,
        }

    def _has_own_buffers(self) -> bool:
        """Whether buffers differ between ranks for good: nobody sends those of rank 0."""
        replicas = [each for each in self._training.model.modules() if isinstance(each, Replica)]
        return self._layout == "sharded" or (bool(replicas) and not replicas[0].broadcast_buffers)

    def _score(self, step: int) -> float | None:
        """What was logged of these very weights, to find the best."""
        session, name = self._session, self._habit.best
        if session is None or name is None or self._world.rank:
            return None
        at_step, score = session.latest(name) or (-1, math.nan)
        if at_step < 0 and not self._has_warned:
            self._has_warned = True
            mistakes.warn(f"best={name!r}: no such value was logged by step {step}")
        return score if at_step >= step - 1 and math.isfinite(score) else None

    def _say_logged(self) -> None:
        """What was logged up to a checkpoint is known before that is: a curve that goes on from there has no gap."""
        if self._session is not None:
            self._session.flush()

    def _say_saved(self, path: Path, manifest: Manifest) -> None:
        if self._session is not None:
            self._session.tell(
                Saved(rank=0, time=time.monotonic(), path=str(path), step=manifest.step, epoch=manifest.epoch)
            )


_claimed: weakref.WeakSet[Session] = weakref.WeakSet()
"""Sessions whose checkpoints a Loop has taken in hand."""

_OTHER_LOADER = (
    "the checkpoint lies in the middle of an epoch of another kind of loader, or of another number of ranks: there "
    "only ddpnb.loader(…) can go on, which was not used, then or now"
)


def _length_of(loader: Any) -> int | None:
    """Samples of a loader's data set; None where it does not say."""
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None


def _layout_of(model: nn.Module, world: World) -> str:
    """Who holds the weights: every rank all of them, each a part, or each its own."""
    modules = list(model.modules())
    if any(isinstance(each, FSDPModule) for each in modules):
        return "sharded"
    return "whole" if world.world_size == 1 or any(isinstance(each, Replica) for each in modules) else "apart"


def _seed_anew(step: int, rank: int) -> None:
    """Random numbers that no rank has drawn before."""
    seed = hashed(step, rank)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
