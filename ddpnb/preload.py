"""What the fork server imports before it forks workers: torch, and what DDP's constructor imports lazily.

Importing this module *is* its use: `multiprocessing.forkserver` preloads it by name. It must never raise, since an
exception would end the server for every user of it in the kernel, and it must leave one thread and no CUDA behind.
Only modules of site-packages are imported: a user's own would be frozen as they were.

Runs in: the fork server
"""

from __future__ import annotations

import os
import signal
import sys
import traceback

from .names import FAILED, READY, name_process


def _preload() -> None:
    # A group of its own: an interrupt of the kernel reaches the kernel's group, and must not end the server or a
    # worker that has not yet left it. SIGINT came blocked from the launcher, so that none was lost until here.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.pop("PYTHONSAFEPATH", None)  # it kept the kernel's folder off our path
    sys.path[:] = [folder for folder in sys.path if folder not in ("", os.getcwd())]

    import ctypes  # noqa: F401
    import faulthandler  # noqa: F401
    import linecache  # noqa: F401
    import multiprocessing.popen_forkserver
    import multiprocessing.spawn  # noqa: F401

    import cloudpickle  # noqa: F401
    import numpy  # noqa: F401
    import threadpoolctl  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed
    import torch.nn.functional
    import torch.nn.parallel
    import torch.optim
    import torch.utils.data
    import torch.utils.data.distributed  # noqa: F401

    from . import context, group, payload, worker  # noqa: F401
    from .train import accumulation, checkpoint, loop  # noqa: F401


try:
    _preload()
    name_process(READY)  # the launcher waits for one of these names
except BaseException:  # whatever it is, the server must live: its workers then import for themselves, slower
    traceback.print_exc()
    name_process(FAILED)
