"""A run's folder: what it was launched with, what was said, what was printed, its checkpoints; and a lock.

    runs/digits/                            run_dir
        2026-11-30_14-05-12_train/          one run; nothing of an earlier one is ever overwritten
            run.json                        name, function, arguments, options, versions, where and when
            lock                            whose it is, and whether anybody may still write here: `lock`
            journal.jsonl                   what was said of the run: `journal`
            output/rank-0.txt               what a rank printed
            checkpoints/step-00000120/      `checkpoints`

Runs in: kernel
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import os
import platform
import re
import reprlib
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from . import checkpoints, lock
from .draw import words
from .errors import LaunchError
from .plan import Options, Plan
from .state import RunState

FORMAT = 1
"""Of the folders that this version writes."""

JOURNAL = "journal.jsonl"
_DESCRIPTION = "run.json"
_OUTPUT = "output"
_CHECKPOINTS = "checkpoints"
_NAME_LENGTH = 40  # characters of a run's name in its folder's; four bytes each at most, of 255 that a name may have
_ARGUMENT_LENGTH = 2000  # characters of an argument in JSON
_REPR_LENGTH = 200  # characters of one that is none
_MOST_RANKS = 1 << 16  # of a description that is believed


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """The folder of a run that is being made by this kernel."""

    path: Path
    """Absolute."""
    lock: int
    """Descriptor of the open lock, for the workers to inherit."""
    candidates: tuple[Path, ...]
    """Checkpoints to resume from, absolute, the one to prefer first; empty: a fresh start."""
    arguments: str
    """The function's arguments, a JSON object."""

    def release(self) -> None:
        """Let go of the lock; nobody of ours writes any more."""
        lock.release(self.lock)

    def discard(self) -> None:
        """Remove it all: the run has not begun."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()


# ---- making one


def make(
    run_dir: Path,
    options: Options,
    plan: Plan,
    state: RunState,
    function: Callable[..., Any],
    arguments: str,
    candidates: tuple[Path, ...],
) -> Folder:
    """Make the folder of a new run, locked.

    Args:
        run_dir: in which it is made, absolute.
        options: as they were asked for.
        plan: what they amount to.
        state: of the run, before any message.
        function: what is called.
        arguments: as `arguments_of` gives them.
        candidates: checkpoints to resume from, the one to prefer first.

    Raises:
        ValueError: `run_dir` is the folder of a run.
        LaunchError: nothing can be made there.
    """
    if is_run(run_dir):
        raise ValueError(
            f"run_dir={os.fspath(run_dir)!r} is the folder of one run: pass the one around it, and resume=… to go on "
            "from that run"
        )
    now = datetime.now().astimezone()
    with ExitStack() as if_it_fails:
        try:
            path = _make(run_dir, f"{now:%Y-%m-%d_%H-%M-%S}_{_safe(plan.name)}")
            if_it_fails.callback(shutil.rmtree, path, ignore_errors=True)
            held = lock.take(path)
            if_it_fails.callback(lock.release, held)
            for part in (_OUTPUT, _CHECKPOINTS):
                (path / part).mkdir()
            _write(path, _description(options, plan, function, arguments, state, now))
            for folder in (path, run_dir):  # a checkpoint that is on the disk needs a way to it
                checkpoints.sync_folder(folder)
        except OSError as error:
            raise LaunchError(
                f"run_dir={os.fspath(run_dir)!r}: no folder can be made there: {error.strerror or error}. Pass another "
                "one, or none, and nothing is written"
            ) from error
        if_it_fails.pop_all()
    return Folder(path=path, lock=held, candidates=candidates, arguments=arguments)


def absolute(path: str | os.PathLike[str]) -> Path:
    """The path from the root, as it is meant now: the kernel may change its directory later."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def _make(run_dir: Path, name: str) -> Path:
    """A new folder of this name, or with a number behind it. `mkdir` decides: two launches never get the same."""
    run_dir.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = run_dir / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("there is always another number")


def _safe(name: str) -> str:
    """A name that every file system takes."""
    return re.sub(r"[^\w.]+", "-", name)[:_NAME_LENGTH].strip("-.") or "run"


# ---- what a run was launched with


