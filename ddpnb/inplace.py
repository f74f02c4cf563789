"""A launch without processes: the function runs right here, to its end.

For `nproc_per_node=0` the kernel is the one rank of a world of one: exceptions pass through, `%debug` and breakpoints
work, and the function's own DDP finds a process group, made of nothing but memory. Under torchrun this process is the
rank that torchrun has made of it, and the group is made from torchrun's variables.

Runs in: kernel
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

from .context import Session, current_session
from .folder import Folder
from .messages import AnyMessage, Ended, Phase, Returned, Started
from .plan import Plan, num_restarts
from .recorder import Recorder
from .state import RunState, fold
from .worker import raised, torch_device
from .world import LOOPBACK, World


def run(
    plan: Plan,
    place: World | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    state: RunState,
    on_change: Callable[[RunState], None],
    folder: Folder | None = None,
) -> Any:
    """Call the function to its end; returns its value as it is.

    Args:
        plan: what to do.
        place: where torchrun has put this process; None: it is the one rank of a world of one.
        function: what is called with `args` and `kwargs`.
        args: positional arguments.
        kwargs: keyword arguments.
        state: the state to begin from.
        on_change: called with each new state.
        folder: of the run; released at the end. None: nothing is written.

    Raises:
        RuntimeError: a function launched in place launches in place.
        BaseException: whatever the function raises.
    """
    if current_session() is not None:
        if folder is not None:
            folder.discard()
        raise RuntimeError("a function that is being launched in place cannot launch another one in place")

    telling = threading.RLock()  # the function, the session's thread, whoever saves, the recorder

    def tell(*messages: AnyMessage) -> None:
        with telling:
            if recorder is not None:
                recorder.tell(*messages)
            hear(*messages)

    def hear(*messages: AnyMessage) -> None:
        nonlocal state
        with telling:
            for message in messages:
                state = fold(state, message)
            on_change(state)

    def end() -> None:
        ended = Ended(time=now(), problem=None)
        if recorder is not None:
            recorder.close(ended)
        if folder is not None:
            folder.release()
        hear(ended)

    recorder = None if folder is None else Recorder(folder.path, state, hear)
    now = time.monotonic
    world = place or World()
    rank, device = world.rank, plan.devices[world.local_rank]
    with ExitStack() as until_reported:
        try:
            until_reported.callback(end)
            session = Session(
                world,
                device,
                tell,
                None,
                folder=None if folder is None else folder.path,
                candidates=() if folder is None else folder.candidates,
                arguments="{}" if folder is None else folder.arguments,
            )
            until_reported.enter_context(session)
            until_reported.enter_context(_environment(plan, place))
            tell(Started(rank=rank, time=now(), pid=os.getpid(), device=device))
            until_reported.enter_context(_group(plan, device, place))
            tell(Phase(rank=rank, time=now(), phase="running"))
            value = function(*args, **kwargs)
        except BaseException as error:
            tell(raised(error, rank, "running"))
            raise
        # Nobody unpacks it: the value itself is at hand.
        tell(Returned(rank=rank, time=now(), value=b""))
        return value


@contextmanager
def _environment(plan: Plan, place: World | None) -> Iterator[None]:
    before = dict(os.environ)
    if place is None:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK)
        os.environ.update(World().environment() | {"GLOO_SOCKET_IFNAME": interface})
    os.environ.update(plan.env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _group(plan: Plan, device: str, place: World | None) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    from .group import Group

    if place is not None:
        torch.set_num_threads(plan.threads)
        if device.startswith("cuda"):
            torch.cuda.set_device(torch_device(device))
    if dist.is_initialized():  # the notebook's or the script's own group: the function may use it
        yield
        return
    group = Group(place or World(), _store(plan, place), plan.timeout)
    try:
        if plan.backend is not None:
            group.create(plan.backend, torch_device(device))
        yield
    except BaseException:
        group.close(in_peace=False)
        raise
    group.close()


def _store(plan: Plan, place: World | None) -> Any:
    """What the ranks meet at: memory where there is one, else the store at torchrun's address."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    if place is None:
        return dist.HashStore()  # type: ignore[attr-defined]
    timeout = timedelta(seconds=plan.timeout)
    store, *_ = next(rendezvous("env://", place.rank, place.world_size, timeout=timeout))
    # The store outlives the launch, and these processes where torchrun starts others in their place: the next one must
    # not meet its keys. All ranks launch equally often.
    prefix = f"launch/{num_restarts()}/{next(_num_launches)}"
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


_num_launches = itertools.count()
