"""The kernel's private folder for sockets, and the sweeping of what killed kernels left.

`multiprocessing` puts its sockets into a folder that only a normal exit removes. Ours has the kernel's pid and birth in
its name, so that the next kernel knows which folders belong to nobody any more.

Runs in: kernel
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import stat
import tempfile
from multiprocessing import process as mp_process
from pathlib import Path

import psutil

_LONGEST = 40
"""Longest base folder: the path of a unix socket has about 100 characters at most, and ours take 64 of them."""


def folder() -> Path:
    """This kernel's folder, made on first use, readable by the user alone, removed at exit.

    Made anew where whatever cleans temporary folders has removed it.
    """
    own = _own()
    if not own.is_dir():
        _base()  # it may have been removed as well
        own.mkdir(mode=0o700, exist_ok=True)
        sweep()
    return own


@functools.cache
def _own() -> Path:
    return _base() / f"{os.getpid()}-{_birth(os.getpid())}"


def _remove_own() -> None:
    if _own.cache_info().currsize and os.getpid() == _pid:  # a forked child may come here too
        shutil.rmtree(_own(), ignore_errors=True)


_pid = os.getpid()
# Registered before the launcher registers the end of its workers, so that it runs after it: they live in there.
atexit.register(_remove_own)


def house_multiprocessing() -> None:
    """Let the kernel's own `multiprocessing` sockets, the fork server's among them, live in our folder."""
    config = mp_process.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is None:
        config["tempdir"] = str(folder())


def sweep() -> list[Path]:
    """Remove the folders of kernels that are gone; returns them."""
    gone = [found for found in _base().iterdir() if not _is_alive(found.name)]
    for found in gone:
        shutil.rmtree(found, ignore_errors=True)
    return gone


def _base() -> Path:
    system = tempfile.gettempdir()
    base = Path(system if len(system) <= _LONGEST else "/tmp") / f"ddpnb-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{base} is not a folder of this user alone; remove it, or set TMPDIR to another place")
    return base


def _is_alive(name: str) -> bool:
    pid, _, birth = name.partition("-")
    return pid.isdigit() and birth == _birth(int(pid))


def _birth(pid: int) -> str | None:
    """When the process was started, as a word; None where there is no such process. A pid alone may be reused."""
    try:
        return str(int(psutil.Process(pid).create_time() * 100))
    except psutil.Error:
        return None
