"""Which checkpoints a new run may go on from, the one to prefer first.

    launch(train, run_dir="runs/digits", resume=True)       # all of all runs there, newest run first
    launch(train, resume="runs/digits/2026-11-30_14-05-12_train")
    launch(train, resume="runs/digits/2026-11-30_14-05-12_train/checkpoints/step-00000120")

They are candidates: whoever loads one finds out whether it is whole, and takes the next where it is not.

Runs in: kernel
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from . import checkpoints, lock
from .draw import words
from .errors import LaunchError
from .folder import absolute, is_run, runs_in
from .plan import Options

_ORPHANS_PATIENCE = 30.0
"""Seconds that workers whose kernel is gone may take to save, before a launch gives up waiting for them."""
_LOOK_AGAIN = 0.05


def run_dir_of(options: Options) -> Path | None:
    """Where a new run's folder goes: run_dir, else around the run that it goes on from; None: nothing is written.

    Raises:
        FileNotFoundError: there is nothing at the path to resume from.
        ValueError: run_dir was not given, and what is resumed lies in no run's folder.
    """
    if options.run_dir is not None:
        return absolute(options.run_dir)
    if isinstance(options.resume, bool):
        return None
    resume = absolute(options.resume)
    _must_exist(resume)
    run = resume if is_run(resume) else resume.parent.parent
    if not is_run(run):
        raise ValueError(
            f"resume={os.fspath(options.resume)!r} is not in a run's folder: say where the new run goes, "
            "launch(…, run_dir='runs/digits', resume=…)"
        )
    return run.parent


def find(run_dir: Path, resume: bool | str | os.PathLike[str], *, is_restart: bool = False) -> list[Path]:
    """The candidates.

    Args:
        run_dir: in which the new run's folder will be.
        resume: as in `launch`.
        is_restart: torchrun has started the run again after a failure: it goes on from what it had saved itself.

    Raises:
        FileNotFoundError: there is nothing at the path to resume from.
        ValueError: what is there is neither a checkpoint nor a run's folder.
        LaunchError: the run to go on from may still be going on.
    """
    given = [] if isinstance(resume, bool) else _of_path(resume)
    if resume is True or is_restart:
        runs = runs_in(run_dir)
        for newest in runs[:1]:
            _await_free(newest)
        if given:
            # A run that was told where to go on from, started again: its own come first, and no other run's.
            return [*checkpoints.published(runs[0]), *given] if runs else given
        return [found for run in runs for found in checkpoints.published(run)]
    return given


def newest(run_dir: Path) -> Path | None:
    """What resume=True would try first as things stand, without waiting for anybody; None: a fresh start."""
    found = (checkpoint for run in runs_in(run_dir) for checkpoint in checkpoints.published(run))
    return next(found, None)


def _of_path(resume: str | os.PathLike[str]) -> list[Path]:
    path = absolute(resume)
    _must_exist(path)
    if is_run(path):
        _await_free(path)
        found = checkpoints.published(path)
        if not found:
            raise FileNotFoundError(f"resume={os.fspath(resume)!r}: that run has no checkpoint")
        return found
    if checkpoints.is_checkpoint(path) or path in checkpoints.published(path.parent.parent):
        return [path]
    raise ValueError(
        f"resume={os.fspath(resume)!r} is neither a checkpoint nor a run's folder; resume=True goes on from the newest "
        "run in run_dir"
    )


def _must_exist(resume: Path) -> None:
    if not resume.exists():
        raise FileNotFoundError(
            f"resume={os.fspath(resume)!r} does not exist; it is a checkpoint's folder, or a run's folder"
        )


def _await_free(run: Path) -> None:
    """Wait until nobody writes into a run's folder.

    Raises:
        LaunchError: its kernel may live, or its workers have not ended within `_ORPHANS_PATIENCE`.
    """
    deadline = time.monotonic() + _ORPHANS_PATIENCE
    while (found := lock.holder(run)) is not None:
        if found.may_live:
            who = f"by this kernel (pid {found.pid})" if found.pid == os.getpid() else f"by {found}"
            raise LaunchError(f"{words.path(run)} is still being trained {who}: stop it first")
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{words.path(run)}: its kernel ({found}) is gone, and its workers have been saving for "
                f"{_ORPHANS_PATIENCE:.0f} s; launch again when they have ended, or end them"
            )
        time.sleep(_LOOK_AGAIN)
