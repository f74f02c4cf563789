"""A launch as the line of code that does the same.

    ddpnb.launch(train, lr=0.1, epochs=5, nproc_per_node=2)

Runs in: kernel
"""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import Enum
from keyword import iskeyword
from typing import Any

from ..plan import Options


def line(
    function: Callable[..., Any], args: Mapping[str, Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> str:
    """The line that launches `function`; by a Launcher where an option is named like a parameter.

    Args:
        function: What is launched.
        args: Arguments by position, under their names.
        kwargs: Arguments by name.
        options: Those that are not as `launch` has them by itself.
    """
    call = [spelled(function, getattr(function, "__name__", "function"))]
    call += [spelled(value, name) for name, value in args.items()]
    call += [_named(name, spelled(value, name)) for name, value in kwargs.items()]
    asked = [f"{name}={spelled(value, name)}" for name, value in options.items()]
    if collides(function, kwargs):
        return f"ddpnb.Launcher({', '.join(asked)})({', '.join(call)})"
    return f"ddpnb.launch({', '.join([*call, *asked])})"


def _named(name: str, value: str) -> str:
    """A keyword argument, whatever it is called: a function's **kwargs take any name."""
    is_plain = name.isidentifier() and not iskeyword(name)
    return f"{name}={value}" if is_plain else f"**{{{name!r}: {value}}}"


def collides(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether `launch` would take one of the function's arguments for an option of its own."""
    options = {option.name for option in fields(Options)}
    try:
        return not options.isdisjoint({*inspect.signature(function).parameters, *kwargs})
    except (TypeError, ValueError):  # a builtin that does not tell
        return not options.isdisjoint(kwargs)


def spelled(value: Any, name: str) -> str:
    """An expression for `value` in the notebook; where there is none `name`, for whoever copies the line to define."""
    return _literal(value) or _known(value) or (name if name.isidentifier() else "function")


def _literal(value: Any) -> str | None:
    match value:
        case Enum():
            known = _known(type(value))
            return f"{known}.{value.name}" if known else None
        case None | bool() | int() | str() if type(value) in (type(None), bool, int, str):
            return repr(value)
        case float() if type(value) is float:
            return repr(value) if math.isfinite(value) else f'float("{value}")'
        case os.PathLike():
            return repr(os.fspath(value))
        case list() | tuple() | dict() if type(value) in (list, tuple, dict):
            return _container(value)
    return None


def _container(value: Any) -> str | None:
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    parts = [_literal(item) for item in items]
    texts = [part for part in parts if part is not None]
    if len(texts) < len(parts):
        return None
    if isinstance(value, dict):
        half = len(value)
        return "{" + ", ".join(f"{key}: {item}" for key, item in zip(texts[:half], texts[half:], strict=True)) + "}"
    if isinstance(value, tuple):
        return f"({', '.join(texts)}{',' * (len(texts) == 1)})"
    return f"[{', '.join(texts)}]"


def _known(value: Any) -> str | None:
    """The name under which the notebook has this very object, its own one first."""
    names = vars(sys.modules["__main__"])
    own = getattr(value, "__name__", None)
    if isinstance(own, str) and names.get(own) is value:
        return own
    return next((name for name, found in list(names.items()) if found is value and not name.startswith("_")), None)
