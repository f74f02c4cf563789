"""The fork server: a small process that has imported torch and forks workers in milliseconds.

It is the one server that `multiprocessing` keeps per process, started by us with a preload list. A kernel that another
library has already given a server works too, slower: `is_ours()` tells, and `doctor()` says so.

Runs in: kernel
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from . import runtime
from .names import FAILED, READY, name_of

_AT_START = ("LD_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "TORCH_", "PYTORCH_", "PYTHON", "MALLOC_", "DNNL_")
"""Prefixes of variables that libraries read once, as they are loaded: in a forked worker it is too late for them."""
_SETTLED = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
"""Of these, what scikit-learn sets when it is imported, for the process that imports it: no reason for a new server."""


@dataclass(frozen=True, slots=True)
class _Server:
    pid: int
    environment: Mapping[str, str]
    """The variables of `_AT_START` that it was started with."""


_ours: _Server | None = None
_without_preload: int | None = None  # pid of a server that is not waited for
_retired: list[int] = []  # pids of servers that end with their last worker, and are then to be reaped
_lock = threading.RLock()


def prestart() -> None:
    """Start the worker server now, in the background, so that the first launch finds it ready.

    It takes a few seconds of another process's time and none of this one's; `%load_ext ddpnb` does it. Called again:
    no effect.
    """
    if sys.platform == "linux":
        ensure({})


def ensure(env: Mapping[str, str]) -> str | None:
    """Have a server whose start-up variables are those of this process and `env`.

    Returns a line for the user where something is slower than usual; None where nothing is.
    """
    global _ours
    wanted = {name: value for name, value in (os.environ | dict(env)).items() if _is_read_at_start(name)}
    with _lock:
        _reap_retired()
        state: Any = forkserver._forkserver
        note = None
        if _is_running(state):
            if _ours is None or state._forkserver_pid != _ours.pid:
                return "another library has started this process's fork server without torch: workers start slower"
            changed = sorted(name for name in wanted.keys() | _ours.environment.keys() if _differs(name, wanted))
            if not Path(state._forkserver_address).exists():
                changed = ["its socket"]  # swept away by whatever cleans temporary folders
            if not changed:
                return None
            note = f"the worker server was started anew, since {', '.join(changed)} changed"
            _retire(state)
        runtime.house_multiprocessing()
        others = [name for name in state._preload_modules if name not in ("__main__", "ddpnb.preload")]
        forkserver.set_forkserver_preload([*others, "ddpnb.preload"])
        with started_from_clean({**wanted, **_servers_own()}):
            forkserver.ensure_running()
        _ours = _Server(state._forkserver_pid, wanted)
        return note


def _servers_own() -> dict[str, str]:
    """Variables of the server alone."""
    own = {"OPENBLAS_NUM_THREADS": "1"}
    if Path(__file__).parents[1] != Path.cwd():
        own["PYTHONSAFEPATH"] = "1"  # a random.py beside the notebook must not become the server's
    return own


def is_ours() -> bool:
    """Whether the running fork server, if any, is one that we started."""
    state: Any = forkserver._forkserver
    return not _is_running(state) or (_ours is not None and state._forkserver_pid == _ours.pid)


def is_ready() -> bool:
    """Whether the server has imported what it is to import (or is not ours, or this is not Linux: nobody can tell)."""
    if _ours is None or _ours.pid == _without_preload or sys.platform != "linux":
        return True
    return name_of(_ours.pid) == READY or not is_running()  # where it died, starting a worker starts another


def has_failed() -> bool:
    """Whether the server could not import what it is to import."""
    return _ours is not None and name_of(_ours.pid) == FAILED


def do_without_preload() -> None:
    """Stop waiting for this server: what it was to preload it cannot find."""
    global _without_preload
    _without_preload = pid()


def is_running() -> bool:
    """Whether this process has a fork server, whoever started it."""
    return _is_running(forkserver._forkserver)


def pid() -> int | None:
    """The server's process id; None where it was never started by us."""
    return _ours.pid if _ours is not None else None


@contextmanager
def started_from_clean(environment: Mapping[str, str]) -> Iterator[None]:
    """Start a process here: with these variables, SIGINT blocked, and `__main__` not taken for a script.

    A kernel's interrupt may come at any moment; the child is to get as far as its own first line, where it unblocks.
    `multiprocessing` would run `__main__.__file__` in the child where there is one (VS Code sets it, `%run` too).
    """
    main = vars(sys.modules["__main__"])
    hidden = {name: main.pop(name) for name in ("__file__",) if name in main}
    spec, main["__spec__"] = main.get("__spec__"), None
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        main["__spec__"] = spec
        main.update(hidden)


def _is_read_at_start(name: str) -> bool:
    return name.startswith(_AT_START) and name not in _SETTLED


def _is_running(state: Any) -> bool:
    if state._forkserver_pid is None:
        return False
    try:
        # Without reaping: multiprocessing does that itself, and fails where nothing is left to reap.
        return os.waitid(os.P_PID, state._forkserver_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _differs(name: str, wanted: Mapping[str, str]) -> bool:
    return _ours is not None and wanted.get(name) != _ours.environment.get(name)


def _retire(state: Any) -> None:
    """Let go of the running server: it ends when its last worker has."""
    os.close(state._forkserver_alive_fd)
    Path(state._forkserver_address).unlink(missing_ok=True)
    _retired.append(state._forkserver_pid)
    state._forkserver_address = state._forkserver_alive_fd = state._forkserver_pid = None


def _reap_retired() -> None:
    for retired in _retired[:]:
        try:
            if os.waitpid(retired, os.WNOHANG)[0]:
                _retired.remove(retired)
        except ChildProcessError:
            _retired.remove(retired)
