"""The optimizer's settings, changed between two steps of a `Loop` while it goes on; a scheduler's rates follow.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from ..context import Session, current_session
from ..messages import Setting

_NAMES = ("lr", "momentum", "weight_decay")
_GROUP_RATES = {"initial_lr", "max_lr", "min_lr"}
"""What schedulers keep in the optimizer's groups, and make rates of."""
_SCHEDULER_RATES = ("base_lrs", "max_lrs", "eta_min")
"""What they keep themselves."""


class Steering:
    """What of a training can be set while it goes on; without a kernel that could ask nothing, and it costs nothing.

    Args:
        optimizer: whose settings they are.
        scheduler: of its learning rate; None: there is none.
    """

    def __init__(self, optimizer: Optimizer, scheduler: Any) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        self._session: Session | None = current_session()

    def begin(self, turns: object, count: Callable[[], int]) -> None:
        """As long as `turns` exists, take what is set.

        Args:
            turns: what the steps belong to.
            count: gives the number of steps that were made.
        """
        session = self._session
        if session is not None:
            apply = partial(self._apply, session, count)
            session.claim_settings(dict(_present(self._optimizer)), apply)
            weakref.finalize(turns, session.settings.release, apply)

    def _apply(self, session: Session, count: Callable[[], int], name: str, value: Setting) -> None:
        """In a check, which never stands in the optimizer's step: the next one is made with it, on all ranks."""
        before = float(self._optimizer.param_groups[0][name])
        change(self._optimizer, self._scheduler, name, value)
        now, step = float(self._optimizer.param_groups[0][name]), count()
        session.say_applied(name, before, now, step)
        if name != "lr":  # which the Loop logs whenever it changes
            session.log_setting(name, now, step)


def change(optimizer: Optimizer, scheduler: Any, name: str, value: Setting) -> None:
    """Set a setting of the first group's; those of the others are scaled by the same factor, and a scheduler's rates.

    The schedule goes on as one that was made with rates scaled so.

    Raises:
        ValueError: it cannot have this value, or there is no such factor. Nothing is changed.
    """
    groups = optimizer.param_groups
    before = float(groups[0][name])
    if isinstance(value, bool | str):
        raise ValueError("it is a number")
    if value < 0:
        raise ValueError("it is 0 or more")
    if name == "momentum" and not before and not isinstance(optimizer, SGD):
        raise ValueError(f"{type(optimizer).__name__} made without momentum has nothing to keep it in")
    if name == "lr" and scheduler is not None and not (before and value):
        raise ValueError("a scheduler's rates are scaled along, which no factor from or to 0 does")
    factor = value / before if before else 1.0
    values = [value if group[name] == before else float(group[name]) * factor for group in groups]
    for group, each in zip(groups, values, strict=True):  # several may have the same tensor
        _put(group, name, each)
    if name == "lr" and scheduler is not None:
        _scale_schedule(groups, scheduler, factor)


def _put(group: dict[str, Any], name: str, value: Any) -> None:
    """In place where it is a tensor, which a captured or compiled step holds."""
    if isinstance(group[name], torch.Tensor):
        group[name].fill_(value)
    else:
        group[name] = float(value)


def _scale_schedule(groups: list[dict[str, Any]], scheduler: Any, factor: float) -> None:
    for group in groups:
        for name in _GROUP_RATES & group.keys():
            _put(group, name, group[name] * factor)
    for each in _with_inner_ones(scheduler):
        _scale(each, factor)
        if hasattr(each, "_last_lr"):
            each._last_lr = [group["lr"] for group in groups]


def _scale(scheduler: Any, factor: float) -> None:
    for name in _SCHEDULER_RATES:
        rates = getattr(scheduler, name, None)
        if isinstance(rates, list):
            setattr(scheduler, name, [rate * factor for rate in rates])
        elif isinstance(rates, float | int):
            setattr(scheduler, name, rates * factor)


def _with_inner_ones(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _with_inner_ones(inner)


def _present(optimizer: Optimizer) -> Iterator[tuple[str, Setting]]:
    group = optimizer.param_groups[0]
    for name in _NAMES:
        # A scheduler that moves the momentum itself would undo it.
        if name in group and not (name == "momentum" and "base_momentum" in group):
            yield name, float(group[name])
