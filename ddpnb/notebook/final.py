"""What takes a card's place once its run has ended: a figure, and of a failed run its report.

A saved notebook keeps it, so that a page without a kernel shows the run. The text is the same at every moment, so that
a saved notebook can be compared with a new run.

Runs in: kernel
"""

from __future__ import annotations

import threading
import warnings
from base64 import b64encode
from collections.abc import Callable
from uuid import uuid4

from .. import draw
from ..draw.lens import PLAIN, Lens
from .painter import Watched, painter


class Final:
    """An output that begins as one line of text, or a widget, and ends as the run's figure.

    Args:
        run: The run.
        lens: Asked at the end how the figure is to be drawn.
        text: Of an output that is there already; None: the run's own line.
        display_id: Of an output that is there already; None: `show` makes one.
        has_widget: Whether a page shows the run in a widget.
    """

    def __init__(
        self,
        run: Watched,
        lens: Callable[[], Lens] = lambda: PLAIN,
        *,
        text: str | None = None,
        display_id: str | None = None,
        has_widget: bool = False,
    ) -> None:
        self._run = run
        self._lens = lens
        self._text = text or draw.label(run.name, run.world_size)
        self._display_id = display_id or uuid4().hex
        self._has_widget = has_widget
        self._lock = threading.Lock()  # of the next: the cell that waits and the painter may come together
        self._is_published = False

    def show(self, mimebundle: dict[str, object] | None = None) -> None:
        """Make the output in the cell that runs now, with `mimebundle` beside the text."""
        from IPython.display import display

        self._has_widget = mimebundle is not None
        display({**(mimebundle or {}), "text/plain": self._text}, raw=True, display_id=self._display_id)  # type: ignore[no-untyped-call]
        self.await_end()

    def await_end(self) -> None:
        """Publish once the run has ended, in the cell that waits for it if there is one."""
        if not self._run.is_live:
            self.publish(self._run)
            return
        self._run.finishers.append(self._publish_at_cell_s_end)
        if self._has_widget:
            # JupyterLab takes the figure from another thread too, and saves it.
            self._run.watchers.append(self._publish_at_run_s_end)
            self._publish_at_run_s_end(self._run)  # it may have ended just before

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

    def _publish_at_run_s_end(self, run: Watched) -> None:
        if run.state.ended is not None and self._publish_at_run_s_end in run.watchers:
            run.watchers.remove(self._publish_at_run_s_end)
            painter.call(lambda: self.publish(run))

    def publish(self, run: Watched) -> None:
        """Put the figure in place of what was shown, once however often it is asked for.

        Where nothing was logged the line of text is enough, unless a widget must go, which a saved notebook cannot
        show.
        """
        if not run.state.history and not self._has_widget:
            return
        try:
            with self._lock:
                if not self._is_published:
                    self._publish()
                    self._is_published = True
        except Exception as error:
            # The run's value must not be lost for the sake of its picture.
            warnings.warn(f"ddpnb: the figure of {run.name!r} could not be shown: {error!r}", stacklevel=2)

    def _publish(self) -> None:
        from IPython.display import update_display

        # matplotlib takes half a second to import: no launch waits for it.
        from ..draw.figure import display_metadata, png

        state = self._run.state
        picture = png(state, lens=self._lens())
        bundle = {"image/png": b64encode(picture).decode(), "text/plain": self._text}
        if self._has_widget and draw.has_failed(state):
            # A page shows this in place of the picture, which is in it. Not without a widget: nbval compares HTML.
            bundle["text/html"] = draw.last_page(state, picture)
        metadata = {"image/png": display_metadata(picture)}
        update_display(bundle, metadata=metadata, raw=True, display_id=self._display_id)  # type: ignore[no-untyped-call]
