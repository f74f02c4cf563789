"""Start workers, hear them, notice a death, end all of them.

One thread per run tells that story, in `_Supervisor.run`. It creates the workers and outlives them (Linux takes a
creating *thread's* end for the parent's), drains every rank's pipes without ever waiting for one, folds what it hears,
and decides nothing by the order in which processes happen to exit: `state.py` does. On several nodes each kernel has
such a thread, and they hear of each other through `nodes.py`.

Runs in: kernel
"""

from __future__ import annotations

import atexit
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from signal import Signals
from typing import Literal

from . import runtime, server, worker
from .agreement import Page
from .autopsy import headline
from .channel import Inbox, OutputReader, pipe
from .dumps import Dumps
from .errors import LaunchError
from .folder import Folder
from .helm import Helm
from .lifeline import ORPHAN_GRACE
from .messages import AnyMessage, Asked, Ended, Exited, Noted, Output, Setting, Stack
from .nodes import WORD_OF_PEERS, Nodes
from .payload import Parcel
from .plan import Plan, StartMethod
from .recorder import Recorder
from .state import RankState, RunState, fold, settles_at
from .watch import Watch
from .world import LOOPBACK, World

Request = Literal["stop", "kill", "pause", "unpause", "stacks", "save", "keep waiting"]

NEVER_ASKED_GRACE = 0.2
"""Seconds that a rank which never asked `should_stop()` has before SIGTERM."""
TERM_TO_KILL = 0.5
"""Seconds from SIGTERM to SIGKILL."""
SILENT_GRACE = (1.0, 30.0)
"""Least and most seconds that a rank which did ask may take to its next question: three of its usual intervals."""

_SERVER_PATIENCE = 60.0
"""Seconds that a server may take to load what it preloads; it takes two to ten."""

_NO_EXITCODE = 255  # multiprocessing's word for a fork server that ended before it could tell

_TICK = 0.02  # seconds between looks at the clock while something has a deadline
_SLOW_TICK = 0.1  # … while ranks have been asked for what they have not done yet
_FLOOD = 1 << 18  # bytes of output in one read that make the reader leave this rank alone for a tick
_MESSAGES_PIPE = 1 << 18
_OUTPUT_PIPE = 1 << 18
_SMALL_PIPE = 1 << 14


