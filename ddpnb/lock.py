"""The lock on a run's folder: it tells whether somebody may still write there, and whose run it is.

The kernel holds it and, through the very same open file, every worker: it is free exactly when nobody is left, whoever
was killed in between. In it stands who the kernel is, so that another one knows whether to wait or to refuse.

Runs in: kernel
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

_NAME = "lock"
_SAME_MOMENT = 2.0  # seconds: the clock that a process's start is told by is set right now and then
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # what a file system without locks says


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The kernel whose run a lock belongs to."""

    host: str
    pid: int
    started: float
    """Wall-clock time of the process's start: a pid alone may be reused."""

    @classmethod
    def this_process(cls) -> Holder:
        """The one that this kernel is."""
        return cls(host=socket.gethostname(), pid=os.getpid(), started=psutil.Process().create_time())

    @property
    def may_live(self) -> bool:
        """Whether that process lives; on another host nobody here can tell, and it is taken for living."""
        if self.host != socket.gethostname():
            return True
        try:
            process = psutil.Process(self.pid)
            is_it = abs(process.create_time() - self.started) < _SAME_MOMENT
            return is_it and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def take(run: Path) -> int:
    """Lock a new run's folder; the descriptor, for the workers to inherit. Without effect where there are no locks."""
    lock = os.open(run / _NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.write(lock, json.dumps(asdict(Holder.this_process())).encode())
        fcntl.flock(lock, fcntl.LOCK_EX)  # a reader may be looking at it for a moment
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(lock)
            raise
    _held.add(lock)
    return lock


def release(lock: int) -> None:
    """Give a lock up: nobody of this kernel's writes any more."""
    _held.discard(lock)
    try:
        # Not only closed: a process that got away from its rank may have inherited the file.
        fcntl.flock(lock, fcntl.LOCK_UN)
    except OSError:
        pass  # there are no locks on this file system
    os.close(lock)


def holder(run: Path) -> Holder | None:
    """Whose run holds the lock of a folder; None where nobody can write there any more."""
    try:
        lock = os.open(run / _NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_holder(os.read(lock, 1 << 12))
    except OSError:
        return None  # there are no locks on this file system
    finally:
        os.close(lock)
    return None


def _read_holder(text: bytes) -> Holder:
    try:
        found = json.loads(text)
        return Holder(host=str(found["host"]), pid=int(found["pid"]), started=float(found["started"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return Holder(host="an unknown host", pid=0, started=0.0)


_held: set[int] = set()  # descriptors of locks


def _let_go() -> None:
    """In a forked child of the kernel: its end must not be waited for. A worker has a descriptor of its own."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
