"""A process as the system sees it from outside: whether it stands still, computes, has children, catches a signal.

All of it is read from /proc, in microseconds; elsewhere than on Linux nothing is known, and nobody is accused.

Runs in: kernel
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")  # of a processor's time, a second
_STATE, _TIMES = 0, slice(11, 15)  # in /proc/PID/stat, behind the name: the letter; user, system, and those of children


def is_halted(pid: int) -> bool:
    """Whether the process was stopped, by SIGSTOP say, and has not been told to go on."""
    fields = _stat(pid)
    return fields is not None and fields[_STATE] == "T"


def seconds_used(pid: int) -> float | None:
    """Processor time that the process and all that it started have used; None where that cannot be known."""
    fields = _stat(pid)
    if fields is None:
        return None
    own = sum(map(int, fields[_TIMES])) / _TICKS
    return own + sum(seconds_used(child) or 0.0 for child in children(pid))


def children(pid: int) -> list[int]:
    """Those that it started and that are still there, whichever of its threads did."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, path.read_text().split())
        except OSError:
            continue  # a thread that has just ended
    return sorted(found)


def catches(pid: int, number: int) -> bool:
    """Whether the process handles this signal: where it does not, the signal would end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return sys.platform != "linux"
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()  # the name before may hold anything
