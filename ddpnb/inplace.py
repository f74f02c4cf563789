"""A launch without processes: the function runs right here, in the kernel, as the one rank of a world of one.

For `nproc_per_node=0`: exceptions pass through, `%debug` and breakpoints work, and the function's own DDP finds a
process group, made of nothing but memory.

Runs in: kernel
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from .context import Session, current_session
from .launcher import LOOPBACK
from .messages import Ended, FromLauncher, FromWorker, Phase, Returned, Started
from .plan import Plan
from .state import RunState, fold
from .worker import raised, torch_device
from .world import World


def run(
    plan: Plan,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    state: RunState,
    on_change: Callable[[RunState], None],
) -> Any:
    """Call the function to its end; returns its value as it is.

    Raises:
        RuntimeError: a function launched in place launches in place.
        BaseException: whatever the function raises.
    """
    if current_session() is not None:
        raise RuntimeError("a function that is being launched in place cannot launch another one in place")

    def tell(*messages: FromWorker | FromLauncher) -> None:
        nonlocal state
        for message in messages:
            state = fold(state, message)
        on_change(state)

    now = time.monotonic
    with ExitStack() as until_reported:
        try:
            until_reported.callback(lambda: tell(Ended(time=now(), problem=None)))
            until_reported.enter_context(Session(World(), plan.devices[0], tell, None))
            until_reported.enter_context(_environment(plan))
            tell(Started(rank=0, time=now(), pid=os.getpid(), device=plan.devices[0]))
            until_reported.enter_context(_group(plan))
            tell(Phase(rank=0, time=now(), phase="running"))
            value = function(*args, **kwargs)
        except BaseException as error:
            tell(raised(error, 0, "running"))
            raise
        # Nobody unpacks it: the value itself is at hand.
        tell(Returned(rank=0, time=now(), value=b""))
        return value


@contextmanager
def _environment(plan: Plan) -> Iterator[None]:
    before = dict(os.environ)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK)
    os.environ.update(World().environment() | {"GLOO_SOCKET_IFNAME": interface} | dict(plan.env))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _group(plan: Plan) -> Iterator[None]:
    import torch.distributed as dist

    from .group import Group

    if dist.is_initialized():  # the notebook's own group of one: the function may use it
        yield
        return
    group = Group(World(), dist.HashStore(), plan.timeout)  # type: ignore[attr-defined]
    try:
        if plan.backend is not None:
            group.create(plan.backend, torch_device(plan.devices[0]))
        yield
    finally:
        group.close()