class Supervisor:
    """The workers of one run, and the thread that looks after them.

    Args:
        plan: what to start.
        parcel: the packed call.
        state: the state to begin from.
        on_change: called in the supervisor's thread with each new state; must be quick and must not raise.
        folder: of the run; released at the end. None: nothing is written.

    Raises:
        LaunchError: this is node 0, and it cannot listen at the address where the nodes are to meet.
    """

    def __init__(
        self,
        plan: Plan,
        parcel: Parcel,
        state: RunState,
        on_change: Callable[[RunState], None],
        folder: Folder | None = None,
    ) -> None:
        self.state = state
        self._plan = plan
        self._home = folder
        self._selector = selectors.DefaultSelector()
        self._nodes = None if plan.master_addr is None else Nodes(plan, self._selector, self._tell, self.ask)
        # Written before `launch` returns: the buffers are the caller's, who may change them in the next line.
        self._payload = parcel.to_file()
        self._on_change = on_change
        self._workers: list[_Worker] = []
        self._page = Page.create(plan.local_world_size)
        self._helm = Helm(self._page)
        self._watch = Watch(self._page, self._tell, self._ask_stacks)
        self._folder = Path(tempfile.mkdtemp(prefix="run-", dir=runtime.folder()))
        self._wakeup = _Wakeup()
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._wakeup.clear)
        self._muted: list[_Worker] = []  # ranks that flood: their output is left alone for a tick
        self._requests: list[Request] = []
        self._heard: deque[AnyMessage] = deque()  # from other threads, to be told by ours
        self._recorder: Recorder | None = None
        self._stop_asked: float | None = None
        self._has_asked_stacks = False
        self._problem: str | None = None
        self._oom_kills = _num_oom_kills()
        self._thread = threading.Thread(target=self._run, name=f"ddpnb-run-{plan.name}", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        if self._home is not None:
            self._recorder = Recorder(self._home.path, self.state, self.hear)
        _live.add(self)
        self._thread.start()

    def ask(self, how: Request) -> None:
        """Have the workers stopped, killed, held, asked where they stand or to save, or waited for. From any thread."""
        self._requests.append(how)
        self._wakeup.set()

    def set(self, values: Mapping[str, Setting]) -> None:
        """Have the workers change these values. From any thread, at once.

        Raises:
            ValueError: there is no room for so many.
        """
        self._helm.set(values)
        self._wakeup.set()

    def hear(self, message: AnyMessage) -> None:
        """Take what is not to be recorded. From any thread; returns at once."""
        self._heard.append(message)
        self._wakeup.set()

    @property
    def hang_after(self) -> float | None:
        """Seconds without a step after which a rank may be taken for hung; None: nobody watches. From any thread."""
        return self._watch.hang_after

    @hang_after.setter
    def hang_after(self, seconds: float | None) -> None:
        self._watch.hang_after = seconds
        self._wakeup.set()

    @property
    def has_stacks(self) -> bool:
        """Whether all ranks that were asked where they stand have said so. From any thread."""
        return all(each.stacks.is_answered for each in self._workers if each.is_alive)

    def ask_to_leave(self) -> None:
        """The kernel itself is leaving: what can be saved is saved."""
        if self._home is not None:
            self.ask("stop")

    def wait(self, seconds: float) -> None:
        """Wait so long for the end, where something may be saved."""
        if self._home is not None:
            self._thread.join(seconds)

    def kill_now(self) -> None:
        """End all workers from any thread, and start no more: the kernel itself is leaving."""
        self._requests.append("kill")
        for each in self._workers[:]:
            each.signal(signal.SIGKILL)

    # ---- the story

    def _run(self) -> None:
        try:
            self._start_workers()
            self._decide()
            while any(each.is_alive for each in self._workers) or self._waits_for_nodes(time.monotonic()):
                self._hear()
                self._decide()
        except LaunchError as error:
            self._problem = str(error)
        except Exception as error:
            self._problem = f"{type(error).__name__}: {error}"
        finally:
            self._end_workers()
            if self._nodes is not None:
                self._nodes.leave(self._problem)
            self._selector.close()
            self._page.close()
            self._wakeup.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            _live.discard(self)
            self._end()

    def _end(self) -> None:
        """The last words, which come when all is written and the folder is free for others."""
        ended = Ended(time=time.monotonic(), problem=self._problem)
        if self._recorder is not None:
            self._recorder.close(ended)
        if self._home is not None:
            self._home.release()
        while self._heard:
            self._fold(self._heard.popleft())
        self._fold(ended)

    def _start_workers(self) -> None:
        plan = self._plan
        with ExitStack() as until_started:
            until_started.callback(os.close, self._payload)
            listener = self._listener()
            if listener is not None:
                # Rank 0 has its own descriptor; a peer's connection waits in the backlog until it serves.
                until_started.callback(listener.close)
            if plan.start_method == "forkserver":
                self._await_server()
            first = self._first_place(listener)
            for local_rank in range(plan.local_world_size):
                if first is None or self._is_to_end():
                    break  # interrupted before all were there: the others need not come
                world = replace(first, rank=first.rank + local_rank, local_rank=local_rank)
                self._add(self._start_worker(world, listener))

    def _is_to_end(self) -> bool:
        return "stop" in self._requests or "kill" in self._requests

    def _listener(self) -> socket.socket | None:
        """The socket of rank 0's store: a private one, or the one where the nodes meet; None where rank 0 is not."""
        if self._nodes is not None:
            return self._nodes.listener
        return socket.create_server(("127.0.0.1", 0), backlog=max(128, self._plan.local_world_size))

    def _first_place(self, listener: socket.socket | None) -> World | None:
        """Where this node's first rank stands, once all nodes have come; None where the run is to end before."""
        plan = self._plan
        if self._nodes is None:
            assert listener is not None
            here = plan.local_world_size
            return World(world_size=here, local_world_size=here, master_port=listener.getsockname()[1])
        met = self._nodes.meet(self._is_to_end)
        if met is None:
            return None
        self._tell(met)
        assert plan.master_addr is not None
        return World(
            rank=met.first_rank,
            world_size=met.world_size,
            local_world_size=plan.local_world_size,
            node_rank=plan.node_rank,
            nnodes=plan.nnodes,
            master_addr=plan.master_addr,
            master_port=plan.master_port,
        )

    def _await_server(self) -> None:
        note = server.ensure(self._plan.env)
        if note:
            self._tell(Noted(time=time.monotonic(), text=note))
        deadline = time.monotonic() + _SERVER_PATIENCE
        while not server.is_ready() and not self._requests:
            self._wakeup.wait(_TICK)
            if server.has_failed() or time.monotonic() > deadline:
                server.do_without_preload()
                text = "the worker server could not load ddpnb: workers import for themselves, which takes seconds"
                self._tell(Noted(time=time.monotonic(), text=text))

    def _start_worker(self, world: World, listener: socket.socket | None) -> _Worker:
        """Start one worker; it gets its own pipes only, so that a rank that dies closes them."""
        plan = self._plan
        interface = LOOPBACK if self._nodes is None else self._nodes.interface()
        home = self._home
        with ExitStack() as until_started:
            # Its own descriptor: of a forked kernel's the child lets go.
            lock = None if home is None else os.dup(home.lock)
            if lock is not None:
                until_started.callback(os.close, lock)
            pipes = until_started.enter_context(_Pipes())
            descriptors = worker.Descriptors(
                payload=self._payload,
                page=self._page.descriptor,
                messages=pipes.messages[1],
                output=pipes.output[1],
                stacks=pipes.stacks[1],
                lifeline=pipes.lifeline[0],
                listener=listener.fileno() if listener is not None and world.rank == 0 else None,
                lock=lock,
            )
            seat = worker.Seat(
                world=world,
                device=plan.devices[world.local_rank],
                backend=plan.backend,
                timeout=plan.timeout,
                threads=plan.threads,
                environment=_interfaces(interface) | dict(os.environ) | dict(plan.env),
                folder=str(self._folder),
                kernel_pid=os.getpid(),
                descriptors=descriptors,
                run_dir=None if home is None else str(home.path),
                candidates=() if home is None else tuple(map(str, home.candidates)),
                arguments="{}" if home is None else home.arguments,
            )
            process = _start_process(seat, plan)
        return _Worker(world, process, _sentinel(process, plan.start_method), pipes)

    def _add(self, each: _Worker) -> None:
        self._workers.append(each)
        register = self._selector.register
        register(each.inbox.descriptor, selectors.EVENT_READ, partial(self._hear_messages, each))
        register(each.output.descriptor, selectors.EVENT_READ, partial(self._hear_output, each))
        register(each.stacks.descriptor, selectors.EVENT_READ, partial(self._hear_stack, each))
        register(each.sentinel, selectors.EVENT_READ, partial(self._bury, each))

    # ---- hearing

    def _hear(self) -> None:
        has_deadline = self.state.asked or self.state.first_failure or self._muted
        watch = self._watch.timeout(self.state, time.monotonic())
        helm = _SLOW_TICK if self._helm.is_open(self.state) else None
        timeout = _TICK if has_deadline else min((each for each in (watch, helm) if each is not None), default=None)
        for key, _ in self._selector.select(timeout):
            if key.fd in self._selector.get_map():  # an earlier one of this round may have buried the rank
                key.data()
        for each in self._muted:
            if each.is_alive:
                self._selector.register(each.output.descriptor, selectors.EVENT_READ, partial(self._hear_output, each))
        self._muted = []

    def _hear_messages(self, each: _Worker) -> None:
        self._tell(*each.inbox.read())
        if each.inbox.has_ended:
            self._selector.unregister(each.inbox.descriptor)

    def _hear_output(self, each: _Worker) -> None:
        text = each.output.read(_FLOOD)
        if text:
            self._tell(Output(rank=each.rank, time=time.monotonic(), text=text))
        if each.output.has_ended:
            self._selector.unregister(each.output.descriptor)
        elif len(text) >= _FLOOD // 2:
            self._selector.unregister(each.output.descriptor)
            self._muted.append(each)

    def _hear_stack(self, each: _Worker) -> None:
        text = each.stacks.read()
        if each.stacks.has_ended:
            self._selector.unregister(each.stacks.descriptor)
        if text is not None:
            self._tell(Stack(rank=each.rank, time=time.monotonic(), text=text))

    def _bury(self, each: _Worker) -> None:
        """The process is gone: end what it started, take its last words, and say so."""
        exitcode = each.exitcode()
        if exitcode is None:
            return
        if exitcode == _NO_EXITCODE and self._plan.start_method == "forkserver" and not server.is_running():
            # The worker may well live, but nobody would tell of its end any more. It is not to blame.
            self._problem = "the worker server died, and its workers were ended; launch again, a new one is started"
            each.was_signalled = True
        each.is_alive = False
        each.signal(signal.SIGKILL)
        self._tell(*self._last_words(each))
        memory = self._page.memory(each.local_rank)
        oom_kills = _difference(_num_oom_kills(), self._oom_kills)
        self._tell(
            Exited(
                rank=each.rank,
                time=time.monotonic(),
                exitcode=exitcode,
                ended_by_us=each.was_signalled,
                memory=memory,
                oom_kills=oom_kills,
            )
        )
        for descriptor in each.descriptors():
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
        each.close()

    def _last_words(self, each: _Worker) -> Iterator[AnyMessage]:
        # What is there *now*, and no more than a pipe holds: a grandchild that got away may hold it, and go on writing.
        text = each.output.read(4 * _OUTPUT_PIPE)
        if text:
            yield Output(rank=each.rank, time=time.monotonic(), text=text)
        while messages := each.inbox.read():
            yield from messages

    def _tell(self, *messages: AnyMessage) -> None:
        if self._recorder is not None:
            self._recorder.tell(*messages)
        self._fold(*messages)

    def _fold(self, *messages: AnyMessage) -> None:
        for message in messages:
            self.state = fold(self.state, message)
        if messages:
            self._on_change(self.state)

    # ---- deciding

    def _decide(self) -> None:
        now = time.monotonic()
        self._take_heard()
        self._take_requests(now)
        self._tell(*self._helm.look(self.state, now))
        self._tell_nodes(now)
        living = [each for each in self._workers if each.is_alive]
        has_ended = all(self._of(each).has_reported for each in living) and not self._waits_for_nodes(now)
        if self.state.asked == "kill" or has_ended:
            # Nobody has more to say: those who returned or raised wait for this.
            self._signal(living, signal.SIGKILL)
        elif self.state.asked == "stop":
            self._press_to_stop(living, now)
        elif self.state.first_failure:
            self._settle_failure(living, now)
        self._watch.look(self.state, now, self.has_stacks)

    def _take_heard(self) -> None:
        """One at a time: a long curve that was recalled takes a fifth of a second, and a rank may die meanwhile."""
        if self._heard:
            self._fold(self._heard.popleft())
        if self._heard:
            self._wakeup.set()

    def _take_requests(self, now: float) -> None:
        while self._requests:
            match self._requests.pop(0):
                case "stacks":
                    self._ask_stacks()
                case "save":
                    self._page.ask_to_save()
                case "pause":
                    self._tell(*self._helm.pause(self.state, now))
                case "unpause":
                    self._tell(*self._helm.unpause(self.state, now))
                case "keep waiting":
                    self._watch.keep_waiting(self.state, now)
                case "stop" | "kill" as how:
                    self._ask_to_end(how, now)

    def _ask_to_end(self, how: Literal["stop", "kill"], now: float) -> None:
        if self._nodes is not None and (self.state.asked is None or how == "kill" != self.state.asked):
            self._nodes.ask(how)
        self._tell(Asked(time=now, how=how))
        if how == "stop" and self._stop_asked is None:
            self._stop_asked = now
            self._page.ask_to_stop()
            if self._home is None and self.state.saved is None and self._plan.node_rank == 0:
                self._tell(Noted(time=now, text="nothing was saved: no run_dir"))

    def _press_to_stop(self, living: list[_Worker], now: float) -> None:
        assert self._stop_asked is not None
        waited = now - self._stop_asked
        for each in living:
            if self._of(each).has_reported:
                continue
            patience = self._patience(each)
            if waited > patience + TERM_TO_KILL:
                self._signal([each], signal.SIGKILL)
            elif waited > patience and not each.was_signalled:
                self._signal([each], signal.SIGTERM)

    def _patience(self, each: _Worker) -> float:
        """Seconds that this rank has from the asking until SIGTERM."""
        if self._of(each).stopping:
            return self._plan.stop_timeout
        if not self._page.num_checks(each.local_rank):
            return NEVER_ASKED_GRACE
        least, most = SILENT_GRACE
        return min(most, max(least, 3 * (self._page.check_interval(each.local_rank) or 0.0)))

    def _settle_failure(self, living: list[_Worker], now: float) -> None:
        settles = settles_at(self.state)
        if not self._has_asked_stacks:
            self._has_asked_stacks = True
            self._ask_stacks()
        if settles is not None and now >= settles and not self._waits_for_nodes(now):
            self._signal(living, signal.SIGKILL)

    def _tell_nodes(self, now: float) -> None:
        """Let the other nodes know of a failure here, once it has settled whose it is."""
        settles = settles_at(self.state)
        if self._nodes is not None and self.state.first_failure and settles is not None and now >= settles:
            self._nodes.report(self.state.first_failure, headline(self.state))

    def _waits_for_nodes(self, now: float) -> bool:
        """Whether this node, which is done otherwise, is still needed on others, or has to hear from them."""
        if self._nodes is None or not self._workers or self.state.asked == "kill":
            return False
        failure = self.state.first_failure
        if failure is not None:
            # The cause of an echo that nobody here is to blame for is on another node, which says so or is gone.
            return failure.is_echo and not self._nodes.have_spoken and now < failure.time + WORD_OF_PEERS
        is_pressing = self._stop_asked is not None and now > self._stop_asked + self._plan.stop_timeout
        return self._plan.node_rank == 0 and not self._nodes.have_ended and not is_pressing  # rank 0 has the store

    def _ask_stacks(self) -> None:
        for each in self._workers:
            state = self._of(each)
            if each.is_alive and state.pid is not None and not state.has_reported:
                each.stacks.ask()

    def _signal(self, workers: list[_Worker], number: Signals) -> None:
        for each in workers:
            each.was_signalled = True
            each.signal(number)

    def _end_workers(self) -> None:
        """Whatever happened, nobody stays."""
        living = [each for each in self._workers if each.is_alive]
        self._signal(living, signal.SIGKILL)
        for each in living:
            each.process.join()
            self._bury(each)

    def _of(self, each: _Worker) -> RankState:
        return self.state.rank(each.rank)


# ---- one worker, seen from the kernel


class _Pipes:
    """The pipes of one worker: (read end, write end) each. The `with` block is the start of the worker.

    After it the kernel's ends are left open, and the worker's are closed: it has its own. If the start fails, all are.
    """

    def __init__(self) -> None:
        with ExitStack() as if_one_fails:
            made = []
            for size in (_MESSAGES_PIPE, _OUTPUT_PIPE, _SMALL_PIPE, _SMALL_PIPE):
                made.append(pipe(size))
                for end in made[-1]:
                    if_one_fails.callback(os.close, end)
            if_one_fails.pop_all()
        self.messages, self.output, self.stacks, self.lifeline = made
        self._kernels = {self.messages[0], self.output[0], self.stacks[0], self.lifeline[1]}
        self._workers = {self.messages[1], self.output[1], self.stacks[1], self.lifeline[0]}

    def __enter__(self) -> _Pipes:
        _kernel_ends.update(self._kernels)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for descriptor in self._workers:
            os.close(descriptor)
        if kind is not None:
            self.close()

    def close(self) -> None:
        """Close the kernel's ends; the lifeline's end is the worker's."""
        _kernel_ends.difference_update(self._kernels)
        for descriptor in self._kernels:
            os.close(descriptor)


class _Worker:
    """A worker's process and the kernel's ends of its pipes."""

    def __init__(self, world: World, process: BaseProcess, sentinel: int, pipes: _Pipes) -> None:
        assert process.pid is not None
        self.rank = world.rank
        self.local_rank = world.local_rank
        self.process = process
        self.pid = process.pid
        self.sentinel = sentinel
        self.inbox = Inbox(pipes.messages[0])
        self.output = OutputReader(pipes.output[0])
        self.stacks = Dumps(process.pid, pipes.stacks[0])
        self.is_alive = True
        self.was_signalled = False
        self._pipes = pipes

    def descriptors(self) -> tuple[int, ...]:
        """All that the kernel holds for this worker."""
        return self.inbox.descriptor, self.output.descriptor, self.stacks.descriptor, self.sentinel

    def exitcode(self) -> int | None:
        """As `multiprocessing` has it; None while it lives."""
        return self.process.exitcode

    def signal(self, number: Signals) -> None:
        """Signal the worker and all that it started."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            # It has no group of its own yet, or nobody is left.
            if self.is_alive:
                self.signal_alone(number)
        except PermissionError:
            pass  # macOS says so of a group of zombies

    def signal_alone(self, number: Signals) -> None:
        """Signal the worker's own process."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def close(self) -> None:
        """Let go of pipes and process."""
        self._pipes.close()
        if self.sentinel != self.process.sentinel:
            os.close(self.sentinel)
        self.process.close()


def _start_process(seat: worker.Seat, plan: Plan) -> BaseProcess:
    from torch import multiprocessing as mp

    with _starting, server.started_from_clean(_environment_at_start(plan)):
        context = mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
            worker.main, args=(seat,), nprocs=1, join=False, daemon=False, start_method=plan.start_method
        )
    process: BaseProcess = context.processes[0]
    return process


