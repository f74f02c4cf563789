"""Numbers as people write them.

    duration(75)        '1:15'
    number(0.23)        '0.230'
    rate(0.4, "step")   '2.5 s/step'
    count(1, "rank")    '1 rank'
    seconds(0.0123)     '12.3 ms'
    size(212e6)         '212 MB'
    path("/home/me/runs/digits")    'runs/digits'

Runs in: kernel
"""

from __future__ import annotations

import os
from math import floor, isfinite, log10

from ..messages import Setting

NAME_LENGTH = 60
"""Characters shown of a name that a user gave: nobody reads more, and a view is drawn twice a second."""
NOTE_LENGTH = 1000
"""Characters shown of a sentence with such names in it."""


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as a clock shows them."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float) -> str:
    """A measured value in three digits, trailing zeros kept: a number that is read while it changes must not jump."""
    if not isfinite(value) or value == 0:
        return f"{value + 0.0:g}"
    exponent = floor(log10(abs(float(f"{value:.2e}"))))
    if not -4 < exponent < 6:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{mantissa}e{int(power)}"
    return f"{value:,.{max(0, 2 - exponent)}f}"


def tick(value: float) -> str:
    """A round number beside an axis."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if max(size, 1e4) <= abs(value) < 1e12:
            return f"{value / size:.6g}{letter}"
    return f"{value + 0.0:.6g}"


def rate(per_second: float, unit: str) -> str:
    """Speed, turned over where less than one comes in a second."""
    if per_second < 1:
        return f"{number(1 / per_second)} s/{unit}"
    return f"{per_second:,.0f} {unit}s/s" if per_second >= 10 else f"{per_second:.1f} {unit}s/s"


def count(number: int, noun: str) -> str:
    """A number of things, with the plural's s."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def path(absolute: str | os.PathLike[str]) -> str:
    """A path as seen from the working directory, where that is shorter."""
    try:
        return min(os.path.relpath(absolute), os.fspath(absolute), key=len)
    except OSError:  # the working directory has been removed
        return os.fspath(absolute)


def setting(value: Setting) -> str:
    """A value that was set: as it was typed, if it was typed short."""
    return f"{value:.4g}" if isinstance(value, float) else cut(str(value), 24)


def seconds(length: float) -> str:
    """A short time, in milliseconds below one second."""
    return f"{number(length)} s" if length >= 1 else f"{number(1000 * length)} ms"


def size(num_bytes: int) -> str:
    """An amount of memory."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.0f} MB"


def whole(text: str) -> str:
    """The text as a page and a picture can have it: a ? for each half of a surrogate pair, of which Python keeps some
    in names of files and in what was decoded badly.
    """
    return text.encode(errors="replace").decode()


def cut(text: str, length: int) -> str:
    """At most `length` characters, and a sign where some are missing."""
    return text if len(text) <= length else text[: length - 1] + "…"
