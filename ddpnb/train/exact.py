"""Sums of floats without rounding: the same bits in whatever order, and on however many ranks, they are added.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

_DIGITS = 53  # bits of a float64's fraction
_LOW = 26  # of them summed apart: neither half overflows int64 for any batch that fits into memory
_LEAST = -1074 - _DIGITS
"""Power of two of which every float64 is a whole multiple, with room."""


class ExactSum:
    """Adds up float64 values; `total` is a whole number of units of 2**_LEAST."""

    def __init__(self) -> None:
        self.total = 0
        self.count = 0
        self.special = 0.0
        """Sum of what is no number: nan, inf or -inf once there was one."""

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Add values, of any shape."""
        self.count += values.size
        finite = values[np.isfinite(values)]
        if finite.size < values.size:
            self.special += float(values[~np.isfinite(values)].sum())
        fractions, exponents = np.frexp(finite)
        whole = (fractions * 2.0**_DIGITS).astype(np.int64)
        high = whole >> _LOW
        low = whole - (high << _LOW)
        for exponent in np.unique(exponents):
            chosen = exponents == exponent
            units = (int(high[chosen].sum()) << _LOW) + int(low[chosen].sum())
            self.total += units << (int(exponent) - _DIGITS - _LEAST)

    def mean(self) -> float:
        """Mean of all values, rounded once; nan where there is none."""
        if not self.count or not math.isfinite(self.special):
            return self.special / self.count if self.count else math.nan
        return float(Fraction(self.total, self.count << -_LEAST))
