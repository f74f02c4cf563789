"""Checkpoints on the disk: a folder each, whole or not there, and what proves that nothing in it has changed.

    checkpoints/step-00000120/
        manifest.json       format, step, epoch; size and sha256 of every other file, and the sha256 of all that
        model.pt            …
    checkpoints/.draft-step-00000144/

A checkpoint is written as a *draft* beside the others. Each file is hashed while it is written, and synced; the
manifest comes last; then the folder is renamed, and the folder around it synced. So a name `step-…` stands for a
checkpoint that was complete, whatever ended the process or the machine meanwhile, and a manifest that does not fit for
one that has been damaged since.

Runs in: both
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from .errors import CheckpointError

FORMAT = 1
"""Of the checkpoints that this version writes."""

MANIFEST = "manifest.json"
_SEAL = "sha256"
_FOLDER = "checkpoints"
_NAME = re.compile(r"step-([0-9]{8,})")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # what a file in a checkpoint is called: no path leads out of it
_DRAFT = ".draft-"
_DOOMED = ".doomed-"
_PREVIOUS = ".previous-"
_LEFT = re.compile(rf"(?P<prefix>{re.escape(_DRAFT)}|{re.escape(_DOOMED)})step-(?P<step>[0-9]{{8,}})")
_OF_VIEWERS = {".DS_Store", ".ipynb_checkpoints"}  # what a look into a folder may leave there
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)  # what a file system says that cannot sync a folder by itself
_CHUNK = 1 << 22  # bytes hashed at a time


@dataclass(frozen=True, slots=True)
class File:
    """What a file was when it was written."""

    size: int
    """In bytes."""
    sha256: str
    """Hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is in a checkpoint."""

    step: int
    """Optimizer steps made."""
    epoch: int
    """The first epoch that is still to be run, or to be finished."""
    world_size: int
    """Number of ranks that wrote it."""
    score: float | None = None
    """What is compared to find the best one; None where nothing is."""
    files: Mapping[str, File]


class Sink(Protocol):
    """What bytes can be written into."""

    def write(self, data: Any, /) -> int:
        """Write all of it."""


# ---- writing


def write(path: Path, fill: Callable[[Sink], object]) -> File:
    """Write a new file, hashed on the way, and have it on the disk before this returns.

    Args:
        path: of the file; one that is there is replaced.
        fill: writes the contents into what it is given.

    Raises:
        OSError: the disk is full, the folder read-only or gone.
    """
    with open(path, "wb", buffering=0) as file:
        hashing = _Hashing(file)
        try:
            fill(hashing)
            os.fsync(file.fileno())
        except Exception as error:
            cause = hashing.error or error  # torch.save tells of its own surprise, and not of the full disk
            if isinstance(cause, OSError) and cause.filename is None:
                cause.filename = str(path)
            raise cause from None
    return File(hashing.size, hashing.digest.hexdigest())


class _Hashing:
    """Passes bytes on to a file, and hashes them."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.size = 0
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.digest.update(view)
        self.size += len(view)
        done = 0
        try:
            while done < len(view):
                done += self._file.write(view[done:])  # unbuffered: may take less than it is given
        except OSError as error:
            self.error = error
            raise
        return len(view)

    def flush(self) -> None:
        """Nothing waits here."""


def write_json(path: Path, value: object) -> File:
    """Write a file of JSON as `write` does."""
    # A path that is no UTF-8 has surrogates in it, as an argument of the function may; `json.loads` takes them as well.
    text = json.dumps(value, indent=1, ensure_ascii=False).encode(errors="surrogatepass")
    return write(path, lambda sink: sink.write(text))


def folder_of(run: Path) -> Path:
    """Where a run's checkpoints lie."""
    return run / _FOLDER


def name_of(step: int) -> str:
    """Of the checkpoint after so many optimizer steps."""
    return f"step-{step:08d}"


def draft_of(target: Path) -> Path:
    """Where a checkpoint is written before it is published as `target`."""
    return target.with_name(_DRAFT + target.name)


