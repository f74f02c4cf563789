"""This process as a member of its process group, whoever made it: ddpnb, torchrun's variables, the user.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

import atexit
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from ..context import current_session, device
from ..world import LOOPBACK, World, is_under_torchrun

_TIMEOUT = 300.0
"""Seconds that a collective may take, as `launch` has it."""


def join() -> World:
    """This process's place in its process group, which is made now where there is none.

    Raises:
        RuntimeError: launched with backend=None, the function has made no group yet.
    """
    if not dist.is_initialized():
        _make_group()
    return World(rank=dist.get_rank(), world_size=dist.get_world_size())


def _make_group() -> None:
    """Make the group, which lasts to the end of the process.

    As every script for torchrun does:

        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        ...
        dist.destroy_process_group()
    """
    if current_session() is not None:
        raise RuntimeError(
            "there is no process group: launched with backend=None, the function has to call "
            "torch.distributed.init_process_group() first"
        )
    here = device()
    backend = "gloo"
    if here.type == "cuda":
        torch.cuda.set_device(here)
        backend = "nccl"
    if is_under_torchrun():
        dist.init_process_group(backend, timeout=timedelta(seconds=_TIMEOUT))
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # gloo listens, even where nobody is to come
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    atexit.register(_leave)


def _leave() -> None:
    """Destroy the group, unless the user has: NCCL complains of one that is left to the end."""
    if dist.is_initialized():
        dist.destroy_process_group()
