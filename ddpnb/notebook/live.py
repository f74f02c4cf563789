"""The live view under a cell: a card that shows a run while it goes on, and acts on it.

The cell has one output all the while; see `final.py` for what it ends as. A card is a few widgets that rarely change,
and between them one of HTML that holds all that does: a refresh is one message.

Runs in: kernel
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from .. import draw
from ..draw.aspect import AT_FIRST, Aspect
from ..world import ipython_kernel
from .comms import answering
from .final import Final
from .frontend import in_notebook_kernel, is_frontend_there
from .painter import Steerable, painter
from .terminal import attach_terminal, print_card

if TYPE_CHECKING:
    from .looking import Eyes
    from .steering import Hands


def attach(run: Steerable, view: bool | None) -> None:
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
    run.is_shown_here = _same_cell()


def show(run: Steerable) -> None:
    """The live view again, under another cell; of a run that has ended its figure. What it printed: `run.output()`."""
    if not in_notebook_kernel():
        print_card(run)
    elif run.is_live and is_frontend_there():
        _show_live(run)
    else:
        Final(run).show()


class Card:
    """The live view as a widget, to be shown anywhere; `painter.add(card)` keeps it up to date.

    Args:
        run: The run.
    """

    def __init__(self, run: Steerable) -> None:
        from ipywidgets.widgets.widget_box import VBox
        from ipywidgets.widgets.widget_string import HTML

        self.run = run
        self._eyes: Eyes | None = None
        self._hands: Hands | None = None
        style = HTML(draw.STYLE, _dom_classes=["ddpnb-style"])
        self._live = HTML(draw.card(run.state, time.monotonic()), _dom_classes=["ddpnb-live"])
        self.widget = VBox([style, self._live], _dom_classes=self._signs())
        """What is shown."""
        # What can be clicked takes some thirty messages to make, for which no launch should wait.
        painter.call(self._furnish)

    @property
    def aspect(self) -> Aspect:
        """What its reader has chosen to see."""
        return self._eyes.aspect if self._eyes else AT_FIRST

    def draw(self) -> None:
        """Bring all widgets up to date."""
        state = self.run.state
        self._live.value = draw.card(state, time.monotonic(), self.aspect)
        self.widget._dom_classes = self._signs()
        if self._eyes and self._hands:
            self._eyes.follow(state)
            self._hands.follow(state)

    def fail(self, error: str) -> None:
        """Say in the widget that it could not be drawn."""
        self._live.value = draw.trouble(self.run.name, error)

    def answering(self) -> AbstractContextManager[None]:
        """Keep the buttons alive in a cell that waits, where ipykernel can do so."""
        return answering(self.widget)

    def _furnish(self) -> None:
        """Have the widgets with which the run is looked at and acted on."""
        from .looking import Eyes
        from .steering import Hands

        self._eyes = Eyes(self.draw, self.run.state)
        self._hands = Hands(self.run, self._eyes.say, self._eyes.show_stacks)
        self.widget.children = (*self.widget.children, *self._eyes.widgets, *self._hands.widgets)

    def _signs(self) -> tuple[str, ...]:
        """The classes that tell the style which of the widgets are to be seen."""
        state = self.run.state
        signs = {"is-live": state.ended is None, "is-hung": state.hung is not None}
        return ("ddpnb", f"on-{self.aspect.tab}", *(sign for sign, holds in signs.items() if holds))


def _same_cell() -> Callable[[], bool]:
    """Whether the cell that runs when it is called is the one that runs now."""
    kernel = ipython_kernel()
    here = getattr(kernel, "execution_count", None)
    return lambda: here is not None and getattr(kernel, "execution_count", None) == here


def _show_live(run: Steerable) -> None:
    card = Card(run)
    run.around_waits.append(card.answering)
    view = {"version_major": 2, "version_minor": 0, "model_id": card.widget.model_id}
    Final(run, lambda: card.aspect.lens).show({"application/vnd.jupyter.widget-view+json": view})
    painter.add(card)
