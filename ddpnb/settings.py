"""Values that may be changed while a run goes on: which there can be, how they travel, what a rank has of them.

They travel on the shared page (`agreement.py`) as one JSON object of all that was set so far, each value with the
number of the `Run.set` it came with: {"lr": [0.05, 3]}. So a name that is read late is right, and one that was set to
the same value again is known for it.

Runs in: both
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from .agreement import SETTINGS_ROOM
from .messages import Setting

Value = TypeVar("Value", float, int, bool, str)

_KINDS = (float, int, bool, str)
_LONGEST_NAME = 100
_LARGEST = 1 << 53  # up to which a float, as the history has them, holds every whole number


# ---- on their way


class Set(NamedTuple):
    """A value that was set."""

    value: Setting
    version: int
    """Number of the `Run.set` that it came with, from 1; 0: it is the checkpoint's from which the run goes on."""


def checked(name: str, value: Any) -> Setting:
    """A value that a setting can have; of NumPy's and torch's, the number in it.

    Raises:
        TypeError: it is no number, bool or text.
        ValueError: it is not finite or too large, or the name is too long.
    """
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"a setting's name has at most {_LONGEST_NAME} characters, not {len(name)}: {name[:20]}…")
    plain = _item(value)
    if type(plain) not in _KINDS:
        raise TypeError(f"{name}={value!r}: a setting is a float, int, bool or str, not {type(value).__name__}")
    if isinstance(plain, float) and not math.isfinite(plain):
        raise ValueError(f"{name}={plain}: a setting is a finite number")
    if isinstance(plain, int) and abs(plain) > _LARGEST:
        raise ValueError(f"{name}={plain}: a setting that is a whole number is at most 2**53")
    return plain  # type: ignore[no-any-return]


def _item(value: Any) -> Any:
    if type(value) in _KINDS or not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except (TypeError, ValueError, RuntimeError):
        return value  # it has several


def pack(settings: Mapping[str, Set]) -> bytes:
    """All that was set, as bytes.

    Raises:
        ValueError: there is no room for it.
    """
    packed = json.dumps(settings).encode()
    if len(packed) > SETTINGS_ROOM:
        raise ValueError(
            f"all settings of a run have {SETTINGS_ROOM:,} bytes together, and these are {len(packed):,}: hand long "
            "texts over as arguments, or in a file"
        )
    return packed


def unpack(packed: bytes) -> dict[str, Set]:
    """What `pack` made bytes of."""
    return {name: Set(*entry) for name, entry in json.loads(packed).items()}


def fitted(value: Setting, like: Setting) -> Setting:
    """The value as the type of `like`, where it means the same: 3 for 3.0 where an int is wanted.

    Raises:
        ValueError: it cannot be of that type.
    """
    wanted = type(like)
    if type(value) is wanted:
        return value
    if wanted is not str and not isinstance(value, str | bool) and abs(value) <= _LARGEST and wanted(value) == value:
        return wanted(value)
    raise ValueError(f"it is of type {wanted.__name__} here, {like!r} now")


# ---- on a rank


class Change(NamedTuple):
    """A value that has changed, and is read."""

    name: str
    before: Setting | None
    """None where it had been set before it was read for the first time."""
    value: Setting


class Settings:
    """What one rank reads, and what was set of it. It says nothing itself: it gives changes, and notes as text."""

    def __init__(self) -> None:
        self.read: dict[str, Setting] = {}
        """Names that the function reads, and their values now."""
        self.claimed: dict[str, Setting] = {}
        """Names that somebody applies himself, a Loop say, and their values when he said so."""
        self.unread: dict[str, None] = {}
        """What was set and nothing reads, as an ordered set; nobody has been told so yet."""
        self._apply: Callable[[str, Setting], None] = _nobody
        self._set: dict[str, Set] = {}
        self._version = 0

    def claim(self, values: Mapping[str, Setting], apply: Callable[[str, Setting], None]) -> None:
        """From now on have what is set of these names applied by the caller, who tells it; ValueError refuses it."""
        self.claimed, self._apply = dict(values), apply

    def release(self, apply: Callable[[str, Setting], None]) -> None:
        """No more so, unless somebody else has claimed them since."""
        if self._apply is apply:
            self.claimed, self._apply = {}, _nobody

    def values(self) -> dict[str, Setting]:
        """All that was set and not refused, to be kept in a checkpoint."""
        return {name: each.value for name, each in self._set.items()}

    def recall(self, values: Mapping[str, Setting]) -> Iterator[Change | str]:
        """Go on from what a checkpoint has; an optimizer's own come with that."""
        for name, value in values.items():
            yield from self._put(name, Set(value, 0))
        self.unread.clear()

    def take(self, packed: bytes) -> Iterator[Change | str]:
        """What the page has; the changes of what is read, and notes of what is refused."""
        arrived = unpack(packed)
        new = {name: each for name, each in arrived.items() if each.version > self._version}
        self._version = max((each.version for each in arrived.values()), default=0)
        for name, each in new.items():
            yield from self._put(name, each)

    def _put(self, name: str, new: Set) -> Iterator[Change | str]:
        try:
            value = fitted(new.value, self.read[name]) if name in self.read else new.value
            if name in self.claimed:
                self._apply(name, value)
            if name in self.read:
                before, self.read[name] = self.read[name], value
                yield Change(name, before, value)
            elif name not in self.claimed:
                self.unread[name] = None
        except ValueError as error:
            yield f"{name}={new.value!r} is refused: {error}"
        else:
            self._set[name] = new

    def first_read(self, name: str, default: Setting) -> Iterator[Change | str]:
        """Take a name into what is read; a change where it had been set before, in this run."""
        self.read[name] = default
        self.unread.pop(name, None)
        if name not in self._set:
            return
        earlier = self._set[name]
        try:
            self.read[name] = fitted(earlier.value, default)
        except ValueError as error:
            del self._set[name]
            yield f"{name}={earlier.value!r} is refused: {error}"
        else:
            if earlier.version:
                yield Change(name, None, self.read[name])

    def take_unread(self) -> Iterator[str]:
        """Notes of what nothing reads, each once."""
        for name in tuple(self.unread):
            del self.unread[name]
            yield f"nothing reads {name!r}: {self._what_there_is(name)}"

    def _what_there_is(self, name: str) -> str:
        names = ", ".join(dict.fromkeys([*self.claimed, *self.read]))
        if names:
            return f"this run has {names}"
        return f"ddpnb.setting({name!r}, …) in the function does, and a Loop has lr"


def _nobody(name: str, value: Setting) -> None:
    """Applies nothing."""
