"""What our processes are called, as /proc and ps show it: who waits for one, or looks for what was left, finds it so.

Runs in: both
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

READY = "ddpnb-server"
"""The fork server, once its preload is done."""
FAILED = "ddpnb-no-torch"
"""The fork server, where its preload has failed."""
WORKER = re.compile(r"ddpnb(\d+)\.\d*")
"""A worker; the number is its kernel's pid."""

_PR_SET_NAME = 15


def worker_name(kernel_pid: int, rank: int) -> str:
    """What `WORKER` matches."""
    return f"ddpnb{kernel_pid}.{rank}"


def name_process(name: str) -> None:
    """Call this process `name`, of which the system keeps 15 characters."""
    prctl(_PR_SET_NAME, name.encode()[:15])


def name_of(pid: int) -> str | None:
    """What a process is called; None where there is none, or no /proc."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None


def prctl(option: int, value: int | bytes) -> None:
    """Linux's system call of that name; elsewhere no effect."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
