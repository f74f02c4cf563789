"""How a curve is looked at.

Runs in: kernel
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lens:
    """What is drawn large, and along which axes."""

    name: str | None = None
    """The value drawn; None: the loss, see `curves.main_name`."""
    log: bool = False
    """Heights are logarithms."""
    by_time: bool = False
    """Seconds are counted along the curve, not steps."""
    smoothing: float = 0.0
    """What a running mean keeps of itself from one stroke to the next, 0 … 0.999; 0: nothing is smoothed."""


PLAIN = Lens()
"""As a run is looked at before anybody has chosen."""
