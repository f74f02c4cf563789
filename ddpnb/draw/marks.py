"""Where something happened along a curve: an epoch began, a setting was changed, an earlier run was joined.

Runs in: kernel
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Literal

from ..state import Epoch, RunState
from .words import cut, setting

_MOST = 24
"""More of a kind would be a fence: of epochs about each second, fifth, tenth … is drawn, of changes the newest."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One place along the axis."""

    place: float
    """Step, or second."""
    text: str
    kind: Literal["epoch", "setting", "resumed", "saved"]


def marks(state: RunState, origin: float | None) -> Iterator[Mark]:
    """All marks of a run; whoever draws leaves out those beyond its axis.

    Args:
        state: What is known of the run.
        origin: Monotonic time at which the axis begins; None: it counts steps.
    """

    def place(step: float, time: float) -> float:
        return step if origin is None else time - origin

    for epoch in _some(state.epochs):
        yield Mark(place(epoch.step, epoch.time), f"epoch {epoch.number}", "epoch")
    if state.resumed is not None:
        yield Mark(place(state.resumed.step, state.started), "resumed", "resumed")
    for change in state.applied[-_MOST:]:
        before = "" if change.before is None else f"{setting(change.before)} "
        text = f"{cut(change.name, 20)} {before}→ {setting(change.value)}"
        yield Mark(place(change.step, change.time), text, "setting")
    if state.saved is not None:
        yield Mark(place(state.saved.step, state.saved.time), "saved", "saved")


def written(
    marks: Iterable[Mark], x: Callable[[float], float], letter: float, right: float
) -> Iterator[tuple[Mark, Literal["left", "right"] | None]]:
    """Each mark, and on which side of its line its text stands; None where there is no room for it.

    Args:
        marks: In order.
        x: Where a place is.
        letter: Width of a letter, in the unit of `x`.
        right: Where the room ends.
    """
    free = {"epoch": -inf, "other": -inf}  # from where on nothing is written: epochs have a row of their own
    for mark in marks:
        row = "epoch" if mark.kind == "epoch" else "other"
        line, width = x(mark.place), letter * (len(mark.text) + 1)
        side: Literal["left", "right"] = "right" if line + width <= right else "left"
        begin = line if side == "right" else line - width
        if begin < free[row]:
            yield mark, None
            continue
        free[row] = max(line, begin + width) + letter
        yield mark, side


def _some(epochs: tuple[Epoch, ...]) -> list[Epoch]:
    """All epochs, or the first known from each even number on, from each that can be divided by five, by ten …"""
    # Not those numbers alone: of short epochs, and of very many, only some are known.
    span = epochs[-1].number - epochs[0].number + 1 if epochs else 0
    rounds = (factor * 10**power for power in count() for factor in (1, 2, 5))
    every = next(every for every in rounds if span <= (_MOST - 1) * every)
    found: dict[int, Epoch] = {}
    for epoch in epochs:
        found.setdefault(epoch.number // every, epoch)
    return list(found.values())
