"""Going on from a checkpoint: rank 0 decides which, all ranks load the same.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import checkpoints
from ..checkpoints import Manifest
from ..context import current_session
from ..errors import CheckpointError
from ..messages import Noted, Resumed
from ..world import World
from . import snapshot
from .frames import decoded
from .reduction import gather
from .snapshot import Tree


@dataclass(frozen=True, slots=True)
class Found:
    """What all ranks have agreed on."""

    run: Path | None
    """The run's folder; None: nothing is saved."""
    checkpoint: Path | None
    """Where to go on from; None: a fresh start."""


def agree() -> Found:
    """What rank 0 has been told, and which checkpoint it found whole; call it on all ranks.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged; on all ranks.
    """
    own = _choice()
    choice = gather(own)[0]
    for note in choice["notes"]:
        say(note)
    if choice["error"]:
        raise CheckpointError(choice["error"])
    run, checkpoint = (None if choice[name] is None else Path(choice[name]) for name in ("run", "checkpoint"))
    if checkpoint is not None:
        for rank, text in enumerate(gather(difference(checkpoint, choice["seal"]))):
            if text:
                raise CheckpointError(f"rank {rank}: {text}")
    return Found(run, checkpoint)


def _choice() -> dict[str, Any]:
    session = current_session()
    choice: dict[str, Any] = dict.fromkeys(("run", "checkpoint", "seal", "error")) | {"notes": []}
    if session is None or session.place.rank or session.folder is None:
        return choice
    choice["run"] = str(session.folder)
    damage = []
    for candidate in session.candidates:
        try:
            checkpoints.verify(candidate)
        except CheckpointError as error:
            damage.append(str(error))
            continue
        choice["checkpoint"], choice["seal"] = str(candidate), seal(candidate)
        break
    if damage and choice["checkpoint"] is None:
        choice["error"] = (
            f"there is no whole checkpoint to resume from: {damage[0]}{_and_more(damage)}; resume=False begins afresh"
        )
    elif damage:
        choice["notes"] = [f"{each}; an earlier checkpoint is used" for each in damage]
    return choice


def _and_more(damage: Sequence[str]) -> str:
    return f" (and {len(damage) - 1} more)" if len(damage) > 1 else ""


def seal(checkpoint: Path) -> str | None:
    """Which tells this checkpoint from any other; None where there is none.

    A folder's is that of its manifest, which has the digests of all files.
    """
    try:
        with open(checkpoint if checkpoint.is_file() else checkpoint / checkpoints.MANIFEST, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def difference(checkpoint: Path, expected: str | None) -> str | None:
    """What is to be said where this rank does not see the checkpoint that rank 0 has found whole."""
    if seal(checkpoint) == expected:
        return None
    return (
        f"{checkpoint} is not what rank 0 has found there: it has been replaced meanwhile, or this node does not reach "
        "it under the same path"
    )


def say(text: str) -> None:
    """A note in the run's view, once for all ranks."""
    session = current_session()
    if session is not None and session.place.rank == 0:
        session.tell(Noted(time=time.monotonic(), text=text))


def say_resumed(checkpoint: Path, manifest: Manifest) -> None:
    """Tell the kernel, which shows it and joins the curves; rank 0 does."""
    session = current_session()
    if session is not None and session.place.rank == 0:
        session.tell(
            Resumed(rank=0, time=time.monotonic(), path=str(checkpoint), step=manifest.step, epoch=manifest.epoch)
        )


# ---- reading


class Reader:
    """The contents of a checkpoint, for one rank.

    Args:
        checkpoint: its folder.
        world: where this process stands.
    """

    def __init__(self, checkpoint: Path, world: World) -> None:
        self.checkpoint = checkpoint
        self.manifest = checkpoints.read_manifest(checkpoint)
        self.world = world
        self.record: dict[str, Any] = checkpoints.read_json(self._path("state", ".json"))
        """What is in `state.json`."""
        self._tensors: Tree | None = None

    def holds(self, name: str) -> bool:
        """Whether the tree of `name` was saved."""
        return not self.manifest.files.keys().isdisjoint((f"{name}.pt", f"{name}-0.pt"))

    def tree(self, name: str) -> Tree:
        """The whole tree of `name`, "model" or "optimizer", whoever has written its parts.

        Raises:
            CheckpointError: there is none in it.
        """
        if f"{name}.pt" in self.manifest.files:
            return snapshot.load(self._path(name, ".pt"))
        if not self.holds(name):
            raise CheckpointError(f"{self.checkpoint} was saved without {name}=")
        parts = range(self.manifest.world_size)
        return snapshot.joined([snapshot.load(self._path(name, f"-{rank}.pt")) for rank in parts])

    def of_rank(self) -> Tree | None:
        """What is this rank's own; None where it was saved by another number of ranks."""
        if self.world.world_size != self.manifest.world_size:
            return None
        return snapshot.load(self._path("rank", f"-{self.world.rank}.pt"))

    def state_of(self, name: str) -> Any:
        """What the state of an object was that is neither model nor optimizer."""
        if self._tensors is None and "state.pt" in self.manifest.files:
            self._tensors = snapshot.load(self._path("state", ".pt"))
        tensors = self._tensors
        return decoded(self.record["objects"][name], lambda place: tensors[place].clone())  # type: ignore[index]

    def _path(self, name: str, rest: str) -> Path:
        """Of a file that was compared with what had been written: one that the manifest does not know was not."""
        if f"{name}{rest}" not in self.manifest.files:
            raise CheckpointError(f"{self.checkpoint} has no {name}{rest} among its files")
        return self.checkpoint / f"{name}{rest}"


# ---- what was different


def versions() -> dict[str, str]:
    """Of what decides which bits come out."""
    return {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, in words: ["lr 0.1 → 0.05"]."""
    return [
        f"{name} {then.get(name, 'nothing')} → {now.get(name, 'nothing')}"
        for name in dict.fromkeys([*then, *now])
        if then.get(name) != now.get(name)
    ]
