"""`launch()`, `Launcher` and the `Run` they return.

A run is a future: started at once, watched while it goes on, asked for its value later. Its methods are named after
`concurrent.futures.Future`.

Runs in: kernel
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from . import candidates, folder, inplace, payload, recording, report, settings
from .draw import Lens, summary, text, words
from .errors import LaunchError, RunKilled, RunStopped, WorkerError, worker_error
from .folder import Folder
from .history import History
from .launcher import Supervisor
from .messages import Lost, Noted, Raised
from .plan import (
    Options,
    Plan,
    StartMethod,
    check_call,
    make_plan,
    num_restarts,
    refuse_collisions,
    settled_by_torchrun,
)
from .stacks import stack_text
from .state import RunState, fold, new_state
from .texts import Text, Texts
from .world import World, is_under_torchrun, is_worker

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Watcher = Callable[["Run"], None]

_STACKS_PATIENCE = 1.0
"""Seconds that ranks have to say where they stand."""

_TOO_LATE = {
    "save": "nothing is left to save",
    "pause": "it cannot be paused any more",
    "unpause": "it cannot be unpaused any more",
    "set": "nothing can be set in it any more",
}
"""What a run that has ended says to whoever asks for something."""

_LOOP_TURNS = 0.2
"""Seconds between turns of an event loop that waits for a run: ipykernel cancels an interrupted cell at the next one,
and does not bring it about."""

on_launch: list[Callable[[Run, bool | None], None]] = []
"""Called with each new run, before it starts, and its `view` option; the notebook's view enters here."""


