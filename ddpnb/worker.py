"""The life of one worker process, from its first instruction to its last.

`main` is what `mp.start_processes` calls. It reads from top to bottom: cut loose from the kernel's signals and output,
say hello, unpack the function, make the process group, call, report, leave. The kernel decides when it is over: every
worker leads a process group of its own, and its end is a SIGKILL of that group.

Runs in: worker
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import multiprocessing
import multiprocessing.process
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from io import TextIOWrapper
from multiprocessing import reduction
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from . import payload
from .agreement import Page
from .channel import Outbox
from .context import Session, peak_bytes
from .lifeline import Lifeline
from .messages import Phase, PhaseName, Raised, Returned, Started
from .names import name_process, prctl, worker_name
from .world import World

_PR_SET_PDEATHSIG = 1

_DEATH_SHOWS = 0.1
"""Seconds after which the system tells of a process whose connections it has closed."""

STACK_SIGNAL: int = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
"""Makes a worker write its stack. One of those that nobody uses, where the system has such: a function may handle
SIGUSR1 itself, by which a cluster says that a job's time is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptors:
    """A worker's open files. Pickled while a process is being started, it takes them along."""

    payload: int
    """The packed call, to be mapped."""
    page: int
    """The run's shared page."""
    messages: int
    """Write end of the pipe to the kernel."""
    output: int
    """Write end that becomes stdout and stderr."""
    stacks: int
    """Write end for faulthandler's dump on `STACK_SIGNAL`."""
    lifeline: int
    """Read end of a pipe that nobody writes to and only the kernel holds: its end is the kernel's."""
    listener: int | None
    """The store's listening socket, on rank 0."""
    lock: int | None
    """The run folder's lock, held as long as this is open anywhere; None for a run without a folder."""

    def __reduce__(self) -> Any:
        opened = {field.name: getattr(self, field.name) for field in fields(self)}
        travelling = {name: None if fd is None else reduction.DupFd(fd) for name, fd in opened.items()}
        return _receive, (travelling,)


def _receive(travelling: dict[str, Any]) -> Descriptors:
    arrived: dict[str, Any] = {name: None if fd is None else fd.detach() for name, fd in travelling.items()}
    return Descriptors(**arrived)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """All that one worker is told at its start."""

    world: World
    device: str
    """`str(torch.device)` to compute on."""
    backend: str | None
    """Of the process group; None: make none."""
    timeout: float
    """Seconds that a collective may take."""
    threads: int
    """Intra-op threads."""
    environment: dict[str, str]
    """All variables, as they are in the kernel or were asked for; torchrun's are set besides."""
    folder: str
    """For multiprocessing's own sockets; the kernel removes it."""
    kernel_pid: int
    descriptors: Descriptors
    run_dir: str | None = None
    """The run's own folder, absolute; None: nothing is written."""
    candidates: tuple[str, ...] = ()
    """Checkpoints to resume from, absolute, the one to prefer first; empty: a fresh start."""
    arguments: str = "{}"
    """The function's arguments as the run's folder has them, a JSON object."""


def main(index: int, seat: Seat) -> NoReturn:
    """Live one worker's life. Never returns and never raises.

    Args:
        index: torch's index of the process in its `start_processes` call; always 0, one call is made per rank.
        seat: what this worker is told.
    """
    own_pid = os.getpid()
    try:
        _Worker(seat).live()
    except BaseException:
        # Only a fault of ours ends here. It has no pipe of its own to go out by.
        traceback.print_exc()
    finally:
        # A child that the user's function forked may come back up to here: it must not be taken for the worker.
        os._exit(1 if os.getpid() == own_pid else 0)


