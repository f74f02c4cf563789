"""The options of a launch: what may be asked for, what it gets otherwise, and what "auto" means here.

All mistakes are found here, before any process starts.

Runs in: kernel
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from .world import World

StartMethod = Literal["forkserver", "spawn", "fork"]
Asked = TypeVar("Asked", bound="Options")

BACKENDS = ("gloo", "nccl")
_MOST_AUTO_WORKERS = 4
_LAST_PORT = 65535
_RESUME = {"": False, "0": False, "1": True}  # {DDPNB_RESUME: resume}; anything else is a path
_OF_PROCESSES = ("start_method", "stop_timeout")
"""Options that mean nothing where the function runs in place."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `launch` takes besides the function and its arguments; meanings are told there."""

    nproc_per_node: int | Literal["auto"] = "auto"
    backend: str | None = "auto"
    start_method: StartMethod | Literal["auto"] = "auto"
    run_dir: str | os.PathLike[str] | None = None
    resume: bool | str | os.PathLike[str] = False
    view: bool | None = None
    timeout: float = 300.0
    stop_timeout: float = 60.0
    threads_per_worker: int | None = None
    env: Mapping[str, str] | None = None
    name: str | None = None
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int = 29500

    def __post_init__(self) -> None:
        _check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one launch is to do. All choices are made: nothing here says "auto"."""

    name: str
    local_world_size: int
    """Number of ranks on this node."""
    start_method: StartMethod
    backend: str | None
    devices: tuple[str, ...]
    """`str(torch.device)` of each of this node's ranks."""
    timeout: float
    """Seconds that a collective may take."""
    stop_timeout: float
    """Seconds from the asking that ranks have which acknowledged a stop."""
    threads: int
    """Intra-op threads of each worker."""
    env: Mapping[str, str]
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    """Where the nodes meet; None for one node that nobody else is to reach."""
    master_port: int = 0


# ---- what may be asked for