def launch(
    function: Callable[..., Any],
    /,
    *args: Any,
    nproc_per_node: int | Literal["auto"] = "auto",
    backend: str | None = "auto",
    start_method: StartMethod | Literal["auto"] = "auto",
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool | str | os.PathLike[str] = False,
    view: bool | None = None,
    timeout: float = 300.0,
    stop_timeout: float = 60.0,
    threads_per_worker: int | None = None,
    env: Mapping[str, str] | None = None,
    name: str | None = None,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str | None = None,
    master_port: int = 29500,
    **kwargs: Any,
) -> Run:
    """Start `function(*args, **kwargs)` on workers, one process per rank, and return at once.

        run = ddpnb.launch(train, epochs=3, nproc_per_node=2)
        weights = run.result()          # waits; rank 0's value, or the error of the rank that failed

    The function may come from a cell. What it captures is copied as it is now; what it returns is copied back, and
    tensors of a GPU arrive on the CPU. A process group is there when it is called, and `ddpnb.rank()`,
    `ddpnb.device()`, `ddpnb.log()` … work in it. Each rank's random numbers are its own, and others in each run: seed
    them in the function for a run that can be repeated.

    Under torchrun the same script runs unchanged: no process is started, the function runs in this one, as the rank
    that torchrun has made of it, to its end; exceptions pass through, and `result()` is this rank's own value. The
    variables DDPNB_RUN_DIR and DDPNB_RESUME ("1", "0" or a path) then stand in for options that were not given, and
    processes that torchrun starts again after a failure go on from the newest checkpoint in run_dir.

    Args:
        function: what every rank calls.
        args: its positional arguments.
        nproc_per_node: number of workers. "auto": one per GPU, else one per core and at most 4. 0: call the function
            right here in the kernel, to its end, as the only rank; exceptions pass through and `%debug` works.
        backend: of the process group. "auto": nccl where every worker has a GPU, else gloo. None: make no group, the
            function makes its own.
        start_method: how processes are made. "auto": forkserver on Linux, spawn elsewhere.
        run_dir: a folder in which each run gets one of its own, named after time and function, with what it was
            launched with, what it logged and printed, and its checkpoints: `ddpnb.open_run` reads it. None: nothing is
            written. On several nodes node 0 keeps all but the checkpoints, and every node must reach the folder under
            the same path to save.
        resume: what to go on from, in a new folder; nothing of an earlier run is touched. True: from the newest whole
            checkpoint in run_dir, newest run first; a fresh start where there is none. A path: from that checkpoint, or
            the newest of that run; the new run's folder is beside that one if there is no run_dir. The curve goes on
            where it was. False: a fresh start.
        view: the live view under the cell. None: if a front end may be there. True: in any case. False: none.
        timeout: seconds that a collective may take before it raises, and that the nodes have to come.
        stop_timeout: seconds that ranks which have been told to stop may take to finish their step and return.
        threads_per_worker: intra-op threads of each worker. None: the cores divided by the workers, at least 1.
        env: environment variables for the workers.
        name: what the run is called. None: the function's name.
        nnodes: number of nodes. More than one: the same launch is made on every node, each with a node_rank of its own,
            and each run has its own node's ranks. Ranks are counted through all nodes; each may have another number of
            workers. A stop on one node ends the run on all, and a failure is told on all.
        node_rank: this node's number, 0 … nnodes - 1.
        master_addr: an address of node 0 that every node reaches. Traffic goes over its interface. None, for one node:
            nobody from outside reaches the run.
        master_port: the port at master_addr where the nodes meet, and where rank 0's store listens afterwards.
        kwargs: the function's keyword arguments.

    Raises:
        TypeError: an option or argument of the wrong type, or arguments that do not fit the function.
        ValueError: an option with a value that cannot be.
        UnpicklableError: the function, or something it needs, cannot travel to the workers.
        FileNotFoundError: there is nothing at the path to resume from.
        LaunchError: node 0 cannot listen at master_addr:master_port; no folder can be made in run_dir; or the run to go
            on from is still being trained.

    Source: the words are torchrun's and `torch.multiprocessing.start_processes`'s.
    """
    given = dict(locals())
    __tracebackhide__ = True
    options = {option.name: given[option.name] for option in fields(Launcher)}
    refuse_collisions(function, options)
    return Launcher(**options)(function, *args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Launcher(Options):
    """The options of `launch` kept, to launch any function with them; spelled so, no option can be an argument.

    two = ddpnb.Launcher(nproc_per_node=2)
    run = two(train, epochs=3)
    """

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run:
        """Start `function(*args, **kwargs)` on workers; as `launch`."""
        __tracebackhide__ = True
        if is_worker():
            raise RuntimeError("this is a ddpnb worker: it cannot launch workers of its own")
        check_call(function, args, kwargs)
        if is_under_torchrun():
            place = World.from_environment(os.environ)
            settled = settled_by_torchrun(self, place)
            return settled._call_in_place(make_plan(settled, function), place, function, args, kwargs)
        plan = make_plan(self, function)
        if self.nproc_per_node == 0:
            return self._call_in_place(plan, None, function, args, kwargs)
        parcel = payload.pack_call(function, args, kwargs)
        here, nnodes, now = plan.local_world_size, plan.nnodes, time.monotonic()
        # As if all nodes had as many ranks as this one: when they have met it is known.
        ranks = range(plan.node_rank * here, (plan.node_rank + 1) * here)
        state = new_state(plan.name, nnodes * here, backend=plan.backend, started=now, cells=parcel.cells, here=ranks)
        home, state = self._make_folder(plan, state, function, args, kwargs)
        with ExitStack() as until_started:
            if home is not None:
                until_started.callback(home.discard)
            run = Run(state)
            run._supervisor = Supervisor(plan, parcel, state, run._changed, home)
            _of_this_kernel.add(run)
            for attach in on_launch:
                attach(run, self.view)
            until_started.pop_all()
        try:
            run._supervisor.start()
        except BaseException:
            run.kill()  # an interrupt that comes right here leaves nobody who could
            raise
        _newest.append(run)
        return run

    def _make_folder(
        self, plan: Plan, state: RunState, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> tuple[Folder | None, RunState]:
        """The run's folder, if it is to have one, and the state that knows of it. Rank 0's kernel has it for all."""
        run_dir = candidates.run_dir_of(self) if state.ranks[0].rank == 0 else None
        if run_dir is None:
            return None, state
        is_restart = is_under_torchrun() and num_restarts() != "0"
        if self.resume:
            _await_stopping(run_dir)
        found = candidates.find(run_dir, self.resume, is_restart=is_restart)
        arguments = folder.arguments_of(function, args, kwargs)
        home = folder.make(run_dir, self, plan, state, function, arguments, tuple(found))
        state = replace(state, folder=str(home.path))
        if not found and (self.resume or is_restart):
            text = f"nothing to resume from in {words.path(run_dir)}: a fresh start"
            state = fold(state, Noted(time=state.started, text=text))
        elif self.resume is True and (newest := folder.runs_in(run_dir)[1]) not in found[0].parents:
            text = f"{newest.name} was the last run there, and has no checkpoint: going on from {words.path(found[0])}"
            state = fold(state, Noted(time=state.started, text=text))
        return home, state

    def _call_in_place(
        self, plan: Plan, place: World | None, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Run:
        """Call the function in this process, to its end: alone (`place` is None), or as the rank that torchrun made."""
        __tracebackhide__ = True
        rank, world_size = (place.rank, place.world_size) if place else (0, 1)
        now = time.monotonic()
        state = new_state(plan.name, world_size, backend=plan.backend, started=now, here=range(rank, rank + 1))
        home, state = self._make_folder(plan, state, function, args, kwargs)
        with ExitStack() as until_started:
            if home is not None:
                until_started.callback(home.discard)
            run = Run(state)
            for attach in on_launch:
                attach(run, self.view if rank == 0 else False)  # one text for all ranks' terminal
            until_started.pop_all()
        _newest.append(run)
        run._call_in_place(plan, place, function, args, kwargs, home)
        return run


_of_this_kernel: weakref.WeakSet[Run] = weakref.WeakSet()
"""Runs that have workers of this kernel's."""
_newest: deque[Run] = deque(maxlen=10)
"""The last runs of this kernel, kept though their names may be gone: each holds its curves and output."""


def runs_of_this_kernel() -> list[Run]:
    """In the order of their launch; of those that have ended and nobody holds, the newest alone."""
    return sorted({*_of_this_kernel, *_newest}, key=lambda run: run.state.started)


def _await_stopping(run_dir: Path) -> None:
    """Wait for a run there that has just been told to stop: it is about to save."""
    for run in list(_of_this_kernel):
        if run.dir is not None and run.dir.parent == run_dir and (run._is_ending or run.state.status == "stopping"):
            run.wait()


class Run:
    """A launched function: watch it, wait for it, stop it. Made by `launch`.

    Waiting methods can be interrupted (the square button, Ctrl-C): the workers are stopped as by `stop()`, and the cell
    gets its KeyboardInterrupt; a second interrupt kills them.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._supervisor: Supervisor | None = None
        self._is_ending = False  # asked to, though the state may not know yet
        self._value_in_place: Any = None
        self._values: dict[int, Any] = {}  # {rank: unpacked value}
        self._has_changed = threading.Condition()
        self._has_ended = threading.Event()
        self._callbacks: list[Callable[[Run], object]] = []
        self.watchers: list[Watcher] = []
        """Called in a thread of the run's with each change: must be quick, a view sets a flag and draws elsewhere."""
        self.finishers: list[Watcher] = []
        """Called after the end in the thread of whoever waits: a cell's last words come from the cell itself."""
        self.around_waits: list[Callable[[], AbstractContextManager[object]]] = []
        """Entered by whoever waits: a view's buttons are kept alive while a cell does nothing else."""

        self.is_shown_here: Callable[[], bool] = lambda: False
        """Whether a view stands in the cell that runs now: the run need not show itself there once more."""

    # ---- what is known

    @property
    def name(self) -> str:
        """What the run is called."""
        return self._state.name

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._state.world_size

    @property
    def state(self) -> RunState:
        """All that is known now; a new object with each change."""
        return self._state

    @property
    def dir(self) -> Path | None:
        """The run's folder, absolute; None: nothing is written, or another process has it."""
        return None if self._state.folder is None else Path(self._state.folder)

    @property
    def history(self) -> History:
        """What was logged: `run.history["loss"]` is the mean over ranks, `run.history["loss", 1]` rank 1's."""
        return History(self._state.history)

    @overload
    def output(self, rank: None = None) -> Texts: ...
    @overload
    def output(self, rank: int) -> Text: ...
    def output(self, rank: int | None = None) -> Texts | Text:
        """What ranks printed, Python and C alike, as text; the last million characters of each.

        Args:
            rank: one rank, whose text is returned. None: all of them, {rank: text}.

        Raises:
            IndexError: there is no such rank.
        """
        if rank is not None:
            return Text(self._state.rank(self._check_rank(rank)).output.text())
        return Texts((each.rank, each.output.text()) for each in self._state.ranks)

    def stacks(self) -> Texts:
        """Where each living rank stands now, as a traceback, {rank: text}; also of ranks stuck in compiled code."""
        if self._supervisor is None or self.done():
            return Texts()
        supervisor = self._supervisor
        before = {each.rank: each.stack for each in self._state.ranks}

        def all_answered() -> bool:
            living = [each for each in self._state.ranks if each.pid is not None and not each.has_reported]
            have_spoken = all(each.stack is not None and each.stack is not before[each.rank] for each in living)
            return self.done() or (have_spoken and supervisor.has_stacks)

        supervisor.ask("stacks")
        with self._has_changed:
            self._has_changed.wait_for(all_answered, _STACKS_PATIENCE)
        state = self._state
        stacks = {each.rank: each.stack for each in state.ranks if each.stack is not None and not each.has_reported}
        return Texts((rank, stack_text(stack, state.cells)) for rank, stack in stacks.items())

    def hang(self) -> Text | None:
        """Why the run makes no steps: the rank that the others wait for, and the line where each stands.

        None while all is well. It is noticed by itself, after `hang_after`; nothing is ended by it.
        """
        return None if self._state.hung is None else Text(report.hang(self._state))

    @property
    def hang_after(self) -> float | None:
        """Seconds without a step after which a rank may be taken for hung, 10 by default; None: nobody watches.

        A rank whose steps usually take long has five of them. One that gives no sign of life (no `Loop`, no
        `should_stop()`, no `log()`) is only noticed where all ranks have waited three times as long without computing.
        """
        return None if self._supervisor is None else self._supervisor.hang_after

    @hang_after.setter
    def hang_after(self, seconds: float | None) -> None:
        if seconds is not None and not seconds > 0:
            raise ValueError(f"hang_after={seconds!r}: a number of seconds above 0, or None for no watch")
        if self._supervisor is not None:
            self._supervisor.hang_after = seconds

    def keep_waiting(self) -> None:
        """Take what hangs for slow: wait twice as long before it is said again. Returns at once."""
        if self._supervisor is not None and not self.done():
            self._supervisor.ask("keep waiting")

    def to_pandas(self) -> Any:
        """All logged points as a DataFrame: columns name, rank, step, value, seconds. Needs pandas."""
        return self.history.to_pandas()

    def plot(
        self, name: str | None = None, *, log: bool = False, by_time: bool = False, smoothing: float = 0
    ) -> Figure:
        """The curves as a matplotlib figure.

        Args:
            name: what is drawn large. None: the loss, else what was logged first. What measures the same on other data
                ("loss", "val_loss") is drawn beside it.
            log: draw logarithms.
            by_time: along seconds, not steps.
            smoothing: 0 … 0.999, how much of itself a running mean keeps from one stroke to the next.

        Raises:
            KeyError: nothing was logged under `name`.
            ValueError: `smoothing` is not below 1.
        """
        from .draw.figure import figure  # matplotlib takes half a second to import

        if name is not None:
            self.history.steps(name)  # whose KeyError says what was logged
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing={smoothing}: 0 for none, and less than 1")
        return figure(self._state, lens=Lens(name, log, by_time, smoothing))

    # ---- waiting

    @property
    def is_live(self) -> bool:
        """Whether more will be known of it: it goes on, and this kernel hears of it."""
        return self.running()

    def done(self) -> bool:
        """Whether the run has ended, in whatever way; no worker lives then."""
        return self._has_ended.is_set()

    def running(self) -> bool:
        """Whether the run has not ended yet."""
        return not self.done()

    def cancelled(self) -> bool:
        """Whether `stop()`, `kill()` or an interrupt ended it before it had a value."""
        return self.done() and self._state.status in ("stopped", "killed")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; whether it has come.

        Args:
            timeout: seconds to wait at most; None: no limit.
        """
        __tracebackhide__ = True
        if timeout == math.inf:
            timeout = None
        try:
            with ExitStack() as entered:
                for around in () if self.done() else self.around_waits:
                    entered.enter_context(around())
                ended = self._has_ended.wait(timeout)
        except KeyboardInterrupt:
            self._end_on_interrupt()
            # Where in `threading` the wait was tells nobody anything.
            kept = "; run.result() has its value" if self._state.status == "finished" else ""
            raise KeyboardInterrupt(f"{self.name} was interrupted, its workers are gone{kept}") from None
        if ended:
            self._finish()
        return ended

    def result(self, timeout: float | None = None) -> Any:
        """Wait, and return what rank 0 returned; on another node its first rank, under torchrun this process.

        Args:
            timeout: seconds to wait at most; None: no limit.

        Raises:
            WorkerError: a rank failed; it is of the worker's own exception type as well.
            RunStopped: the run was stopped (RunKilled: killed) before it had a value.
            LaunchError: the workers could not be started.
            TimeoutError: the run goes on; no WorkerError.
        """
        __tracebackhide__ = True
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._value(self._state.ranks[0].rank)

    def results(self, timeout: float | None = None) -> dict[int, Any]:
        """Wait, and return what each rank of this node returned, {rank: value}. Raises as `result`."""
        __tracebackhide__ = True
        error = self.exception(timeout)
        if error is not None:
            raise error
        return {each.rank: self._value(each.rank) for each in self._state.ranks}

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait, and return what `result` would raise; None where it would not.

        Raises:
            TimeoutError: the run goes on.
        """
        __tracebackhide__ = True
        if not self.wait(timeout):
            raise TimeoutError(f"{self.name} is still running after {timeout} s; wait longer, or run.stop()")
        return self._error()

    def add_done_callback(self, callback: Callable[[Run], object]) -> None:
        """Call `callback(run)` once the run has ended, in a thread of its own; at once where it has."""
        with self._has_changed:
            if not self.done():
                self._callbacks.append(callback)
                return
        callback(self)

    def __await__(self) -> Generator[Any, None, Any]:
        """`await run` gives what `result()` gives.

        Cancelling stops the run: `asyncio.wait_for(run, 5)` cancels what it waits for, `asyncio.wait_for(
        asyncio.shield(run), 5)` does not. An interrupt of a cell that awaits is such a cancellation.
        """
        return self._result_in_loop().__await__()

    # ---- ending

    def stop(self) -> None:
        """Ask the workers to end; returns at once.

        A function that asks `ddpnb.should_stop()` is told at the same step on all ranks, and its value is kept. One
        that never asks is ended after a moment, and there is no value. A `Loop` of a run with a run_dir saves before.
        """
        self._ask("stop")

    def kill(self) -> None:
        """End the workers now; returns at once. `result()` then raises RunKilled."""
        self._ask("kill")

    def save(self) -> None:
        """Have the function's `Loop` save a checkpoint at its next step; returns at once, `state.saved` tells of it.

        Raises:
            ValueError: the run has no folder.
            RuntimeError: there is nobody to ask: the run has ended, or is not this kernel's.
        """
        if self._state.folder is None:
            raise ValueError(
                f"{self.name} has no folder to save in: launch(…, run_dir='runs/digits') gives it one (on several "
                "nodes node 0 has it, and saves for all)"
            )
        self._reach("save").ask("save")

    # ---- steering

    def pause(self) -> None:
        """Have all ranks stand still between two steps, the same on all; returns at once, `state` tells of it.

        They do so at a Loop's step or in `ddpnb.should_stop()`, with nothing under way between them, so that no time
        limit of a collective runs. Asked during the start, they stand after their first step. `stop()` ends a paused
        run without another step. Paused already: no effect.

        Raises:
            RuntimeError: there is nobody to ask: the run has ended, is not this kernel's, or is on several nodes.
        """
        self._reach("pause", on_this_node=True).ask("pause")

    def unpause(self) -> None:
        """Have all ranks go on; returns at once. Not paused: no effect. Raises as `pause`."""
        self._reach("unpause", on_this_node=True).ask("unpause")

    def set(self, **values: Any) -> None:
        """Change values while the run goes on, on all ranks at the same step; returns at once.

            run.set(lr=0.01)

        There are those that the function reads with `ddpnb.setting()`, and lr, momentum and weight_decay of a Loop's
        optimizer: `state.offered`. Of several learning rates the first is set, and the others are scaled by the same
        factor, as are a scheduler's. `state.applied` tells from which step on a value counts. What nothing reads, or
        what is of another type, is told in a note. In a pause it counts from the next step on.

        Raises:
            TypeError: there is no value, or one is no float, int, bool or str.
            ValueError: a number is not finite, or all are too much to travel (8 KiB).
            RuntimeError: as `pause`.
        """
        if not values:
            raise TypeError("run.set() got no value: run.set(lr=0.01)")
        values = {name: settings.checked(name, value) for name, value in values.items()}
        self._reach("set", on_this_node=True).set(values)

    # ---- shown

    def __repr__(self) -> str:
        return text.label(self.name, self.world_size)

    def _ipython_display_(self) -> None:
        """Nothing, as the value of the cell that launched it."""
        if not self.is_shown_here():
            raise NotImplementedError  # IPython takes `_repr_mimebundle_` then

    def _repr_mimebundle_(self, **_: object) -> tuple[dict[str, Any], dict[str, Any]]:
        """One stable line; once the run has ended its figure too."""
        bundle: dict[str, Any] = {"text/plain": repr(self)}
        metadata: dict[str, Any] = {}
        if not self.is_live and self._state.history:
            from .draw.figure import display_metadata, png

            picture = bundle["image/png"] = png(self._state)
            metadata["image/png"] = display_metadata(picture)
        return bundle, metadata

    # ---- inside

    def _changed(self, state: RunState) -> None:
        with self._has_changed:
            self._state = state
            callbacks: list[Callable[[Run], object]] = []
            if state.ended is not None and not self._has_ended.is_set():
                callbacks, self._callbacks = self._callbacks, []
                self._has_ended.set()
            self._has_changed.notify_all()
        for listener in (*self.watchers, *callbacks):
            try:
                listener(self)
            except Exception:
                traceback.print_exc()  # as concurrent.futures does: the others are called all the same

    def _reach(self, what: str, *, on_this_node: bool = False) -> Supervisor:
        """Who can be asked for it; raises RuntimeError where nobody can."""
        if self._supervisor is None:
            raise RuntimeError(f"{self.name} runs in the kernel itself, which is busy with it: nobody can be asked")
        if self.done():
            status = summary.status(self._state)
            over = "has finished" if status == "finished" else f"has ended ({status})"
            raise RuntimeError(
                f"{self.name} {over}: {_TOO_LATE[what]}. Launch it again; with run_dir= and resume=True it goes on."
            )
        if on_this_node and len(self._state.ranks) < self.world_size:
            raise RuntimeError(f"run.{what}() does not reach the other nodes of {self.name} yet; run.stop() does")
        return self._supervisor

    def _ask(self, how: Literal["stop", "kill"]) -> None:
        if self._supervisor is not None and not self.done():
            self._is_ending = True
            self._supervisor.ask(how)

    def _call_in_place(
        self,
        plan: Plan,
        place: World | None,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        home: Folder | None,
    ) -> None:
        __tracebackhide__ = True
        try:
            self._value_in_place = inplace.run(plan, place, function, args, kwargs, self._state, self._changed, home)
        finally:
            self._finish()

    def _finish(self) -> None:
        for finisher in tuple(self.finishers):
            finisher(self)

    async def _result_in_loop(self) -> Any:
        turning = asyncio.get_running_loop().create_task(_keep_turning())
        try:
            await self._end()
        except asyncio.CancelledError:
            self.stop()
            try:
                await self._end()
            except asyncio.CancelledError:
                self.kill()
                self._has_ended.wait()
            self._finish()
            raise
        finally:
            turning.cancel()
        return self.result()

    async def _end(self) -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def resolve() -> None:
            if not ended.done():
                ended.set_result(None)

        def tell(_: Run) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(resolve)

        self.add_done_callback(tell)
        await ended

    def _end_on_interrupt(self) -> None:
        """Stop; a second interrupt, which comes while this one waits, kills."""
        self.stop()
        try:
            self._has_ended.wait()
        except KeyboardInterrupt:
            self.kill()
            self._has_ended.wait()
        self._finish()

    def _error(self) -> Exception | None:
        """What the run ended with, made anew: an exception that is raised again gathers tracebacks."""
        state = self._state
        if state.first_failure is not None:
            return _worker_error(state)
        if state.problem is not None:
            return LaunchError(report.report(state))
        match state.status:
            case "killed":
                return RunKilled(f"run {self.name!r} was killed before it had a value")
            case "stopped":
                return RunStopped(f"run {self.name!r} was stopped before it had a value: {_who_never_asked(state)}")
        return None

    def _value(self, rank: int) -> Any:
        if self._supervisor is None:
            return self._value_in_place
        if rank not in self._values:
            returned = self._state.rank(rank).returned
            assert returned is not None
            self._values[rank] = payload.unpack(returned.value)
        return self._values[rank]

    def _check_rank(self, rank: int) -> int:
        here = [each.rank for each in self._state.ranks]
        if rank not in here:
            where = "" if len(here) == self.world_size else " here"
            raise IndexError(f"there is no rank {rank}{where}; ranks{where} are {here[0]} … {here[-1]}")
        return rank


def open_run(path: str | os.PathLike[str]) -> Run:
    """A run from its folder: finished, interrupted, or still going on in another kernel.

        run = ddpnb.open_run("runs/digits")     # the newest run there
        run.plot()
        run.history["loss"]

    The run has `state`, `history`, `plot()`, `output()`, `to_pandas()`, `dir` and `name`, and shows itself as a cell's
    value. Returned values are not kept in the folder; the model is in its checkpoints. Of a run that goes on it is a
    snapshot. Nothing is executed, and no pickle is read.

    Args:
        path: a run's own folder, or a run_dir, of which the newest run is opened.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: the folder is damaged, or was written by a newer ddpnb.
    """
    return _RecordedRun(recording.read_state(recording.find(path)))


class _RecordedRun(Run):
    """A run that its folder tells of. Nobody can be asked and nothing is waited for: it never changes."""

    def __init__(self, state: RunState) -> None:
        super().__init__(state)
        self._has_ended.set()  # for whoever waits: no more is to come

    @property
    def is_live(self) -> bool:
        return False

    def done(self) -> bool:
        return self._state.ended is not None

    def wait(self, timeout: float | None = None) -> bool:
        return self.done()

    def exception(self, timeout: float | None = None) -> Exception | None:
        return None if self._state.status == "finished" else self._error() or self._without_value()

    def result(self, timeout: float | None = None) -> NoReturn:
        raise self._error() or self._without_value()

    def results(self, timeout: float | None = None) -> NoReturn:
        self.result()

    def _without_value(self) -> RuntimeError:
        return RuntimeError(
            f"{self.name} was opened from its folder, {words.path(self._state.folder or '')}: returned values are not "
            "kept there. Its model is in its checkpoints."
        )

    def add_done_callback(self, callback: Callable[[Run], object]) -> None:
        callback(self)

    def save(self) -> NoReturn:
        self._refuse("save")

    def _reach(self, what: str, *, on_this_node: bool = False) -> NoReturn:
        self._refuse(what)

    def _ask(self, how: Literal["stop", "kill"]) -> NoReturn:
        self._refuse(how)

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(f"run.{what}(): {self.name} was opened from its folder, it is not this kernel's run")


async def _keep_turning() -> None:
    while True:
        await asyncio.sleep(_LOOP_TURNS)


def _worker_error(state: RunState) -> WorkerError:
    failure = state.first_failure
    assert failure is not None
    cause = None
    if isinstance(failure.witness, Raised) and failure.witness.exception is not None:
        try:
            cause = payload.unpack(failure.witness.exception)
        except Exception:
            cause = None  # its class needs what only the worker has: the report has its text
    exited = None if isinstance(failure.witness, Lost) else state.rank(failure.rank).exited
    exitcode = exited.exitcode if exited is not None and not exited.ended_by_us else None
    return worker_error(report.report(state), rank=failure.rank, exitcode=exitcode, cause=cause)


def _who_never_asked(state: RunState) -> str:
    silent = [str(each.rank) for each in state.ranks if not each.returned and not each.stopping]
    if not silent:
        return "it did not return within stop_timeout"
    ranks = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(silent)}"
    return f"{ranks} did not ask ddpnb.should_stop() and had to be ended"
