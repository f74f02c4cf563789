"""The view for a terminal: the ranks' output as it comes, and one line of status that is written over and over.

Runs in: kernel
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from typing import TextIO

from .. import draw
from ..draw import summary
from ..draw.summary import clean
from ..draw.words import cut
from ..messages import Hung
from ..report import hang
from ..state import OutputTail, RunState
from .painter import Watched, painter

_ERASE_LINE = "\r\x1b[K"


def attach_terminal(run: Watched) -> None:
    """Follow the run on stderr: what the ranks print, and how it went; on a terminal where it is, too."""
    lines = Lines(run, sys.stderr)
    run.finishers.append(lines.finish)
    painter.add(lines)


def print_card(run: Watched) -> None:
    """Write down where the run is."""
    print(draw.text_card(run.state, time.monotonic()))


class Lines:
    """Writes what is new to a stream. On a tty the last line is the status."""

    def __init__(self, run: Watched, stream: TextIO) -> None:
        self.run = run
        self._stream = stream
        self._is_tty = stream.isatty()
        self._lock = threading.Lock()  # the painter and whoever waits for the run may come together
        self._read: dict[int, int] = {}  # {rank: characters of its output that were written}
        self._told: Hung | None = None  # of which the report was written
        self._is_over = False

    def finish(self, run: Watched) -> None:
        """Write the last words before whoever waited goes on: a script may end right then."""
        self.draw()

    def draw(self) -> None:
        """Write new output and the status; nothing once the end was written."""
        with self._lock:
            if not self._is_over:
                self._is_over = self.run.state.ended is not None
                self._write(self._is_over)

    def _write(self, has_ended: bool) -> None:
        state = self.run.state
        lines = [line for rank in state.ranks for line in self._new_lines(rank.rank, rank.output, has_ended)]
        text = "".join(f"{line}\n" for line in lines)
        text += self._new_hang(state)
        status = draw.line(state, time.monotonic())
        if has_ended:
            text += "".join(f"{line}\n" for line in (status, *summary.kept(state)))
        elif self._is_tty:
            text += cut(status, shutil.get_terminal_size().columns - 1)
        self._stream.write((_ERASE_LINE if self._is_tty else "") + text)
        self._stream.flush()

    def fail(self, error: str) -> None:
        """Say that the view has failed."""
        self._stream.write(f"\nddpnb: the view of {self.run.name!r} has failed; the run goes on.\n{error}")

    def _new_hang(self, state: RunState) -> str:
        """The report of a hang that was not written yet."""
        if state.hung is None or state.hung is self._told or state.ended is not None:
            return ""
        self._told = state.hung
        return f"{state.name}: {hang(state)}\n"

    def _new_lines(self, rank: int, output: OutputTail, has_ended: bool) -> list[str]:
        text, end = _unread(output, self._read.get(rank, 0))
        whole, _, rest = text.rpartition("\n")
        if has_ended:
            whole, rest = text, ""
        # A line is written once it is whole.
        self._read[rank] = end - len(rest)
        return [f"[rank {rank}] {clean(line)}" for line in whole.splitlines() if line.strip()]


def _unread(output: OutputTail, position: int) -> tuple[str, int]:
    """What came after `position` and is still kept, and the position at its end."""
    while True:
        dropped, text = output.num_dropped, output.text()
        if output.num_dropped == dropped:
            break
    # The first line only says that something was dropped.
    kept = text.partition("\n")[2] if dropped else text
    return kept[max(0, position - dropped) :], dropped + len(kept)
