"""Ask a rank where it stands, and put together what it writes.

A signal makes `faulthandler` write the stack into a pipe, from the signal handler itself: also where the rank is stuck
in compiled code, with or without the interpreter's lock. A rank that waits for DataLoader workers has them asked as
well, one after another, since they are forks of it and write into the same pipe.

Runs in: kernel
"""

from __future__ import annotations

import os

from . import process, worker
from .channel import OutputReader
from .stacks import HEADER, is_in_loader, is_of_worker

_MOST_WORKERS = 8
_CUT = "  ...\n"
"""What faulthandler writes instead of the frames after the hundredth."""


class Dumps:
    """One rank's stacks.

    Args:
        pid: of its process.
        descriptor: read end of the pipe that it writes them to, owned by somebody else.
    """

    def __init__(self, pid: int, descriptor: int) -> None:
        self._pid = pid
        self._reader = OutputReader(descriptor)
        self._arriving = ""
        self._parts: list[str] = []  # its own dump, then those of its DataLoader workers
        self._to_ask: list[int] = []  # pids
        self._asked: int | None = None  # who is to answer now

    @property
    def descriptor(self) -> int:
        """To be waited for."""
        return self._reader.descriptor

    @property
    def has_ended(self) -> bool:
        """Nobody can write there any more."""
        return self._reader.has_ended

    @property
    def is_answered(self) -> bool:
        """Whether nobody who was asked still has to say something; one who cannot answer was not asked."""
        return self._asked is None

    def ask(self) -> None:
        """Ask where it stands, unless it has given the signal another meaning: then that would end it."""
        self._to_ask = [self._pid]
        self._ask_next()

    def read(self) -> str | None:
        """All dumps since it was last asked, if there is a new one; None if not."""
        self._arriving += self._reader.read()
        news = None
        while (dump := self._next_dump()) is not None:
            if is_of_worker(dump):
                self._parts.append(dump)
            elif self._asked in (self._pid, None):
                self._parts = [dump]
                self._to_ask = process.children(self._pid)[:_MOST_WORKERS] if is_in_loader(dump) else []
            self._ask_next()  # whoever else has answered is a child of the function's own
            news = "\n".join(self._parts)
        return news

    def _next_dump(self) -> str | None:
        """The first whole dump that has arrived; what stands before its header is the end of another."""
        starts = [found.start() for found in HEADER.finditer(self._arriving)]
        if not starts:
            return None
        end = starts[1] if starts[1:] else len(self._arriving)
        dump = self._arriving[starts[0] : end]
        # The frames after ours are the outermost, and no longer of interest.
        if not starts[1:] and not (worker.__file__ in dump and dump.endswith("\n")) and not dump.endswith(_CUT):
            return None
        self._arriving = self._arriving[end:]
        return dump

    def _ask_next(self) -> None:
        self._asked = None
        while self._to_ask and self._asked is None:
            pid = self._to_ask.pop(0)
            if process.catches(pid, worker.STACK_SIGNAL) and not process.is_halted(pid):
                try:
                    os.kill(pid, worker.STACK_SIGNAL)
                    self._asked = pid
                except ProcessLookupError:
                    pass