def _interfaces(name: str | None) -> dict[str, str]:
    """Keep gloo and NCCL on this machine, or among the nodes, unless the user has chosen an interface."""
    return {} if name is None else dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), name)


def _environment_at_start(plan: Plan) -> dict[str, str]:
    """Variables that must be there before the worker's first import; a forked one has made its imports."""
    if plan.start_method != "spawn":
        return {}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(plan.threads))
    return threads | dict(plan.env)


def _sentinel(process: BaseProcess, start_method: StartMethod) -> int:
    """A descriptor that becomes readable when the process is gone, and not a moment later.

    The pipe that multiprocessing watches for fork and spawn is inherited by grandchildren, and stays open with them.
    """
    if start_method != "forkserver" and hasattr(os, "pidfd_open"):
        assert process.pid is not None
        return os.pidfd_open(process.pid)
    return process.sentinel


class _Wakeup:
    """Lets another thread interrupt the supervisor's waiting."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._lock = threading.Lock()
        self._is_open = True

    def fileno(self) -> int:
        return self._read

    def set(self) -> None:
        """End the current wait, or the next. No effect once closed."""
        with self._lock:
            if self._is_open:
                try:
                    os.write(self._write, b"x")
                except BlockingIOError:
                    pass  # full of earlier ones

    def clear(self) -> None:
        """Be ready for the next."""
        try:
            os.read(self._read, 4096)
        except BlockingIOError:
            pass

    def wait(self, timeout: float) -> None:
        """Sleep, but not through a `set`."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            selector.select(timeout)

    def close(self) -> None:
        """Let go of the pipe."""
        with self._lock:
            self._is_open = False
            os.close(self._read)
            os.close(self._write)


