"""`runs()`: the runs of this kernel, and those that a folder keeps.

Runs in: kernel
"""

from __future__ import annotations

import os
import time
import warnings

from . import folder
from .draw import summary, words
from .draw.curves import main_name
from .run import Run, open_run, runs_of_this_kernel


class Runs(list[Run]):
    """Runs, newest last; a cell shows them as a table."""

    def __repr__(self) -> str:
        head = ("", "run", "status", "ranks", "time", "value", "folder")
        rows = [head, *(_row(place, run) for place, run in enumerate(self))]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines) if self else "no runs"


def runs(run_dir: str | os.PathLike[str] | None = None) -> Runs:
    """The runs that can be looked at again, newest last.

        ddpnb.runs()                        # this kernel's: all that go on, and of those that have ended the newest ten
        ddpnb.show(ddpnb.runs()[-1])
        ddpnb.runs("runs/digits")           # and all that this folder keeps, of whatever kernel

    Args:
        run_dir: A folder of runs, as `launch` was given. What cannot be read there is left out with a warning.
    """
    own = runs_of_this_kernel()
    if run_dir is None:
        return Runs(own)
    known = {run.dir for run in own}
    kept = [path for path in folder.runs_in(folder.absolute(run_dir)) if path not in known]
    recorded = []
    for path in reversed(kept):
        try:
            recorded.append(open_run(path))
        except (OSError, ValueError) as error:
            warnings.warn(f"{words.path(path)} is left out: {error}", stacklevel=2)
    return Runs([*recorded, *own])


def _row(place: int, run: Run) -> tuple[str, ...]:
    state = run.state
    name = main_name(state)
    return (
        str(place),
        words.cut(run.name, 30),
        summary.status(state),
        str(run.world_size),
        words.duration(summary.elapsed(state, time.monotonic())),
        f"{words.cut(name, 20)} {words.number(summary.newest(state, name))}" if name else "",
        words.path(run.dir) if run.dir else "",
    )
