"""What is saved beside model and optimizer: whatever has `state_dict()` and `load_state_dict()`.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CheckpointError
from .frames import encoded
from .resuming import Reader


def checked(state: Any) -> tuple[Any, ...]:
    """The user's own objects, whether one or several were given.

    Raises:
        TypeError: one of them cannot be saved so.
    """
    objects = tuple(state) if isinstance(state, list | tuple) else (state,)
    for each in objects:
        if not hasattr(each, "state_dict") or not hasattr(each, "load_state_dict"):
            raise TypeError(
                f"state= takes objects with state_dict() and load_state_dict(); {type(each).__name__} has not both"
            )
    return objects


def named(scheduler: Any, scaler: Any, own: tuple[Any, ...]) -> dict[str, Any]:
    """The objects that are there, by name."""
    found = {"scheduler": scheduler, "scaler": scaler} | {f"state-{number}": each for number, each in enumerate(own)}
    return {name: each for name, each in found.items() if each is not None}


def recorded(objects: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Their states as JSON, by name; what tensors there are go into `tensors`.

    Raises:
        CheckpointError: a state holds something else than tensors and plain values.
    """

    def put(tensor: torch.Tensor) -> str:
        place = str(len(tensors))
        tensors[place] = tensor
        return place

    try:
        return {name: encoded(each.state_dict(), f"{name}.state_dict()", put) for name, each in objects.items()}
    except TypeError as error:
        raise CheckpointError(f"the state cannot be saved: {error}") from None


def put_back(objects: Mapping[str, Any], reader: Reader) -> None:
    """Load each one's state.

    Raises:
        CheckpointError: there are others in the checkpoint.
    """
    for name, state in states(objects, reader).items():
        objects[name].load_state_dict(state)


def states(objects: Mapping[str, Any], reader: Reader) -> dict[str, Any]:
    """Each one's state, by name; nothing is changed yet.

    Raises:
        CheckpointError: there are others in the checkpoint.
    """
    there = reader.record["objects"]
    if there.keys() != objects.keys():
        have, want = (", ".join(sorted(names)) or "none" for names in (there, objects))
        raise CheckpointError(
            f"{reader.checkpoint} has other objects beside model and optimizer ({have}) than are to be loaded "
            f"({want}): give the same scheduler=, scaler= or precision, and state= as then"
        )
    return {name: reader.state_of(name) for name in objects}
