"""Functions of tests on real ranks, launched from the test process itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ddpnb


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """What `function(*args, **kwargs)` returns on each of so many gloo ranks, by rank; raises what a rank raises."""
    launcher = ddpnb.Launcher(nproc_per_node=world_size, view=False, threads_per_worker=1, timeout=60)
    results = launcher(function, *args, **kwargs).results(timeout=100)
    return [results[rank] for rank in range(world_size)]


def refused(world_size: int, kind: type[Exception], function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The text of the exception of this type that the function must raise on the ranks."""
    with pytest.raises(kind) as caught:
        on_ranks(world_size, function, *args, **kwargs)
    return str(caught.value)
