"""A colour and a dash pattern for every rank.

Two tables, one for light pages and one for dark, name the same hues in the same order. Every colour is readable as
small text on its page (contrast at least 4.5), and the dash tells ranks apart where the colour cannot: on a grey
print, or for the one reader in twelve who does not see red and green apart.

Source: the hues start from Okabe and Ito (2008) and Petroff (2021, arXiv:2107.02270); the contrast is WCAG 2.2's.

Runs in: kernel
"""

from __future__ import annotations

from dataclasses import dataclass

LIGHT = ("#2440f0", "#d03b00", "#6b0a1c", "#9957a5", "#237d15", "#33406e")
"""On white."""

DARK = ("#7f90ff", "#fb900c", "#ff4f7b", "#eb9cf7", "#8fd08a", "#bcd0e6")
"""On black."""

DASHES: tuple[tuple[float, ...], ...] = ((), (7, 2), (3, 2), (8, 2, 2, 2), (1.5, 1.5))
"""Lengths in pixels, drawn and left out by turns; empty is a solid line."""


@dataclass(frozen=True, slots=True)
class Look:
    """How one rank is drawn."""

    hue: int
    """Place in `LIGHT` and `DARK`."""
    dash: tuple[float, ...]

    @property
    def light(self) -> str:
        """Its colour on a light page."""
        return LIGHT[self.hue]

    @property
    def dark(self) -> str:
        """Its colour on a dark page."""
        return DARK[self.hue]


def look(rank: int) -> Look:
    """The look of a rank.

    Six hues and five dashes turn together and have no common divisor: 30 ranks go by before a pair comes again.
    """
    return Look(rank % len(LIGHT), DASHES[rank % len(DASHES)])