def _check_options(options: Options) -> None:
    defaults = {option.name: option.default for option in fields(options)}
    workers = options.nproc_per_node
    if workers != "auto":
        _check_integer("nproc_per_node", workers, 0, "the number of workers, 0 for none, or 'auto'")
    if options.threads_per_worker is not None:
        _check_integer("threads_per_worker", options.threads_per_worker, 1, "a number of threads, or None")
    for name in ("timeout", "stop_timeout"):
        _check_seconds(name, getattr(options, name))
    _check_folders(options)
    _check_nodes(options, defaults)
    _check_choice("backend", options.backend, (*BACKENDS, "auto", None))
    _check_choice("start_method", options.start_method, (*get_args(StartMethod), "auto"))
    _check_choice("view", options.view, (None, True, False))
    for name, value in (options.env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env={{{name!r}: {value!r}}}: names and values of environment variables are str")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"env={{{name!r}: {value!r}}} cannot be an environment variable")
    if options.name is not None and not isinstance(options.name, str):
        raise TypeError(f"name={options.name!r} is not a str")


def _check_folders(options: Options) -> None:
    for name, meaning in (("run_dir", "a folder's path, or None"), ("resume", "a bool, or a path")):
        path = getattr(options, name)
        if path is None if name == "run_dir" else isinstance(path, bool):
            continue
        if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
            raise TypeError(f"{name}={path!r} is not a path: it is {meaning}")
        if not os.fspath(path) or "\0" in os.fspath(path):
            raise ValueError(f"{name}={path!r} cannot be a path: it is {meaning}")


def _check_nodes(options: Options, defaults: Mapping[str, Any]) -> None:
    _check_integer("nnodes", options.nnodes, 1, "the number of nodes")
    _check_integer("node_rank", options.node_rank, 0, "this node's number, 0 … nnodes - 1")
    _check_integer("master_port", options.master_port, 1, "the port of node 0 where the nodes meet, 1 … 65535")
    if options.master_port > _LAST_PORT:
        raise ValueError(f"master_port={options.master_port} is above {_LAST_PORT}, the last port there is")
    if options.node_rank >= options.nnodes:
        raise ValueError(
            f"node_rank={options.node_rank} with nnodes={options.nnodes}: nodes are counted 0 … {options.nnodes - 1}"
        )
    if options.master_addr is not None and not isinstance(options.master_addr, str):
        raise TypeError(f"master_addr={options.master_addr!r} is not a str: it is an address of node 0")
    if options.nnodes > 1 and not options.master_addr:
        raise ValueError(
            f"nnodes={options.nnodes} needs master_addr, an address of node 0 that every node reaches, the same on each"
        )
    if options.nnodes > 1 and options.nproc_per_node == 0:
        raise ValueError(
            "nproc_per_node=0 calls the function in the kernel alone; with nnodes > 1 each node has workers"
        )
    if options.master_addr is None and options.master_port != defaults["master_port"]:
        raise ValueError(f"master_port={options.master_port} is a port of master_addr: pass that as well")


def _check_integer(name: str, value: object, least: int, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is not an int: it is {meaning}")
    if value < least:
        raise ValueError(f"{name}={value} is below {least}: it is {meaning}")


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is not a number of seconds")
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value} is not a positive, finite number of seconds")


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        close = difflib.get_close_matches(str(value), [choice for choice in choices if isinstance(choice, str)], 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{name}={value!r} is none of {', '.join(map(repr, choices))}{hint}")


def refuse_collisions(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse a function with a parameter named like an option: which of the two was meant?"""
    clashing = [name for name in _parameters(function) if name in options]
    if clashing:
        (first, *_), called = clashing, _name(function)
        raise ValueError(
            f"{first!r} is an option of launch and a parameter of {called}() as well. Bind it first, "
            f"launch(functools.partial({called}, {first}=…)), or use the spelling without collisions, "
            f"ddpnb.Launcher(nproc_per_node=2)({called}, {first}=…)."
        )


def check_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse what cannot be called so: no function, or arguments that do not fit it."""
    if not callable(function):
        raise TypeError(
            f"launch takes a function, but got {_kind(function)}. Did you call it? launch(train, 5), not "
            "launch(train(5))"
        )
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        kind = "coroutine" if inspect.iscoroutinefunction(function) else "generator"
        raise TypeError(f"{_name(function)} is a {kind} function: calling it would do nothing; launch a plain function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin that does not tell
    _refuse_unknown(function, signature, kwargs)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{_name(function)}{signature}: {error}{_hint(signature, args, kwargs)}") from None


def _kind(value: object) -> str:
    """What it is, without its contents: weights have thousands of characters."""
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def _hint(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    first = next(iter(signature.parameters), None)
    if first == "rank" and not args and "rank" not in kwargs:
        return (
            ". launch hands over no rank: the function asks ddpnb.rank() and ddpnb.world_size(), or is wrapped, "
            "launch(lambda: main(ddpnb.rank(), ddpnb.world_size(), …))"
        )
    return ""


def _refuse_unknown(function: Callable[..., Any], signature: inspect.Signature, kwargs: Mapping[str, Any]) -> None:
    """Refuse a keyword that is neither the function's nor an option, before what is missing because of it."""
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return
    known = [*signature.parameters, *(option.name for option in fields(Options))]
    for name in kwargs:
        if name not in signature.parameters:
            if name in {option.name for option in fields(Options)}:
                raise TypeError(
                    f"{name!r} is an option, no parameter of {_name(function)}(): a Launcher takes its options when "
                    f"it is made, Launcher({name}=…)"
                )
            close = difflib.get_close_matches(name, known, 1, 0.5)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{name!r} is neither a parameter of {_name(function)}() nor an option of launch{hint}")


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def _name(function: Callable[..., Any]) -> str:
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    return str(getattr(inner, "__name__", type(inner).__name__))


# ---- what "auto" means


def make_plan(options: Options, function: Callable[..., Any]) -> Plan:
    """Make every choice that the options leave open, from what this machine has.

    Raises:
        ValueError: what was asked for is not to be had here.
    """
    if options.resume is True and options.run_dir is None:
        raise ValueError(
            "resume=True goes on from the newest run in run_dir, and there is none: launch(…, run_dir='runs/digits', "
            "resume=True)"
        )
    gpus = num_gpus()
    cores = num_cores()
    asked = options.nproc_per_node
    workers = (gpus or min(cores, _MOST_AUTO_WORKERS)) if asked == "auto" else asked
    backend = options.backend
    if backend == "nccl" and workers > gpus:
        have = "no GPU is" if not gpus else "one GPU is" if gpus == 1 else f"{gpus} GPUs are"
        raise ValueError(
            f"nproc_per_node={workers} with backend='nccl' needs a GPU for each worker, and {have} here; "
            "leave backend out, or use 'gloo'"
        )
    each_has_gpu = 0 < max(workers, 1) <= gpus
    if backend == "auto":
        backend = "nccl" if each_has_gpu else "gloo"
    start_method = _start_method(options.start_method)
    local_world_size = max(workers, 1)
    threads = options.threads_per_worker or max(1, cores // local_world_size)
    if start_method == "fork" and workers:
        _refuse_fork_after_cuda()
        threads = 1  # the kernel's OpenMP pool does not survive a fork: a worker that used it would wait for ever
    return Plan(
        name=options.name or _name(function),
        local_world_size=local_world_size,
        start_method=start_method,
        backend=backend,
        devices=tuple(f"cuda:{rank}" if each_has_gpu else "cpu" for rank in range(local_world_size)),
        timeout=float(options.timeout),
        stop_timeout=float(options.stop_timeout),
        threads=threads,
        env=dict(options.env or {}),
        nnodes=options.nnodes,
        node_rank=options.node_rank,
        master_addr=options.master_addr,
        master_port=options.master_port,
    )


def settled_by_torchrun(options: Asked, place: World) -> Asked:
    """The options with what torchrun has settled in place of what was asked for. Rank 0 warns where the two differ.

    Threads are left as torchrun has set them, unless they were asked for. DDPNB_RUN_DIR and DDPNB_RESUME ("1", "0" or a
    path) stand in for options that were not given, so that a script that knows neither can be resumed.
    """
    as_it_is = {
        "nproc_per_node": place.local_world_size,
        "nnodes": place.nnodes,
        "node_rank": place.node_rank,
        "master_addr": place.master_addr,
        "master_port": place.master_port,
    }
    defaults: dict[str, Any] = {option.name: option.default for option in fields(Options)}
    settled = {name: defaults[name] for name in (*as_it_is, *_OF_PROCESSES)}
    asked = {name: getattr(options, name) for name in settled}
    ignored = [f"{name}={asked[name]!r}" for name in settled if asked[name] not in (defaults[name], as_it_is.get(name))]
    if ignored and place.rank == 0:
        text = f"torchrun has started this process; without effect in launch: {', '.join(ignored)}"
        warnings.warn(text, stacklevel=4)
    settled |= {
        "nproc_per_node": place.local_world_size,
        "threads_per_worker": options.threads_per_worker or _num_threads(),
        "run_dir": options.run_dir or os.environ.get("DDPNB_RUN_DIR") or None,
        "resume": options.resume or _RESUME.get(word := os.environ.get("DDPNB_RESUME", ""), word),
    }
    return replace(options, **settled)


def num_restarts() -> str:
    """How often torchrun has started this run's processes again after one of them had failed, in its own word."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()


def _start_method(chosen: StartMethod | Literal["auto"]) -> StartMethod:
    if chosen == "auto":
        return "forkserver" if sys.platform == "linux" else "spawn"
    return chosen


def _refuse_fork_after_cuda() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise ValueError(
            "start_method='fork' cannot be used: CUDA is initialised in this kernel, and a forked worker could not use "
            "it. Leave start_method out (forkserver works whatever the kernel did), or restart the kernel."
        )


def num_gpus() -> int:
    """CUDA devices that workers can use; does not initialise CUDA in the kernel."""
    import torch

    return torch.cuda.device_count() if torch.backends.cuda.is_built() else 0


def num_cores() -> int:
    """Cores that this process may use: what the scheduler allows, and what a container's quota amounts to."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup v2, or the quota is "max"
        return cores