class _Worker:
    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.rank = seat.world.rank
        self.pid = os.getpid()
        self.phase: PhaseName = "starting"
        self.outbox = Outbox(seat.descriptors.messages)

    def live(self) -> None:
        """From the first instruction to the last."""
        seat = self.seat
        _leave_the_kernels_group()
        lifeline = Lifeline(seat.descriptors.lifeline)
        _redirect_output(seat.descriptors.output, seat.descriptors.stacks)
        name_process(worker_name(seat.kernel_pid, self.rank))
        _take_environment(seat.environment | seat.world.environment())
        atexit._clear()  # what the server or the kernel registered is theirs to run
        multiprocessing.process.current_process()._config["tempdir"] = seat.folder  # type: ignore[attr-defined]
        self.outbox.send(Started(rank=self.rank, time=time.monotonic(), pid=self.pid, device=seat.device))

        group = None
        with ExitStack() as until_reported:
            try:
                page = Page(seat.descriptors.page, seat.world.local_world_size)
                session = Session(
                    seat.world,
                    seat.device,
                    self.outbox.send,
                    page,
                    folder=None if seat.run_dir is None else Path(seat.run_dir),
                    candidates=tuple(map(Path, seat.candidates)),
                    arguments=seat.arguments,
                    lifeline=lifeline,
                )
                until_reported.enter_context(session)
                page.note_memory(seat.world.local_rank, peak_bytes())
                _set_threads(seat.threads)
                _seed_anew()
                # forkserver would become the children's own default, and a Dataset of a cell cannot be pickled for it.
                multiprocessing.set_start_method("fork", force=True)

                self._enter("unpacking")
                packed = payload.map_call(seat.descriptors.payload)
                group = self._prepare_group()
                # Torch's 280,000 objects stay as long as this process: a collection that went through them would hold
                # up a training step for up to 100 ms, and write on every page that is shared with the server.
                gc.freeze()
                call = payload.unpack_call(packed)
                if seat.backend is not None:
                    self._enter("rendezvous")
                    group.create(seat.backend, torch_device(seat.device))
                self._enter("running")
                value = call.function(*call.args, **call.kwargs)
                self._refuse_grandchild()
                result = payload.pack(value, "the returned value")
                self._enter("threads")
                _join_threads()
                atexit._run_exitfuncs()  # the function's own: a logger may have to upload
            except BaseException as error:
                # A DataLoader whose worker died raises in whatever goes on at that moment: no longer, or this is lost.
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                self._refuse_grandchild(error)
                _note_dead_children(error)
                report = raised(error, self.rank, self.phase)
                try:
                    until_reported.close()
                except Exception:
                    traceback.print_exc()  # what was logged last is lost, the report is not
                _flush_output()
                with _writer(2) as stderr:  # the function may have closed or replaced the other
                    stderr.write(report.traceback)
                self.outbox.send(report)
                # Sockets stay open: a peer that sees them close would raise, and hide where it stood.
                _wait_for_the_end()
        _flush_output()
        self.outbox.send(Returned(rank=self.rank, time=time.monotonic(), value=result))
        self._enter("leaving")
        group.close()  # a peer that still waits in a collective for this rank learns that it is gone
        if self.rank == 0:
            _wait_for_the_end()  # others may still need the store
        os._exit(0)

    def _enter(self, phase: PhaseName) -> None:
        self.phase = phase
        self.outbox.send(Phase(rank=self.rank, time=time.monotonic(), phase=phase))

    def _prepare_group(self) -> Any:
        import torch

        from .group import Group, private_store

        seat = self.seat
        if seat.device.startswith("cuda"):
            torch.cuda.set_device(torch_device(seat.device))
        store = private_store(seat.world, seat.descriptors.listener, seat.timeout)
        return Group(seat.world, store, seat.timeout)

    def _refuse_grandchild(self, error: BaseException | None = None) -> None:
        """End a child that the function forked and that came back to us: it is not the worker."""
        if os.getpid() == self.pid:
            return
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            os._exit(error.code or 0)
        traceback.print_exc()
        os._exit(1)


