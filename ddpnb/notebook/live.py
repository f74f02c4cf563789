"""The live view under a cell, and the figure that takes its place once the run has ended.

The cell has one output all the while. Its text is the same at every moment, so that a saved notebook can be compared
with a new run; the widget is gone in the end, so that a page without a kernel shows the figure.

Runs in: kernel
"""

from __future__ import annotations

import threading
import time
import warnings
from base64 import b64encode
from uuid import uuid4

from .. import draw
from .frontend import in_notebook_kernel, is_frontend_there
from .painter import Watched, painter
from .terminal import attach_terminal, print_card


def attach(run: Watched, view: bool | None) -> None:
    """Show a run that has just been launched.

    Args:
        run: The run.
        view: False shows nothing. None shows what the place can bear: the live view on a page, the final figure in a
            kernel without one, lines of text on stderr elsewhere. True shows the live view in any kernel.
    """
    if view is False:
        return
    if not in_notebook_kernel():
        attach_terminal(run)
    elif view or is_frontend_there():
        _show_live(run)
    else:
        Final(run).show()


def show(run: Watched) -> None:
    """Show a run under the current cell, once more or for the first time."""
    if not in_notebook_kernel():
        print_card(run)
    elif run.is_live and is_frontend_there():
        _show_live(run)
    else:
        Final(run).show()


class Final:
    """An output that begins as one line of text, or a widget, and ends as the run's figure."""

    def __init__(self, run: Watched, *, text: str | None = None, display_id: str | None = None) -> None:
        """Of a run; in an output that is there already, if its `display_id` and `text` are given."""
        self._run = run
        self._text = text or draw.label(run.name, run.world_size)
        self._display_id = display_id or uuid4().hex
        self._has_widget = False
        self._lock = threading.Lock()  # of the two below: the cell that waits and the painter may come together
        self._picture: bytes | None = None
        self._is_published = False

    def show(self, mimebundle: dict[str, object] | None = None) -> None:
        """Make the output in the cell that runs now, with `mimebundle` beside the text."""
        from IPython.display import display

        self._has_widget = mimebundle is not None
        display({**(mimebundle or {}), "text/plain": self._text}, raw=True, display_id=self._display_id)  # type: ignore[no-untyped-call]
        self.await_end()

    def await_end(self) -> None:
        """Publish once the run has ended, in the cell that waits for it."""
        if self._run.is_live:
            self._run.finishers.append(self._publish_at_cell_s_end)
        else:
            self.publish(self._run)

    def _publish_at_cell_s_end(self, run: Watched) -> None:
        """Publish from the cell that waits, since nbclient and nbval drop what comes after a cell's end; but at its
        end, since drawing takes a while and the code after `run.result()` has waited long enough.
        """
        from IPython import get_ipython

        shell = get_ipython()
        if shell is None or threading.current_thread() is not threading.main_thread():
            self.publish(run)
            return

        def publish(_: object) -> None:
            shell.events.unregister("post_run_cell", publish)
            self.publish(run)

        shell.events.register("post_run_cell", publish)

    def publish(self, run: Watched) -> None:
        """Put the figure in place of what was shown, once however often it is asked for.

        Where nothing was
        logged the line of text is enough, unless a widget must go, which a saved notebook cannot show.
        """
        if not run.state.history and not self._has_widget:
            return
        try:
            picture = self.picture()
            with self._lock:
                if not self._is_published:
                    self._is_published = True
                    self._update(picture)
        except Exception as error:
            # The run's value must not be lost for the sake of its picture.
            warnings.warn(f"ddpnb: the figure of {run.name!r} could not be shown: {error!r}", stacklevel=2)

    def picture(self) -> bytes:
        """The final figure as PNG, drawn once."""
        from ..draw.figure import png  # matplotlib takes half a second to import, which no launch should wait for

        with self._lock:
            if self._picture is None:
                self._picture = png(self._run.state)
            return self._picture

    def _update(self, picture: bytes) -> None:
        from IPython.display import update_display

        from ..draw.figure import display_metadata

        update_display(  # type: ignore[no-untyped-call]
            {"image/png": b64encode(picture).decode(), "text/plain": self._text},
            metadata={"image/png": display_metadata(picture)},
            raw=True,
            display_id=self._display_id,
        )


class Card:
    """The live view: one HTML widget, whose whole content is one message."""

    def __init__(self, run: Watched) -> None:
        from ipywidgets.widgets.widget_string import HTML

        self.run = run
        self.final = Final(run)
        page = draw.card(run.state, time.monotonic())
        self.widget = HTML(page, layout={"width": "auto"})

    def show(self) -> None:
        """Make the output in the cell that runs now."""
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        self.final.show({"application/vnd.jupyter.widget-view+json": view})

    def draw(self) -> None:
        """Bring the widget up to date; at the end with the figure in it, which a reloaded page shows too."""
        state = self.run.state
        picture = self.final.picture() if state.ended is not None and state.history else None
        self.widget.value = draw.card(state, time.monotonic(), picture=picture)
        # JupyterLab takes the figure from this thread too, and saves it. A failed run keeps its card until a cell
        # waits: the report is in it.
        if state.status in ("finished", "stopped", "killed"):
            self.final.publish(self.run)

    def fail(self, error: str) -> None:
        """Say in the widget that it could not be drawn."""
        self.widget.value = draw.trouble(self.run.name, error)


def _show_live(run: Watched) -> None:
    card = Card(run)
    card.show()
    painter.add(card)