def arguments_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The arguments of a call by name, defaults included, as a JSON object.

    What is no JSON is there as its repr, without the address that is another in each process; what is long is cut.
    """
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        named: Mapping[str, Any] = bound.arguments
    except (TypeError, ValueError):  # a builtin that does not tell
        named = {"args": args, **kwargs}
    return json.dumps({name: _plain(value) for name, value in named.items()})


def _plain(value: object) -> object:
    """The value if JSON has a word for it that is not too long, else its repr, shortened."""
    try:
        if len(json.dumps(value)) <= _ARGUMENT_LENGTH:
            return value
    except (TypeError, ValueError, RecursionError):
        pass
    return words.cut(re.sub(r" at 0x[0-9a-f]+", "", _repr.repr(value)), _REPR_LENGTH)


_repr = reprlib.Repr()  # looks at a few items of a container only, and a __repr__ that raises is no matter
_repr.maxother = _repr.maxstring = 2 * _REPR_LENGTH


def _description(
    options: Options, plan: Plan, function: Callable[..., Any], arguments: str, state: RunState, now: datetime
) -> dict[str, object]:
    asked = {option.name: getattr(options, option.name) for option in fields(Options)}
    # Of variables the names alone: their values are where people keep keys.
    asked |= {"env": sorted(options.env or {}), "run_dir": _text(options.run_dir), "resume": _text(options.resume)}
    while isinstance(function, functools.partial):
        function = function.func
    named = getattr(function, "__qualname__", type(function).__qualname__)
    return {
        "format": FORMAT,
        "name": plan.name,
        "function": f"{getattr(function, '__module__', None) or '?'}.{named}",
        "arguments": json.loads(arguments),
        "options": asked,
        "world_size": state.world_size,
        "ranks": [each.rank for each in state.ranks],
        "backend": plan.backend,
        "threads": plan.threads,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": now.isoformat(),
        "versions": {
            "python": platform.python_version(),
            "ddpnb": sys.modules[__package__].__version__,
            **{name: _version(name) for name in ("torch", "numpy")},
        },
        "resumed_from": None,
        "cells": dict(state.cells),
    }


def _text(path: object) -> object:
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def note_resumed(run: Path, checkpoint: str) -> None:
    """Write into a run's description what it goes on from.

    Raises:
        OSError: it cannot be written.
        ValueError: it is damaged.
    """
    _write(run, describe(run) | {"resumed_from": checkpoint})


def _write(run: Path, description: Mapping[str, object]) -> None:
    """Write run.json in one step: what has one is a run's folder."""
    draft = run / f".{_DESCRIPTION}"
    text = json.dumps(description, indent=1, ensure_ascii=False)
    draft.write_bytes(encoded(text + "\n"))
    draft.replace(run / _DESCRIPTION)


def encoded(text: str) -> bytes:
    """JSON as UTF-8; of a path that is none, JSON's own escapes."""
    return text.encode(errors="backslashreplace")


# ---- what is there


def is_run(path: Path) -> bool:
    """Whether this is the folder of a run."""
    return (path / _DESCRIPTION).is_file()


def runs_in(run_dir: Path) -> list[Path]:
    """The folders of runs in a run_dir, newest first."""
    try:
        found = [path for path in run_dir.iterdir() if is_run(path)]
    except OSError:
        return []
    return sorted(found, key=_age, reverse=True)


def _age(run: Path) -> tuple[float, str]:
    """What runs are sorted by: when they were launched. Not by their names, in which an hour comes twice a year."""
    try:
        return datetime.fromisoformat(json.loads((run / _DESCRIPTION).read_bytes())["started"]).timestamp(), run.name
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return run.stat().st_mtime, run.name


def describe(run: Path) -> dict[str, Any]:
    """What a run was launched with.

    Raises:
        ValueError: it is damaged, or was written by a newer version.
        OSError: it cannot be read.
    """
    path = run / _DESCRIPTION
    try:
        found = json.loads(path.read_bytes())
        format_found = found["format"]
        is_sound = format_found != FORMAT or _is_sound(found)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        is_sound = False
    if not is_sound:
        raise ValueError(f"{words.path(path)} is damaged: it does not describe a run")
    if format_found != FORMAT:
        raise ValueError(
            f"{words.path(run)} was written by another ddpnb (format {format_found!r}, this one reads {FORMAT}): "
            "upgrade ddpnb"
        )
    return dict(found)


def _is_sound(found: dict[str, Any]) -> bool:
    """Whether a description has all that a reader relies on."""
    datetime.fromisoformat(found["started"]).timestamp()
    ranks, world_size = found["ranks"], found["world_size"]
    return (
        0 < len(ranks) <= world_size <= _MOST_RANKS
        and ranks == list(range(int(ranks[0]), int(ranks[0]) + len(ranks)))
        and isinstance(found["name"], str)
        and isinstance(found["backend"], str | None)
        and all(isinstance(word, str) for pair in found["cells"].items() for word in pair)
    )


def output_of(run: Path, rank: int) -> Path:
    """The file of what a rank printed."""
    return run / _OUTPUT / f"rank-{rank}.txt"