def _note_dead_children(error: BaseException) -> None:
    """Say of a lost connection that a DataLoader's worker has died, where one has: its signal may come later."""
    torch = sys.modules.get("torch")
    if not isinstance(error, OSError | EOFError) or torch is None:
        return
    deadline = time.monotonic() + _DEATH_SHOWS
    while time.monotonic() < deadline:
        try:
            torch._C._error_if_any_worker_fails()
        except RuntimeError as death:
            error.add_note(str(death))
            return
        time.sleep(_DEATH_SHOWS / 20)


def raised(error: BaseException, rank: int, phase: PhaseName) -> Raised:
    """The message that says it."""
    moment = time.monotonic()
    from .group import is_echo

    trace = _without_ours(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, trace))
    return Raised(
        rank=rank,
        time=moment,
        phase=phase,
        type_name=type(error).__qualname__,
        text=_text_of(error),
        traceback=text,
        location=_location(trace),
        is_echo=is_echo(error),
        exception=_packed_exception(error),
    )


def torch_device(name: str) -> Any:
    """`torch.device(name)`, with torch imported no earlier than this."""
    import torch

    return torch.device(name)


# ---- the first instructions


def _leave_the_kernels_group() -> None:
    """Lead a process group, and take no signal that a terminal, a kernel or the creating thread sends."""
    prctl(_PR_SET_PDEATHSIG, 0)  # torch asks for SIGINT when the *thread* that created us ends
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The launcher blocks SIGINT while it starts us, so that none could arrive before this line.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def _redirect_output(output: int, stacks: int) -> None:
    """Send what Python, C libraries and child processes print to this rank's own pipe."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    # New objects: those of a forked kernel lead to the notebook's sockets.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _writer(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _writer(2)  # type: ignore[misc]
    faulthandler.enable(2, all_threads=False)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=False, chain=False)


def _writer(descriptor: int) -> TextIOWrapper:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _take_environment(environment: dict[str, str]) -> None:
    """Have these variables and no others: the server's are those of the time when it was started."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def _seed_anew() -> None:
    """Give torch and NumPy seeds of this process's own: the server, or a forked kernel, hands all ranks the same."""
    import torch

    torch.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _set_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for what the function starts itself
    if threads > 1:
        from threadpoolctl import threadpool_limits

        threadpool_limits(threads)  # the fork server was started with one BLAS thread


# ---- the last ones


def _join_threads() -> None:
    """Wait for threads that the function left running: one may write a file.

    As the interpreter does at its end, and multiprocessing for its children: executors are told first, whose idle
    threads would wait for ever.
    """
    threading._shutdown()  # type: ignore[attr-defined]


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass  # the function closed it, or put there what cannot be flushed
    ctypes.CDLL(None).fflush(None)  # what C libraries printed waits in stdio's buffers


def _wait_for_the_end() -> NoReturn:
    while True:
        signal.pause()


def _packed_exception(error: BaseException) -> bytes | None:
    """The exception, or one of its type with its text alone, if it arrives as what it was; None otherwise."""
    kind: Callable[[str], BaseException] = type(error)
    for make in (lambda: error, lambda: kind(str(error))):
        try:
            packed = payload.pack(make())  # type: ignore[no-untyped-call]
            if type(payload.unpack(packed)) is type(error):
                return packed
        except Exception:
            continue  # it holds what cannot travel, or its class wants other arguments
    return None


def _text_of(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"the function called sys.exit({error.code!r}); a value is handed over with return"
    try:
        return str(error)
    except Exception as broken:
        return f"<its __str__ raised {type(broken).__name__}>"


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that is not this package's."""
    package = os.path.dirname(__file__)
    own = trace
    while own is not None and own.tb_frame.f_code.co_filename.startswith(package):
        own = own.tb_next
    return own if own is not None else trace


def _location(trace: TracebackType | None) -> str | None:
    found = None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(_LIBRARIES) and "site-packages" not in file:
            found = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


_LIBRARIES = (sysconfig.get_path("stdlib"), os.path.dirname(__file__), "<frozen")
