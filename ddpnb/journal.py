"""What was said of a run, written down: one JSON object per line, for people, for pandas, and for `open_run`.

    {"kind": "Started", "time": 0.081, "rank": 0, "pid": 4711, "device": "cpu"}
    {"kind": "Metrics", "time": 1.2, "rank": 0, "name": "loss", "steps": [1, 2], "values": [2, 1.5], "times": [1, 1.1]}

    frame = pandas.read_json("journal.jsonl", lines=True)
    points = frame[frame.kind == "Metrics"].explode(["steps", "values", "times"])

A line is a message with its kind; what a message has as bytes is left out, but for the columns of points. Values are
exact, NaN and Infinity included; times are seconds since the launch, which mean the same after a restart of the machine
and on another one. What the ranks printed is not in here: it has files of its own.

A journal is read as a stranger's: a line that says nothing is skipped and counted, and a last one without an end is
what a killed kernel was about to write.

Runs in: kernel
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO, Literal, TypeVar, get_args, get_origin, get_type_hints

from .messages import AnyMessage, Metrics, Progress, Recalled

Points = TypeVar("Points", Metrics, Recalled)

_KINDS: dict[str, type[AnyMessage]] = {kind.__name__: kind for kind in get_args(AnyMessage)}
_HINTS = {kind: get_type_hints(kind) for kind in _KINDS.values()}  # {kind: {field: its type}}
_COLUMNS = {"steps": "q", "values": "d", "times": "d"}  # {field: type code of its array}
_MOST_POINTS = 4096
"""Points in a line: a longer one would hold the interpreter for milliseconds."""
_LONGEST = 1 << 24
"""Bytes of a line; nobody writes a longer one."""
_DIGITS = 6  # of a time: microseconds


# ---- writing


def lines(message: AnyMessage, started: float) -> Iterator[str]:
    """A message as lines, each with its end; more than one only for many points.

    Args:
        message: any but Output.
        started: monotonic time of the launch.
    """
    entry: dict[str, object] = {"kind": type(message).__name__}
    for field in fields(message):
        value = getattr(message, field.name)
        if not isinstance(value, bytes):
            entry[field.name] = value
    entry["time"] = round(message.time - started, _DIGITS)
    if isinstance(message, Progress) and message.began is not None:
        entry["began"] = round(message.began - started, _DIGITS)
    if not isinstance(message, Metrics | Recalled):
        yield _line(entry)
        return
    steps, values, times = array("q", message.steps), array("d", message.values), array("d", message.times)
    for begin in range(0, len(steps), _MOST_POINTS):
        part = slice(begin, begin + _MOST_POINTS)
        entry["steps"], entry["values"] = steps[part].tolist(), values[part].tolist()
        entry["times"] = [round(moment - started, _DIGITS) for moment in times[part]]
        yield _line(entry)


def _line(entry: dict[str, object]) -> str:
    return json.dumps(entry, ensure_ascii=False) + "\n"


# ---- reading


class Reader:
    """The messages of a journal, in order; to be iterated once.

    Args:
        path: of the journal.
        started: monotonic time that is to be taken for the launch's.

    Raises:
        OSError: on iterating: the file is not there or cannot be read.
    """

    def __init__(self, path: Path, started: float) -> None:
        self.num_skipped = 0
        """Lines so far that say nothing."""
        self._path = path
        self._started = started

    def __iter__(self) -> Iterator[AnyMessage]:
        for series, messages in groupby(self._messages(), _recalled_series):
            if series is None:
                yield from messages
            else:
                yield _joined([message for message in messages if isinstance(message, Recalled)])

    def _messages(self) -> Iterator[AnyMessage]:
        with open(self._path, "rb") as file:
            for line in _whole_lines(file):
                try:
                    yield _message(line, self._started)
                except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                    self.num_skipped += 1


def _recalled_series(message: AnyMessage) -> tuple[int, str] | None:
    return (message.rank, message.name) if isinstance(message, Recalled) else None


def _joined(parts: list[Recalled]) -> Recalled:
    """One message again of what was cut into lines."""
    first = parts[0]
    return Recalled(
        rank=first.rank,
        time=first.time,
        name=first.name,
        steps=b"".join(part.steps for part in parts),
        values=b"".join(part.values for part in parts),
        times=b"".join(part.times for part in parts),
    )


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(_LONGEST):
        if line.endswith(b"\n"):
            yield line
        elif len(line) == _LONGEST:
            while (rest := file.readline(_LONGEST)) and not rest.endswith(b"\n"):
                pass
            yield b""  # it counts as one that says nothing


def _message(line: bytes, started: float) -> AnyMessage:
    entry = json.loads(line)
    kind = _KINDS[entry["kind"]]
    hints = _HINTS[kind]
    values = {name: _column(name, entry[name], started) for name in _COLUMNS.keys() & hints.keys()}
    if len({len(column) for column in values.values()}) > 1:
        raise ValueError("columns of unequal length")
    for name, hint in hints.items():
        if name not in values:
            values[name] = _value(entry.get(name), hint)
    values["time"] = float(entry["time"]) + started
    if values.get("began") is not None:
        values["began"] += started
    if not all(math.isfinite(values[name]) for name in ("time", "began") if values.get(name) is not None):
        raise ValueError("no time")
    return kind(**values)


def _column(name: str, numbers: Iterable[float], started: float) -> Any:
    if name == "times":
        numbers = [number + started for number in numbers]
    return array(_COLUMNS[name], numbers).tobytes()


def _value(value: object, hint: Any) -> Any:
    if hint is bytes:
        return b""
    if not _fits(value, hint):
        raise TypeError(f"{value!r} is no {hint}")
    return value


def _fits(value: object, hint: Any) -> bool:
    if isinstance(hint, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    # By the very type: a bool is no int here, and whole seconds are a float's.
    return type(value) is hint or (hint is float and type(value) is int)
