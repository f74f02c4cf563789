"""Widgets to choose an argument's value with, each of them one `Control`: a value, a widget, and what is wrong with it.

Runs in: kernel
"""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape
from typing import Any, assert_never

import ipywidgets as widgets

from .choices import Choice, Flag, Kept, Options, Own, Range, Typed, read, same, write

_LOG_STEP = 0.05
"""Of a power of ten, from one position of a logarithmic slider to the next: an eighth more."""
_LOG_DIGITS = 2
"""Digits that such a position is rounded to: enough to tell it from the next."""

_LABEL_WIDTH = "96px"

Changed = Callable[["Control"], None]


class Control:
    """One argument's value, to be seen and changed on a page and by code alike."""

    def __init__(self, name: str, choice: Choice, *, words: str = "", meaning: str = "") -> None:
        self.name = name
        """Of the argument."""
        self.choice = choice
        self.words = words or name.replace("_", " ")
        """What the page calls it."""
        self.widget: Any = None if isinstance(choice, Kept) else _widget(choice, self.words, meaning or name)
        """Where the value is chosen; None where there is nothing to choose."""
        layout = {"display": "none", "margin": f"0 0 0 {_LABEL_WIDTH}"}
        self.note: Any = widgets.HTML(layout=layout) if isinstance(choice, Typed) else None
        """What is wrong with what was typed, below it."""
        self._exact: tuple[Any, Any] | None = None  # (what the widget has, the value that was meant by it)
        if isinstance(choice, (Range, Typed, Flag, Options)):
            self.value = choice.value

    @property
    def value(self) -> Any:
        """What is chosen.

        Raises:
            ValueError: what was typed is none of its values.
        """
        if isinstance(self.choice, Kept):
            return self.choice.value
        shown = self.widget.value
        if self._exact is not None and self._exact[0] == shown:
            return self._exact[1]
        match self.choice:
            case Range():
                return _rounded(self.choice, shown)
            case Typed():
                return read(self.choice, shown)
            case Options():
                return self.choice.named[shown][1]
        return shown

    @value.setter
    def value(self, value: Any) -> None:
        if isinstance(self.choice, Kept):
            raise ValueError(f"{self.name} is held fast: there is nothing to choose")
        try:
            shown = _shown(self.choice, value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.name}: {error}") from None
        self.widget.value = shown
        self._exact = (self.widget.value, value) if isinstance(self.choice, Range) else None

    @property
    def error(self) -> str | None:
        """What is wrong with what was typed; None: nothing."""
        try:
            self.value  # noqa: B018
        except ValueError as error:
            return str(error)
        return None

    def reset(self) -> None:
        """Go back to the value of the beginning."""
        if isinstance(self.choice, (Range, Typed, Flag, Options)):
            self.value = self.choice.value

    def observe(self, changed: Changed) -> None:
        """Have `changed(control)` called with each change, in whatever thread it comes."""
        if self.widget is not None:
            self.widget.observe(lambda _: changed(self), "value")

    def show_error(self) -> None:
        """Say beside the widget what is wrong. In the thread that writes to widgets."""
        if self.note is not None:
            error = self.error
            self.note.value = f'<span class="bad" role="alert">{escape(error)}</span>' if error else ""
            self.note.layout.display = None if error else "none"

    def box(self) -> Any:
        """The widget, as wide as there is room, and what is said below it."""
        self.widget.layout.width = "auto"
        return self.widget if self.note is None else widgets.VBox([self.widget, self.note])


def _widget(choice: Choice, words: str, meaning: str) -> Any:
    looks = {"description": words, "tooltip": meaning, "style": {"description_width": _LABEL_WIDTH}}
    # Sent when let go of: a value on the way is nobody's choice, and would be a change of a run that goes on.
    common = {**looks, "continuous_update": False}
    match choice:
        case Range(is_log=True):
            powers = {"min": math.log10(choice.low), "max": math.log10(choice.high), "step": _LOG_STEP}
            return widgets.FloatLogSlider(choice.low, readout_format=f".{_LOG_DIGITS}", **powers, **common)
        case Range(is_whole=True):
            bounds = {"min": choice.low, "max": choice.high, "step": choice.step or 1}
            return widgets.IntSlider(choice.low, **bounds, **common)
        case Range():
            bounds = {"min": choice.low, "max": choice.high, "step": choice.step or (choice.high - choice.low) / 100}
            return widgets.FloatSlider(choice.low, readout_format=".3", **bounds, **common)
        case Typed():
            return widgets.Text(write(choice, choice.value), **common)
        case Flag():
            return widgets.Checkbox(choice.value, **looks)
        case Options():
            # By number: values may be arrays, models, 1 and True, which a widget would compare.
            named = [(shown, number) for number, (shown, _) in enumerate(choice.named)]
            return widgets.Dropdown(options=named, **looks)
        case Own():
            choice.widget.description = choice.widget.description or words
            return choice.widget
        case Kept():
            return None
        case _:
            assert_never(choice)


def _shown(choice: Choice, value: Any) -> Any:
    """What a widget has for `value`.

    Raises:
        TypeError, ValueError: it cannot be chosen.
    """
    match choice:
        case Range():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{value!r} is not a number")
            if not choice.low <= value <= choice.high:
                raise ValueError(f"{value!r} is not from {choice.low!r} to {choice.high!r}")
            if choice.is_whole and value != int(value):
                raise ValueError(f"{value!r} is not a whole number")
            return value
        case Typed():
            text = write(choice, value)
            read(choice, text)
            return text
        case Flag() if not isinstance(value, bool):
            raise TypeError(f"{value!r} is neither True nor False")
        case Options():
            for number, (_, each) in enumerate(choice.named):
                if same(value, each):
                    return number
            raise ValueError(f"{value!r} is none of {', '.join(name for name, _ in choice.named)}")
    return value


def _rounded(choice: Range, shown: float) -> float:
    """A position of a slider as a number that one would write."""
    if choice.is_whole:
        return int(shown)
    digits = _LOG_DIGITS if choice.is_log else 6
    return min(max(float(f"{shown:.{digits}g}"), choice.low), choice.high)
