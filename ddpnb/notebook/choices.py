"""What can be chosen for each argument of a function, read from its signature and from what was offered for it.

    lr=(1e-3, 1.0)              a number between the two; on a logarithmic scale over two decades and more
    epochs=(1, 20), (0, 1, 0.1) a whole number; a number in steps
    batch_size=[32, 64, 128]    one of these; a dict gives each a name
    name="first", warm=True     text, yes or no; numbers are typed in
    model=fixed(net)            held fast

The words are those of `ipywidgets.interact`. What is offered stands before the annotation, and that before the default.

Runs in: kernel
"""

from __future__ import annotations

import ast
import inspect
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from ipywidgets import ValueWidget, fixed

_DECADES = 2
"""From here on a range of fractions is logarithmic."""

_WORDS = {int: "a whole number", float: "a number", str: "text"}

nothing: Any = inspect.Parameter.empty
"""No default, no annotation, nothing offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A number from `low` to `high`."""

    low: float
    high: float
    value: float
    step: float | None = None
    """None: as fine as is readable."""
    is_whole: bool = False
    is_log: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """Something that is typed in."""

    kind: type[int] | type[float] | type[str] | None
    """None: whatever Python literal is typed, else text."""
    value: Any
    may_be_none: bool = False
    """The word None stands for None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """Yes or no."""

    value: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One of several."""

    named: tuple[tuple[str, Any], ...]
    """(name shown, value)"""
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The caller's own widget."""

    widget: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Nothing to choose."""

    value: Any
    is_default: bool
    """The function has it by itself; it is not passed."""


Choice = Range | Typed | Flag | Options | Own | Kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What can be chosen for a call."""

    choices: dict[str, Choice] = field(default_factory=dict)  # {argument: what can be chosen for it}
    by_position: tuple[str, ...] = ()
    """Arguments that cannot be given by name."""


def choices_of(function: Callable[..., Any], offered: Mapping[str, Any]) -> Call:
    """What can be chosen for each argument of a function.

    Args:
        function: What is to be called.
        offered: {argument: abbreviation}; those that the signature has no name for need its **kwargs.

    Raises:
        TypeError: something is offered for an argument that there is none of.
        ValueError: nothing is known of an argument's values, or what is offered cannot be.
    """
    parameters = _parameters(function)
    called = getattr(function, "__name__", "the function")
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    strangers = [name for name in offered if name not in named]
    if strangers and all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise TypeError(f"{strangers[0]!r} is no parameter of {called}(): it has {', '.join(named) or 'none'}")
    choices: dict[str, Choice] = {}
    for name in (*named, *strangers):
        parameter = named.get(name)
        default = parameter.default if parameter else nothing
        annotation = parameter.annotation if parameter else nothing
        try:
            choices[name] = choice(offered.get(name, nothing), annotation, default)
        except LookupError:
            raise ValueError(_what_to_offer(name, called)) from None
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None
    by_position = tuple(name for name, parameter in named.items() if parameter.kind is parameter.POSITIONAL_ONLY)
    return Call(choices=choices, by_position=by_position)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    for eval_str in (True, False):
        try:
            return inspect.signature(function, eval_str=eval_str).parameters
        except Exception:  # an annotation in a string that cannot be evaluated, or a builtin that does not tell
            continue
    return {"kwargs": inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)}


def _what_to_offer(name: str, called: str) -> str:
    if name == "rank":
        return (
            f"{called}() wants a rank, which launch does not hand over: the function asks ddpnb.rank() and "
            "ddpnb.world_size()"
        )
    return (
        f"{name!r} has no default, and nothing tells which values it may have: offer some, Panel({called}, "
        f"{name}=(1, 10)) for a slider, {name}=[1, 2, 5] for a choice, {name}=0.1 for a field, or "
        f"{name}=ipywidgets.fixed(…) to hold it fast"
    )


def choice(offered: Any, annotation: Any = nothing, default: Any = nothing) -> Choice:
    """What can be chosen for one argument.

    Raises:
        LookupError: none of the three tells anything.
        TypeError, ValueError: what is offered cannot be.
    """
    annotation, may_be_none = _without_none(nothing if isinstance(annotation, str) else annotation)
    match offered:
        case fixed():
            return Kept(value=offered.value, is_default=False)
        case ValueWidget():
            return Own(widget=offered)
        case type() if offered is not nothing:
            return _of_annotation(offered, default)
        case tuple() if _is_range(offered):
            return _range(offered, annotation, default)
        case str() if not isinstance(offered, Enum):
            return Typed(kind=str, value=offered, may_be_none=may_be_none)
        case Mapping():
            return _options([(str(name), value) for name, value in offered.items()], default)
        case Sequence() | Set() if not isinstance(offered, Enum):
            return _options([(_name(value), value) for value in offered], default)
    if offered is nothing:
        return _of_default(annotation, may_be_none, default)
    found = _of_value(offered, annotation, may_be_none or default is None)
    if isinstance(found, Kept):
        raise TypeError(
            f"{type(offered).__name__} is no abbreviation: (min, max), a list, a dict, a value, or ipywidgets.fixed(…)"
        )
    return found


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """An annotation without what says nothing of its values, and whether None is among these."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        others = tuple(part for part in get_args(annotation) if part is not type(None))
        is_one = len(others) == 1
        return (others[0] if is_one else nothing), len(others) < len(get_args(annotation))
    return annotation, False


# ---- from what is offered


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_range(offered: tuple[Any, ...]) -> bool:
    return len(offered) in (2, 3) and all(map(_is_number, offered))


def _range(offered: tuple[Any, ...], annotation: Any, default: Any) -> Range:
    low, high, *rest = offered
    step = rest[0] if rest else None
    if not all(abs(bound) <= sys.float_info.max for bound in offered) or not low < high:
        raise ValueError(f"{offered!r} is no range: it is (min, max) or (min, max, step), with min below max")
    if step is not None and not 0 < step <= high - low:
        raise ValueError(f"{step!r} is no step from {low!r} to {high!r}; for a choice offer a list, {list(offered)!r}")
    is_whole = all(isinstance(bound, Integral) for bound in offered) and annotation is not float
    is_whole = is_whole and not isinstance(default, float)
    is_log = step is None and not is_whole and low > 0 and high / low >= 10**_DECADES
    if _is_number(default) and not math.isnan(default):
        value = min(max(default, low), high)
    else:
        value = float(f"{math.sqrt(low * high):.2g}") if is_log else (low + high) / 2
        value = value if step is None else low + step * int((value - low) / step)
    value = int(value) if is_whole else float(value)
    return Range(low=low, high=high, value=value, step=step, is_whole=is_whole, is_log=is_log)


def _options(named: list[tuple[str, Any]], default: Any) -> Options:
    if not named:
        raise ValueError("there is nothing to choose from")
    values = [value for _, value in named]
    at = next((at for at, value in enumerate(values) if same(value, default)), 0)
    return Options(named=tuple(named), value=values[at])


def same(one: Any, other: Any) -> bool:
    """Whether two values are one choice: 1 is not True, and an array's == gives no answer."""
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except Exception:
        return False