_starting = threading.Lock()  # `started_from_clean` changes what is the whole process's
_live: weakref.WeakSet[Supervisor] = weakref.WeakSet()
_kernel_ends: set[int] = set()


def _close_kernel_ends() -> None:
    """In a forked child: let go of what only the kernel may hold, or its end would go unnoticed."""
    for descriptor in _kernel_ends:
        try:
            os.close(descriptor)
        except OSError:
            pass
    _kernel_ends.clear()


def _end_all() -> None:
    """At exit, before multiprocessing would join our workers: they are no daemons.

    Runs that have a folder stop and save, in the time that they would have if the kernel was killed.
    """
    if os.getpid() != _kernel_pid:
        return
    running = list(_live)
    for supervisor in running:
        supervisor.ask_to_leave()
    deadline = time.monotonic() + ORPHAN_GRACE
    for supervisor in running:
        supervisor.wait(max(0.0, deadline - time.monotonic()))
        supervisor.kill_now()
        name = supervisor.state.name
        print(f"ddpnb: the program ended while {name} was running; run.result() waits for it", file=sys.stderr)


_kernel_pid = os.getpid()
os.register_at_fork(after_in_child=_close_kernel_ends)
atexit.register(_end_all)


def _num_oom_kills() -> int | None:
    """How many processes of this cgroup the kernel's out-of-memory killer has ended; None where it does not say."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            for line in Path(path).read_text().splitlines():
                word, _, number = line.partition(" ")
                if word == "oom_kill":
                    return int(number)
        except (OSError, ValueError):
            continue
    return None


def _difference(later: int | None, earlier: int | None) -> int | None:
    return None if later is None or earlier is None else later - earlier
