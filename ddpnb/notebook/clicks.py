"""From a click to the thread that draws: what a widget calls comes in any thread, and must not keep a run alive.

Runs in: kernel
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

from .painter import painter


def enqueue(method: Callable[[], None]) -> Callable[[Any], None]:
    """What a widget is to call so that the bound `method` is called soon, by the painter.

    ipywidgets keeps every widget for ever, and with it what it calls: a run and its curves would never go away if the
    method's object were held here.
    """
    reference = WeakMethod(method)

    def called(_: object) -> None:
        bound = reference()
        if bound is not None:
            painter.call(bound)

    return called
