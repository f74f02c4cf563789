"""The one thread that draws: it keeps every live view up to date, and not more often than a page can bear.

ipywidgets has no locks, so only this thread may write to a widget once it is shown.

Runs in: kernel
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ..state import RunState

INTERVAL = 0.5
"""Seconds from one drawing of a view to the next, at least."""

TICK = 1.0
"""Seconds after which a view is drawn again though nothing was said: time goes on."""

COST_FACTOR = 100
"""A view rests this many times as long as it took to draw, so that it stays below 1 % of a core …"""

LONGEST_REST = 1.0
"""… but not longer than this, unless it is so large that it would take more than a twentieth."""


class Watched(Protocol):
    """What a view needs of a `Run`."""

    watchers: list[Callable[[Any], None]]
    """Called by the run's own thread when something has changed, and once after its end."""
    finishers: list[Callable[[Any], None]]
    """Called in the thread of each cell that waits, once the run has ended."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def world_size(self) -> int:
        """Its number of ranks."""

    @property
    def state(self) -> RunState:
        """What is known now."""

    @property
    def is_live(self) -> bool:
        """Whether more will be known: a run from its folder says no more, though it may go on elsewhere."""


class Steerable(Watched, Protocol):
    """What can be asked of a run that goes on; each returns at once."""

    around_waits: list[Callable[[], AbstractContextManager[object]]]
    """Entered by each cell that waits for the run."""
    hang_after: float | None
    """Seconds without a step after which a rank is taken for hung; None: nobody watches."""
    is_shown_here: Callable[[], bool]
    """Whether a view stands in the cell that runs now."""

    def pause(self) -> None:
        """Stand still between two steps."""

    def unpause(self) -> None:
        """Go on."""

    def save(self) -> None:
        """Save at the next step."""

    def stop(self) -> None:
        """End at the next step."""

    def kill(self) -> None:
        """End now."""

    def set(self, **settings: Any) -> None:
        """Change values at the next step."""

    def keep_waiting(self) -> None:
        """Take it for hung later only."""

    def stacks(self) -> Mapping[int, str]:
        """Where each rank stands; this alone takes a while."""


class View(Protocol):
    """Something that shows a run and can be drawn again."""

    @property
    def run(self) -> Watched:
        """The run shown."""

    def draw(self) -> None:
        """Show `run.state` as it is now."""

    def fail(self, error: str) -> None:
        """Show that `draw` has raised; it is not called again."""


class Painter:
    """Draws views from one daemon thread, which lives as long as one of their runs does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the three below
        self._turns: list[_Turn] = []
        self._calls: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()

    def add(self, view: View) -> None:
        """Keep `view` up to date until its run has ended."""
        turn = _Turn(view, self._wake)
        view.run.watchers.append(turn.changed)
        with self._lock:
            self._turns.append(turn)
            self._have_thread()
        # The run may have ended before it had this watcher.
        turn.changed(view.run)

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` soon in the one thread that writes to widgets. Callbacks of widgets come in any thread."""
        with self._lock:
            self._calls.append(function)
            self._have_thread()
        self._wake.set()

    def _have_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._paint, name="ddpnb-view", daemon=True)
            self._thread.start()

    def _paint(self) -> None:
        while (turns := self._unfinished()) is not None:
            pause = min(turn.take(time.monotonic()) for turn in turns)
            self._wake.wait(max(0.0, pause))
            self._wake.clear()

    def _unfinished(self) -> list[_Turn] | None:
        """The views that are to be drawn, once all calls are made; None: there is nothing to do any more."""
        while True:
            with self._lock:
                if not self._calls:
                    self._turns = [turn for turn in self._turns if not turn.is_over]
                    if not self._turns:
                        # Under the lock: whoever comes next starts a new thread or this one has seen it.
                        self._thread = None
                    return list(self._turns) or None
                function = self._calls.popleft()
            try:
                function()
            except Exception:
                traceback.print_exc()  # the thread goes on for all others


class _Turn:
    """When a view is drawn next."""

    def __init__(self, view: View, wake: threading.Event) -> None:
        self._view = view
        self._wake = wake
        self._has_changed = False
        self._drawn = time.monotonic()  # when it was drawn last; a view is made up to date
        self._rest = INTERVAL
        self.is_over = False

    def changed(self, run: Watched) -> None:
        """Ask to be drawn. In the run's own thread, many times a second: the painter is woken once a drawing."""
        if not self._has_changed:
            self._has_changed = True
            self._wake.set()

    def take(self, now: float) -> float:
        """Draw if it is time; seconds until it is time again."""
        if now >= self._due():
            self._draw(now)
        return 0.0 if self.is_over else self._due() - now

    def _due(self) -> float:
        return self._drawn + (self._rest if self._has_changed else max(self._rest, TICK))

    def _draw(self, now: float) -> None:
        # Both before the state is read: what changes while we draw is drawn next time.
        self._has_changed = False
        self.is_over = self._view.run.state.ended is not None
        self._drawn = now
        begin = time.thread_time()
        try:
            self._view.draw()
        except Exception:
            self.is_over = True
            self._report(traceback.format_exc())
        self._rest = _rest_after(time.thread_time() - begin)
        if self.is_over:
            self._view.run.watchers.remove(self.changed)

    def _report(self, error: str) -> None:
        try:
            self._view.fail(error)
        except Exception:
            # Not even that could be shown: the thread goes on for the other views, the kernel's stderr has both.
            traceback.print_exc()


def _rest_after(cost: float) -> float:
    """Seconds from a drawing that took `cost` seconds of a core to the next."""
    return max(INTERVAL, min(LONGEST_REST, COST_FACTOR * cost), 20 * cost)


painter = Painter()
"""The process's own."""