def _name(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str):
        return value
    return str(getattr(value, "__name__", value))


# ---- from the signature


def _of_default(annotation: Any, may_be_none: bool, default: Any) -> Choice:
    if default is nothing:
        if get_origin(annotation) is Literal or (isinstance(annotation, type) and issubclass(annotation, (Enum, bool))):
            return _of_annotation(annotation, default)
        raise LookupError
    if get_origin(annotation) is Literal or (isinstance(annotation, type) and issubclass(annotation, Enum)):
        found = _of_annotation(annotation, default)
        if may_be_none and isinstance(found, Options):
            return _options([("None", None), *found.named], default)
        if isinstance(found, Options) and same(found.value, default):
            return found
    return _of_value(default, annotation, may_be_none or default is None)


def _of_annotation(annotation: Any, default: Any) -> Choice:
    """A closed set's members; an empty field for what is typed in."""
    if get_origin(annotation) is Literal:
        return _options([(_name(value), value) for value in get_args(annotation)], default)
    if issubclass(annotation, Enum):
        return _options([(member.name, member) for member in annotation], default)
    if annotation is bool:
        return Flag(value=default is True)
    if annotation in (int, float, str):
        value = default if isinstance(default, annotation) else annotation()
        return Typed(kind=annotation, value=value)
    raise TypeError(f"{annotation!r} tells of no values: offer (min, max), a list, a dict, or a value")


def _of_value(value: Any, annotation: Any, may_be_none: bool) -> Choice:
    match value:
        case bool() if not may_be_none:
            return Flag(value=value)
        case bool():
            return _options([("None", None), ("False", False), ("True", True)], value)
        case Enum():
            return _options([(member.name, member) for member in type(value)], value)
        case float() if math.isnan(value):
            return Kept(value=value, is_default=True)
        case int() if annotation is float:
            return _typed(float, value, may_be_none)
        case int() | float() | str():
            kind = int if isinstance(value, int) else float if isinstance(value, float) else str
            return _typed(kind, value, may_be_none)
        case Integral() | Real() if hasattr(value, "item"):  # NumPy's
            return _of_value(value.item(), annotation, may_be_none)
        case None if annotation is bool:
            return _options([("None", None), ("False", False), ("True", True)], None)
        case None if annotation is nothing or annotation in (int, float, str):
            return Typed(kind=None if annotation is nothing else annotation, value=None, may_be_none=True)
    return Kept(value=value, is_default=True)


def _typed(kind: type[int] | type[float] | type[str], value: Any, may_be_none: bool) -> Typed | Kept:
    """A field with `value` in it; nothing to choose where it could not be typed in: nan, or 10**5000."""
    try:
        typed = Typed(kind=kind, value=kind(value), may_be_none=may_be_none)
        text = write(typed, typed.value)
        text.encode()  # a page cannot have half of a surrogate pair
        if same(typed.value, read(typed, text)):
            return typed
    except (ValueError, OverflowError):
        pass
    return Kept(value=value, is_default=True)


# ---- what is typed in


def read(choice: Typed, text: str) -> Any:
    """The value that was typed.

    Raises:
        ValueError: it is none of its kind.
    """
    if choice.may_be_none and text.strip() == "None":
        return None
    if choice.kind is str:
        return text
    if choice.kind is None:
        return _literal(text)
    wanted = _WORDS[choice.kind] + (" or None" if choice.may_be_none else "")
    if not text.strip():
        raise ValueError(f"empty: {wanted} is needed")
    try:
        value = choice.kind(text)
    except ValueError:
        raise ValueError(f"{text.strip()!r} is not {wanted}") from None
    if value != value:
        raise ValueError(f"nan is not {wanted}")
    return value


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def write(choice: Typed, value: Any) -> str:
    """The text that `read` turns into `value`.

    Raises:
        TypeError: a value of another kind.
    """
    kind = choice.kind
    if value is None and choice.may_be_none:
        return "None"
    if isinstance(value, str) and kind in (str, None):
        return value if kind is str or _literal(value) == value else repr(value)
    if kind is None:
        return repr(value)
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise TypeError(f"{value!r} is not {_WORDS[kind]}")
    return f"{value:g}" if kind is float and float(f"{value:g}") == value else repr(kind(value))
