"""What a reader of a card chooses with: tabs, the curve's name and axes, whose output.

Each of these widgets changes rarely. All methods but `__init__` are called by the painter's thread.

Runs in: kernel
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ipywidgets as widgets

from ..draw import output
from ..draw.aspect import AT_FIRST, Aspect
from ..draw.curves import chosen_name
from ..draw.lens import Lens
from ..draw.words import cut, whole
from ..state import RunState
from .clicks import enqueue

_TABS = (("Curves", "curves"), ("Ranks", "ranks"), ("Output", "output"), ("Settings", "settings"))
_SCALES = (("linear", False), ("log", True))
_AXES = (("by step", False), ("by time", True))
_SMOOTHINGS = (("raw", 0.0), ("smooth", 0.6), ("smoother", 0.9), ("smoothest", 0.96))
_NAME_LENGTH = 40
_ALL = "all"  # ipywidgets takes None for nothing chosen


class Eyes:
    """The widgets with which a reader turns to something else; `draw` is called when there is something else to see."""

    def __init__(self, draw: Callable[[], None], state: RunState) -> None:
        self.aspect = AT_FIRST
        """What is to be seen now."""
        self._draw = draw
        self._state = state
        self._num_names = len(state.history)
        self._tabs = widgets.ToggleButtons(options=_TABS, value=self.aspect.tab, _dom_classes=["ddpnb-tabs"])
        self._name = _choice(_names(state), "the value that is drawn", value=chosen_name(state, self.aspect.lens))
        self._scale = _choice(_SCALES, "linear axis, or one of logarithms")
        self._axis = _choice(_AXES, "along steps, or seconds")
        self._smoothing = _choice(_SMOOTHINGS, "a running mean over the curve")
        self._rank = _choice(_ranks(state), "whose output is shown")
        self._search = widgets.Text(placeholder="search the output", tooltip="only lines with this in them")
        self._download = widgets.Button(description="Download", tooltip="make a link to all of the output")
        self._link = widgets.HTML()
        chooser = [self._name, self._scale, self._axis, self._smoothing]
        tools = [self._rank, self._search, self._download, self._link]
        self.widgets = [
            self._tabs,
            widgets.HBox(chooser, _dom_classes=["ddpnb-chooser"]),
            widgets.HBox(tools, _dom_classes=["ddpnb-tools", "for-output"]),
        ]
        """Children of the card."""
        for widget in (self._tabs, *chooser, self._rank, self._search):
            widget.observe(enqueue(self._choose), names="value")
        self._download.on_click(enqueue(self._make_link))

    def follow(self, state: RunState) -> None:
        """Offer what there is to choose now."""
        self._state = state
        if len(state.history) != self._num_names:
            self._num_names = len(state.history)
            _offer(self._name, _names(state), chosen_name(state, self.aspect.lens))
        if len(state.ranks) != len(self._rank.options) - 1:  # nodes have met
            _offer(self._rank, _ranks(state), _ALL if self.aspect.rank is None else self.aspect.rank)

    def say(self, words: str | None) -> None:
        """Show what could not be done, until something else is chosen."""
        self._turn(replace(self.aspect, said=words))

    def show_stacks(self, text: str) -> None:
        """Show where ranks stand."""
        self._turn(replace(self.aspect, stacks=text))

    def _choose(self) -> None:
        lens = self.aspect.lens
        # A name that nobody chose follows what is logged: the loss may come second.
        name = self._name.value if self._name.value != chosen_name(self._state, lens) else lens.name
        lens = Lens(name, log=self._scale.value, by_time=self._axis.value, smoothing=self._smoothing.value)
        rank = None if self._rank.value == _ALL else self._rank.value
        search = self._search.value.strip()
        if rank != self.aspect.rank:
            self._link.value = ""
        self._turn(Aspect(self._tabs.value, lens, rank, search, stacks=self.aspect.stacks))

    def _turn(self, aspect: Aspect) -> None:
        if aspect != self.aspect:
            self.aspect = aspect
            self._draw()

    def _make_link(self) -> None:
        """Only now: the output is millions of characters, and most readers never ask."""
        self._link.value = output.download(self._state, self.aspect.rank)


def _names(state: RunState) -> list[tuple[str, str]]:
    return [(whole(cut(name, _NAME_LENGTH)), name) for name in list(state.history)]


def _ranks(state: RunState) -> list[tuple[str, int | str]]:
    return [("all ranks", _ALL), *((f"rank {each.rank}", each.rank) for each in state.ranks)]


def _choice(options: Any, tooltip: str, **value: Any) -> widgets.Dropdown:
    return widgets.Dropdown(options=options, tooltip=tooltip, **value)


def _offer(choice: widgets.Dropdown, options: Any, value: Any) -> None:
    """Other options in one message; that the first of them is chosen for a moment is over when anybody looks."""
    with choice.hold_sync():
        choice.options = options
        choice.value = value
