"""Writing the checkpoints of a run while its training goes on.

At a step's boundary the training's thread only notes what there is and copies what the next forward would change. A
thread copies the rest, writes, hashes and syncs, and tells rank 0 through the file system; rank 0's thread publishes
once every rank has told. No thread but the training's own ever enters a collective: that something went wrong rides in
the ballot of the next step, and is raised on all ranks there.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .. import checkpoints
from ..checkpoints import File, Manifest
from ..context import device
from ..errors import CheckpointError
from ..world import World
from .reduction import gather
from .snapshot import write_file
from .staging import Later, Stage

Mode = Literal["min", "max"]

_LOOK = 0.005
"""Seconds between two looks for what other ranks have written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A checkpoint on its way."""

    step: int
    epoch: int
    score: float | None
    files: Mapping[str, Any]  # {name of a file of this rank: what goes into it}


class Saver:
    """Writes this rank's part of checkpoints, one after the other; on rank 0 it also publishes them.

    Args:
        run: the run's folder.
        world: where this process stands.
        keep: how many checkpoints stay.
        mode: whether the best score is the least or the greatest.
        before_handing_in: called by each rank's thread when its part is written.
        on_saved: called by rank 0's thread with each new checkpoint.
    """

    def __init__(
        self,
        run: Path,
        world: World,
        keep: int,
        mode: Mode,
        *,
        before_handing_in: Callable[[], None],
        on_saved: Callable[[Path, Manifest], None],
    ) -> None:
        self.stage = Stage(device())
        self._run, self._world, self._keep, self._mode = run, world, keep, mode
        self._before_handing_in, self._on_saved = before_handing_in, on_saved
        self._pool = ThreadPoolExecutor(1, "ddpnb-saver")  # whoever leaves the function waits until all is written
        self._work: Future[None] | None = None
        self._is_given_up = threading.Event()
        self._error: str | None = None
        self._has_torn = False
        self._folder: Path | None = None  # of the draft at hand

    def open(self) -> None:
        """Have the thread there before it is needed: one that is being started keeps the one that starts it waiting."""
        self._pool.submit(lambda: None)

    def close(self) -> None:
        """No more is to be written than what has been begun."""
        self._pool.shutdown(wait=False)

    @property
    def has_failed(self) -> bool:
        """This rank could not write. Known to the others once `raise_failure` was called on all of them."""
        return self._error is not None

    @property
    def is_busy(self) -> bool:
        """This rank is still writing."""
        return self._work is not None and not self._work.done()

    @property
    def has_torn(self) -> bool:
        """The last one was given up, since a forward has changed what was being copied. It is copied at once now."""
        return self._has_torn and not self.is_busy

    def begin(self, draft: Draft) -> None:
        """Write it, beside the training. No rank may be busy, or have failed: `finish` waits for that."""
        self.stage.begin()
        self._has_torn = False
        self._work = self._pool.submit(self._save, draft)

    def finish(self) -> None:
        """Wait until all ranks' parts are written, and published; call it on all ranks.

        Raises:
            CheckpointError: a rank could not, on all ranks.
        """
        if self._world.rank:
            self._wait()
        errors = gather(self._error)
        if not any(errors):
            self._wait()
            errors = gather(self._error)  # rank 0 has published, or could not
        self._raise(errors)

    def _wait(self) -> None:
        """Until this rank's thread has nothing to do."""
        if self._work is not None:
            self._work.result()

    def raise_failure(self) -> None:
        """A rank has failed: raise its error on all ranks, which all call this at the same step."""
        self._raise(gather(self._error))

    def _raise(self, errors: list[str | None]) -> None:
        found = [(rank, error) for rank, error in enumerate(errors) if error]
        if not found:
            return
        self._give_up()
        (rank, error), *_ = found
        raise CheckpointError(f"rank {rank} could not save {error}{_standing(self._run)}")

    def _give_up(self) -> None:
        """Publish nothing of what is on its way, and be ready for another attempt."""
        self._is_given_up.set()
        self._wait()
        self._is_given_up.clear()
        self._error = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)  # it may be what has filled the disk

    # ---- in the thread

    def _save(self, draft: Draft) -> None:
        try:
            self.stage.copy()
            if self.stage.torn:
                self._has_torn = True
                return
            target = checkpoints.folder_of(self._run) / checkpoints.name_of(draft.step)
            self._folder = folder = checkpoints.begin(target)
            files = {name: write_file(folder / name, _tree(content)) for name, content in draft.files.items()}
            self._before_handing_in()
            if self._world.rank:
                checkpoints.hand_in(folder, self._world.rank, files)
            else:
                self._publish(draft, folder, target, files)
        except Exception as error:
            self._error = f"step {draft.step}: {type(error).__name__}: {error}"

    def _publish(self, draft: Draft, folder: Path, target: Path, files: dict[str, File]) -> None:
        for rank in range(1, self._world.world_size):
            while (part := checkpoints.handed_in(folder, rank)) is None:
                if self._is_given_up.wait(_LOOK):
                    return
            files |= part
        manifest = Manifest(
            step=draft.step, epoch=draft.epoch, world_size=self._world.world_size, score=draft.score, files=files
        )
        checkpoints.publish(folder, target, manifest)
        self._on_saved(target, manifest)
        checkpoints.prune(self._run, self._keep, _best(self._run, self._mode))


def _tree(content: Any) -> Any:
    return content.tree if isinstance(content, Later) else content


def _best(run: Path, mode: Mode) -> list[Path]:
    """The checkpoint with the best score, if any has one; nan is the worst."""
    scored: list[tuple[float, int, Path]] = []
    for found in checkpoints.published(run):
        try:
            score = checkpoints.read_manifest(found).score
        except CheckpointError:
            continue
        if score is not None and not math.isnan(score):
            scored.append((score if mode == "min" else -score, checkpoints.step_of(found), found))
    return [min(scored)[-1]] if scored else []


def _standing(run: Path) -> str:
    try:
        found = checkpoints.published(run)
    except CheckpointError:
        return ""
    return f"; the checkpoint of step {checkpoints.step_of(found[0])} stands" if found else "; there is none before it"


# ---- how often

Every = int | str


def parse_every(every: object) -> tuple[int | None, float | None]:
    """(steps, seconds) between checkpoints, one of them or none: with "epoch" they come at the end of each.

    Raises:
        TypeError, ValueError: it is none of what `Loop` takes.
    """
    units = {"s": 1.0, "min": 60.0, "h": 3600.0}
    if isinstance(every, int) and not isinstance(every, bool):
        if every < 1:
            raise ValueError(f"checkpoint_every={every}: at least 1 step")
        return every, None
    if not isinstance(every, str):
        raise TypeError(f"checkpoint_every={every!r}: a number of steps, 'epoch', or a time such as '10min'")
    number = every.rstrip("smihn ")
    unit = every.removeprefix(number).strip()
    if every == "epoch":
        return None, None
    try:
        seconds = float(number) * units[unit]
    except (KeyError, ValueError):
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"checkpoint_every={every!r}: a number of steps, 'epoch', or a time: '30s', '10min', '2h'")
    return None, seconds
