"""What of a run is looked at: which tab of its card, through which lens, whose output.

Runs in: kernel
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .lens import PLAIN, Lens

Tab = Literal["curves", "ranks", "output", "settings"]


@dataclass(frozen=True, slots=True)
class Aspect:
    """What a card shows. Chosen by its reader, never by the run."""

    tab: Tab = "curves"
    lens: Lens = PLAIN
    rank: int | None = None
    """Whose output; None: everybody's."""
    search: str = ""
    """Only lines of output with this in them, upper and lower case alike; empty: all."""
    said: str | None = None
    """What the last click could not do, and why."""
    stacks: str | None = None
    """Where ranks stand, as was asked; None: it was not."""


AT_FIRST = Aspect()
"""What a card shows before anybody has chosen."""
