"""A worker ends with its kernel, whatever ends that; or, where it has something to save, a moment later.

The lifeline is a pipe that nobody writes to and whose other end only the kernel holds: its end is the kernel's. On
Linux the operating system itself then kills the worker's process group, even in a C call that holds the GIL. A rank
that can save what it has done *loosens* its lifeline: a thread waits for the end, says so, and kills the group when the
grace is over.

Runs in: worker
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import threading
from collections.abc import Callable

ORPHAN_GRACE = 2.5
"""Seconds that ranks have to finish their step and save it, once their kernel is gone."""

_F_SETSIG = 10  # Linux; Python's fcntl has no name for it


class Lifeline:
    """Of this process, which leads a process group of its own.

    Args:
        descriptor: read end of the pipe.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._thread: threading.Thread | None = None
        self._wake: tuple[int, int] | None = None  # a pipe that ends the thread's waiting
        if sys.platform == "linux":
            fcntl.fcntl(descriptor, fcntl.F_SETOWN, -os.getpgrp())
            fcntl.fcntl(descriptor, _F_SETSIG, signal.SIGKILL)
        self.tighten()

    def tighten(self) -> None:
        """End at once with the kernel: this process and all that it started. Where the kernel is gone, now."""
        self._end_thread()
        if sys.platform == "linux":
            self._let_the_system_watch(True)
            if self._has_ended(0):  # before it was asked to watch
                _kill_group()
        else:
            self._watch(lambda: None, 0)

    def loosen(self, on_end: Callable[[], None]) -> None:
        """End `ORPHAN_GRACE` after the kernel.

        Args:
            on_end: called in a thread of its own when the kernel is gone.
        """
        self._end_thread()
        if sys.platform == "linux":
            self._let_the_system_watch(False)
        self._watch(on_end, ORPHAN_GRACE)

    def _let_the_system_watch(self, watches: bool) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_ASYNC if watches else flags & ~os.O_ASYNC)

    def _has_ended(self, timeout: float | None, wake: int | None = None) -> bool:
        watch = select.poll()
        watch.register(self._descriptor, select.POLLIN)
        if wake is not None:
            watch.register(wake, select.POLLIN)
        found = watch.poll(None if timeout is None else timeout * 1000)
        return any(descriptor == self._descriptor for descriptor, _ in found)

    def _watch(self, on_end: Callable[[], None], grace: float) -> None:
        self._wake = os.pipe()

        def wait(wake: int) -> None:
            if self._has_ended(None, wake):
                on_end()
                if not select.select([wake], [], [], grace)[0]:
                    _kill_group()

        self._thread = threading.Thread(target=wait, args=(self._wake[0],), name="ddpnb-lifeline", daemon=True)
        self._thread.start()

    def _end_thread(self) -> None:
        if self._wake is None or self._thread is None:
            return
        os.write(self._wake[1], b"x")
        self._thread.join()
        for end in self._wake:
            os.close(end)
        self._wake = self._thread = None


def _kill_group() -> None:
    os.killpg(0, signal.SIGKILL)