def make_folder(path: Path) -> None:
    """Make a folder for good, where it is not there yet; the one around it has to be."""
    if not path.is_dir():
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def begin(target: Path) -> Path:
    """The draft of a checkpoint, made where it is not there yet; the folder around `checkpoints` has to be."""
    make_folder(target.parent)
    draft = draft_of(target)
    draft.mkdir(exist_ok=True)
    return draft


def hand_in(draft: Path, rank: int, files: Mapping[str, File]) -> None:
    """Say that this rank's files of a draft are complete; whoever publishes it waits for that.

    Through the file system, where the files themselves lie: a collective in a thread would get between those of the
    training.
    """
    unseen = draft / f".{_part_of(rank)}"
    write_json(unseen, {name: asdict(file) for name, file in files.items()})
    os.rename(unseen, draft / _part_of(rank))


def handed_in(draft: Path, rank: int) -> dict[str, File] | None:
    """The files that a rank has handed in; None as long as it has not. The word itself is taken away."""
    path = draft / _part_of(rank)
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    path.unlink()
    return {name: File(**each) for name, each in found.items()}


def _part_of(rank: int) -> str:
    return f"rank-{rank}.json"


def publish(draft: Path, target: Path, manifest: Manifest) -> None:
    """Make a complete draft the checkpoint `target`, for good: it survives a crash of the machine.

    One of that name gives way. `standing` finds whichever of the two there is, in whatever moment a crash comes.
    """
    contents = {"format": FORMAT, **asdict(manifest)}
    write_json(draft / MANIFEST, {**contents, _SEAL: _seal(contents)})
    sync_folder(draft)
    previous = _previous_of(target)
    if target.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(target, previous)
    os.rename(draft, target)
    sync_folder(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def standing(target: Path) -> Path:
    """`target`, or the one that was about to give way to it when a crash came."""
    previous = _previous_of(target)
    return previous if previous.exists() and not target.exists() else target


def _previous_of(target: Path) -> Path:
    return target.parent / f"{_PREVIOUS}{target.name}"  # not with_name: "/" has no name


def sync_folder(folder: Path) -> None:
    """Have the folder's list of names on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            error.filename = str(folder)
            raise
    finally:
        os.close(descriptor)


# ---- what is there


def published(run: Path) -> list[Path]:
    """The checkpoints of a run, highest step first; drafts are none."""
    return _published_in(folder_of(run))


def step_of(checkpoint: Path) -> int:
    """The optimizer steps made, as the folder's name says."""
    found = _NAME.fullmatch(checkpoint.name)
    assert found is not None, checkpoint
    return int(found[1])


def origin_of(run: Path) -> Path | None:
    """The checkpoint that a run went on from; None where it did not, or this is no run's folder.

    A run that found nothing left to do has none of its own.
    """
    try:
        origin = json.loads((run / "run.json").read_bytes())["resumed_from"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return Path(origin) if isinstance(origin, str) else None


def is_checkpoint(path: Path) -> bool:
    """Whether this is a checkpoint's folder, whole or damaged."""
    return (path / MANIFEST).is_file()


def strangers_in(checkpoint: Path) -> list[str]:
    """Names of what lies in a checkpoint's folder and is not the checkpoint's.

    Raises:
        CheckpointError: the folder is none of a checkpoint's.
    """
    own = {MANIFEST, *read_manifest(checkpoint).files, *_OF_VIEWERS}
    return sorted(name for name in os.listdir(checkpoint) if name not in own)


def read_manifest(checkpoint: Path) -> Manifest:
    """What a checkpoint says of itself.

    Raises:
        CheckpointError: it says nothing, or nothing that this version understands.
    """
    path = checkpoint / MANIFEST
    if checkpoint.is_dir() and not path.is_file():
        raise CheckpointError(f"{checkpoint} is no checkpoint: there is no {MANIFEST} in it")
    found = read_json(path)
    sealed = found.pop(_SEAL, None)
    is_whole = sealed == _seal(found)
    version = found.pop("format", None)
    if isinstance(version, int) and version > FORMAT:
        raise CheckpointError(
            f"{checkpoint} was written by a newer ddpnb (format {version}; this one reads {FORMAT}): upgrade ddpnb"
        )
    try:
        if version != FORMAT or not is_whole:
            raise ValueError
        files = {name: _file(name, **each) for name, each in found.pop("files").items()}
        return _checked(Manifest(files=files, **found))
    except (AttributeError, TypeError, ValueError, KeyError):
        raise CheckpointError(f"{path} is damaged, or no manifest of a checkpoint") from None


def _seal(contents: Mapping[str, Any]) -> str:
    """The sha256 of a manifest's own contents, in whatever order and with whatever blanks they are written."""
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of JSON.

    Raises:
        CheckpointError: there is none that can be read.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} cannot be read: it holds no object")
    return found


def _file(name: str, size: object, sha256: object) -> File:
    if not _FILE.fullmatch(name) or not isinstance(size, int) or not isinstance(sha256, str):
        raise ValueError
    return File(size, sha256)


def _checked(manifest: Manifest) -> Manifest:
    counts = (manifest.step, manifest.epoch, manifest.world_size)
    if not all(isinstance(each, int) and each >= 0 for each in counts):
        raise ValueError
    if not isinstance(manifest.score, int | float | None):
        raise ValueError
    return manifest


def verify(checkpoint: Path) -> Manifest:
    """Read every byte of a checkpoint and compare.

    Raises:
        CheckpointError: a file is missing, shorter or longer than it was, or other bytes are in it.
    """
    manifest = read_manifest(checkpoint)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing leaves the interpreter to others
        for checked in [pool.submit(check, checkpoint / name, file) for name, file in manifest.files.items()]:
            checked.result()
    return manifest


def check(path: Path, file: File) -> None:
    """Raise CheckpointError where a file is not what it was."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for
            raise CheckpointError(f"{path} is damaged: it is no file")
        if found.st_size != file.size:
            raise CheckpointError(f"{path} is damaged: {found.st_size:,} bytes, and {file.size:,} were written")
        digest = hashlib.sha256()
        with open(path, "rb", buffering=0) as opened:
            while chunk := opened.read(_CHUNK):
                digest.update(chunk)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if digest.hexdigest() != file.sha256:
        raise CheckpointError(f"{path} is damaged: its sha256 is not that of what was written")


# ---- making room


def prune(run: Path, keep: int, protected: Iterable[Path] = ()) -> None:
    """Remove all but the newest `keep` checkpoints and the protected ones, and what crashed saves have left.

    What cannot be removed stays: a checkpoint too many is no failure.
    """
    folder = folder_of(run)
    found = _published_in(folder)
    for each in set(found[keep:]).difference(protected):
        _doom(each)
    newest = step_of(found[0]) if found else 0
    for left in _left_in(folder, newest):
        shutil.rmtree(left, ignore_errors=True)


def _left_in(folder: Path, newest: int) -> Iterator[Path]:
    """Doomed checkpoints, and drafts that nobody writes at: those of earlier steps than the newest that is complete."""
    for left in _listed(folder):
        found = _LEFT.fullmatch(left.name)
        if found is not None and (found["prefix"] == _DOOMED or int(found["step"]) < newest):
            yield left


def _published_in(folder: Path) -> list[Path]:
    found = [path for path in _listed(folder) if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def _listed(folder: Path) -> list[Path]:
    """What is in a folder; nothing where there is none.

    Raises:
        CheckpointError: nobody can tell. A training that begins anew because its checkpoints were out of reach for a
            moment would do so without a word.
    """
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from None


def _doom(checkpoint: Path) -> None:
    """Take a checkpoint's name away, in one step: it is whole or gone, also where the removal is cut short."""
    doomed = checkpoint.with_name(_DOOMED + checkpoint.name)
    shutil.rmtree(doomed, ignore_errors=True)
    with suppress(OSError):
        os.rename(checkpoint, doomed)
