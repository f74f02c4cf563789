"""The process group of a worker, and the private store it is made through.

The kernel binds a socket on loopback, or at the address where the nodes meet, and hands it to rank 0, which hosts the
store on it: no port is guessed, and none listens where it is not needed (torch's own `TCPStore("127.0.0.1", …)` listens
on every interface).

A function's own `init_process_group`, as in every DDP tutorial, is led to the same store.

Runs in: worker
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .world import World

_PEER_WORDS = ("connection", "peer", "socket", "broken pipe", "timed out", "timeout", "remote process", "abort")
_LIBRARY_WORDS = ("gloo", "nccl", "c10d", "processgroup", "tcpstore")

_NUM_CREATED, _ALL_CREATED = "ddpnb/num_created", "ddpnb/all_created"  # keys of the store


class Group:
    """The process group of this process, and the store that it is made through.

    Args:
        world: where this process stands.
        store: what the ranks meet at, the same for all.
        timeout: seconds that a collective may take.
    """

    def __init__(self, world: World, store: Any, timeout: float) -> None:
        self._world = world
        self._store = store
        self._timeout = timedelta(seconds=timeout)
        self._attempts = itertools.count()
        self._init = dist.init_process_group
        self._backend: str | None = None
        self._has_noted = False
        self._take_over_init()

    def create(self, backend: str, device: torch.device) -> None:
        """Make the default group."""
        self._backend = backend
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:  # type: ignore[attr-defined]
            _spare_ddp_its_log()
        bound = device if device.type == "cuda" and "nccl" in backend else None
        self._init(
            backend,
            store=self._fresh_store(),
            rank=self._world.rank,
            world_size=self._world.world_size,
            timeout=self._timeout,
            device_id=bound,
        )
        if self._store.add(_NUM_CREATED, 1) == self._world.world_size:
            self._store.set(_ALL_CREATED, "")

    def close(self, *, in_peace: bool = True) -> None:
        """Destroy the default group unless the function has done so, and give `init_process_group` back.

        A rank whose function returns at once waits here for those that still connect to it: the connection is made
        from both sides, and one that closes early would fail the other. Where a rank never comes, the kernel ends all,
        or torchrun does.

        Args:
            in_peace: the function has returned. A failed rank waits for nobody.
        """
        if self._backend is not None and in_peace:
            try:
                self._store.wait([_ALL_CREATED], self._timeout)
            except RuntimeError:
                pass  # a rank is late beyond all limits, or the store has gone with rank 0: their failure, not ours
        dist.init_process_group = dist.distributed_c10d.init_process_group = self._init
        if dist.is_initialized():
            dist.destroy_process_group()

    def _fresh_store(self) -> Any:
        # Keys of an earlier group must not be met again: each attempt has a prefix of its own, the same on all ranks.
        return dist.PrefixStore(f"ddpnb/{next(self._attempts)}", self._store)  # type: ignore[attr-defined]

    def _take_over_init(self) -> None:
        @functools.wraps(self._init)
        def init_process_group(backend: str | None = None, init_method: str | None = None, **options: Any) -> None:
            if self._is_the_same(backend, options):
                self._note_once()
                return
            if init_method in (None, "env://") and options.get("store") is None:
                for key, own in (("rank", self._world.rank), ("world_size", self._world.world_size)):
                    if options.get(key, -1) == -1:
                        options[key] = own
                options["store"], init_method = self._fresh_store(), None
            options["timeout"] = options.get("timeout") or self._timeout
            try:
                self._init(backend, init_method, **options)
            except ValueError as error:
                if self._backend is not None and dist.is_initialized():
                    error.add_note(_ANOTHER_GROUP.format(backend=self._backend))
                raise

        # `from torch.distributed import init_process_group` pickles as the attribute of distributed_c10d.
        dist.init_process_group = dist.distributed_c10d.init_process_group = _positional(init_process_group)

    def _is_the_same(self, backend: str | None, options: dict[str, Any]) -> bool:
        return (
            self._backend is not None
            and dist.is_initialized()
            and backend in (None, self._backend)
            and options.get("rank", -1) in (-1, self._world.rank)
            and options.get("world_size", -1) in (-1, self._world.world_size)
        )

    def _note_once(self) -> None:
        if not self._has_noted and self._world.rank == 0:
            print("ddpnb: the process group is there already; this init_process_group changes nothing", flush=True)
        self._has_noted = True


def _spare_ddp_its_log() -> None:
    """Let DDP be made under TORCH_DISTRIBUTED_DEBUG=DETAIL, which compares the collectives of all ranks.

    What DDP notes of its construction asks the group for what the one that compares does not have: torch 2.13 dies of
    it by SIGSEGV.
    """

    class Logger(dist.Logger):  # type: ignore[misc, name-defined]
        def set_construction_data_and_log(self, *_: Any) -> None:
            pass

    dist.Logger = Logger  # type: ignore[attr-defined]


_ANOTHER_GROUP = (
    "ddpnb has made a {backend} group before calling the function. "
    "To make another one yourself, launch with backend=None."
)


def _positional(init: Callable[..., None]) -> Callable[..., None]:
    """Accept torch's positional order."""
    names = (
        "backend",
        "init_method",
        "timeout",
        "world_size",
        "rank",
        "store",
        "group_name",
        "pg_options",
        "device_id",
    )

    @functools.wraps(init)
    def init_process_group(*args: Any, **options: Any) -> None:
        init(**dict(zip(names, args, strict=False)), **options)

    return init_process_group


def private_store(world: World, listener: int | None, timeout: float) -> Any:
    """The store at the world's address, which rank 0 hosts on the listening socket it was handed.

    Args:
        world: where this process stands.
        listener: descriptor of the socket on rank 0, else None.
        timeout: seconds that a wait for a key may take.
    """
    options: dict[str, Any] = {} if listener is None else {"is_master": True, "master_listen_fd": listener}
    return dist.TCPStore(  # type: ignore[attr-defined]
        world.master_addr,
        world.master_port,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        **options,
    )


def is_echo(error: BaseException) -> bool:
    """Whether the exception, or one it was raised from, came out of torch.distributed and speaks of a peer."""
    seen: BaseException | None = error
    while seen is not None:
        if _speaks_of_a_peer(seen):
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def _speaks_of_a_peer(error: BaseException) -> bool:
    if isinstance(error, dist.DistNetworkError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    of_the_library = isinstance(error, dist.DistError) or any(word in text for word in _LIBRARY_WORDS)
    return of_the_library and any(word in text for word in _PEER_WORDS)
