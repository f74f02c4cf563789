"""What a training function may ask and say: `rank()`, `device()`, `log()`, `setting()`, `should_stop()` …

A *session* stands behind these functions: in a worker it speaks to the kernel through the rank's own pipe, in place
(`nproc_per_node=0`) straight to the run's state. Without one, outside of a launched function, they answer from
torchrun's variables or the user's own process group, else as in a world of one process.

`log()` only appends to a deque. A thread empties it a few times a second: it counts steps, packs columns and sends, so
that the training step pays microseconds, whatever happens at the other end.

Runs in: worker (and in the kernel for a run in place)
"""

from __future__ import annotations

import operator
import os
import resource
import sys
import threading
import time
import traceback
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .agreement import Page
from .messages import Applied, FromWorker, Metrics, Noted, Offered, Paused, Progress, Setting, Stopping, Unpaused
from .settings import Change, Settings, Value, checked
from .stopwatch import Stopwatch
from .world import World, is_under_torchrun

if TYPE_CHECKING:
    import torch

    from .lifeline import Lifeline

Item = TypeVar("Item")

_MOST_STEPS = 1 << 63
_MOST_TURNS = 8
"""Epochs told of in one flush, the newest: of shorter ones a view draws some only."""

FLUSH_INTERVAL = 0.4
"""Seconds between batches: a value shows within half a second even where a step takes minutes."""


class Send(Protocol):
    """Takes messages, in order."""

    def __call__(self, *messages: FromWorker) -> None:
        """Send them."""


# ---- what a training function calls


def rank() -> int:
    """Global rank of this process, 0 … world_size - 1."""
    return _place().rank


def local_rank() -> int:
    """Rank of this process among those of its node."""
    return _place().local_rank


def world_size() -> int:
    """Number of processes on all nodes."""
    return _place().world_size


def local_world_size() -> int:
    """Number of processes on this node."""
    return _place().local_world_size


def node_rank() -> int:
    """Number of this node, 0 … nnodes - 1."""
    return _place().node_rank


def is_rank_zero() -> bool:
    """Whether this is global rank 0, the one that prints and writes for all."""
    return _place().rank == 0


def device() -> torch.device:
    """The device this rank computes on: its own GPU where every rank of the node has one, else the CPU."""
    import torch

    if _session is not None:
        return torch.device(_session.device)
    place = _place()
    if torch.cuda.device_count() < place.local_world_size:
        return torch.device("cpu")
    return torch.device("cuda", place.local_rank)


def log(values: Mapping[str, Any] | None = None, /, *, step: int | None = None, **named: Any) -> None:
    """Report numbers of this rank; the view draws a curve for each name, and `run.history` keeps them.

        ddpnb.log(loss=loss)                       # a tensor of one element, on any device
        ddpnb.log({"loss/train": 0.31}, step=120)

    The device is never synchronised: a GPU tensor is copied while the step goes on and read when it has arrived.

    Args:
        values: {name: value}, for names that are no Python identifiers.
        step: where on the x axis. None: the current step, which is the last that was given, or how often the most
            logged name was logged before: a loss logged at each step counts the steps, an accuracy logged once an
            epoch stands where the loss is.
        named: values by name; numbers, or tensors or arrays of one element.

    Raises:
        TypeError: a value is no number, the step no integer, or there is no value.
        ValueError: a tensor has more than one element, or a step does not fit into 64 bits.
    """
    if values is not None:
        named = {**_checked_names(values), **named}
    if not named:
        raise TypeError("log() got no value: log(loss=loss), or log({'loss': loss}, step=step)")
    if step is not None:
        step = _checked_step(step)
    # Between two training steps all this code is cold, and every line of it costs: nothing is looked up in an object,
    # and the usual tensor is read here. At once: the caller may change it in place. By tolist(): item() is slower.
    for name, value in named.items():
        if value.__class__ is _tensor and value.is_cpu and (number := value.tolist()).__class__ is float:
            named[name] = number
        elif value.__class__ is not float:
            named[name] = _number(name, value)
    _record((step, monotonic(), named))


def progress(iterable: Iterable[Item], description: str = "", *, total: int | None = None) -> Iterable[Item]:
    """Iterate, and show how far this rank is; loops may be nested.

        for epoch in ddpnb.progress(range(epochs), "epoch"):
            for inputs, targets in ddpnb.progress(loader, "step"):

    Args:
        iterable: anything that can be iterated.
        description: a word for its items.
        total: number of items; None: `len(iterable)` where it has one.
    """
    return _Loop(iterable, description, total)


def should_stop() -> bool:
    """Whether the run is to end: ask once per step, and return (after saving what is worth it) when it says True.

    All ranks get the same answer at the same call, so none is left waiting in a collective; call it equally often on
    every rank. Costs microseconds, no system call and no communication. It is also where `run.pause()` holds a rank,
    and from where on what `run.set()` has changed is read. A process that the function forks, such as a DataLoader's
    worker, hears False.
    """
    return _session.should_stop() if _session is not None else False


def setting(name: str, default: Value) -> Value:
    """A value that may be changed while the run goes on, with `run.set(…)`; until then it is `default`.

        for inputs, targets in loop:
            loop.update(criterion(model(inputs), targets) + ddpnb.setting("penalty", 0.01) * norm(model))

    Read it where it is used, in each step: costs a microsecond. It changes at a Loop's step or a `should_stop()`, at
    the same one on all ranks, and keeps the default's type. Its values are in the run's history and its checkpoints: a
    run that is resumed has them again from its Loop on. Under torchrun, in place and on its own a function gets the
    default; a DataLoader's worker, what held when it was started.

    Args:
        name: also for `run.set`; a Python identifier, then.
        default: float, int, bool or str.

    Raises:
        TypeError: the default is of another type.
    """
    if _session is not None:
        return _session.setting(name, default)
    checked(name, default)
    return default


# ---- behind them


class Session:
    """One process's link to its run, from before the function is called until after it has ended.

    Args:
        place: where this process stands.
        device: `str(torch.device)` to compute on.
        send: takes messages for the kernel; called from the session's thread and from the function's.
        page: the run's shared page; None where nobody can ask for a stop.
        folder: the run's own folder; None: nothing is written.
        candidates: checkpoints to resume from, the one to prefer first; empty: a fresh start.
        arguments: the function's arguments as the run's folder has them, a JSON object.
        lifeline: this process's; None where it is the kernel's own.
    """

    def __init__(
        self,
        place: World,
        device: str,
        send: Send,
        page: Page | None,
        *,
        folder: Path | None = None,
        candidates: tuple[Path, ...] = (),
        arguments: str = "{}",
        lifeline: Lifeline | None = None,
    ) -> None:
        self.place = place
        self.device = device
        self.folder = folder
        self.candidates = candidates
        self.arguments = arguments
        self.stopwatch = Stopwatch(place, device)
        self._lifeline = lifeline
        self.records: deque[tuple[int | None, float, dict[str, Any]]] = deque()  # (step, time, {name: value})
        self.loops: list[_Loop[Any]] = []  # under way or just over, outermost first
        self._send = send
        self._page = page
        self._local_rank = place.local_rank
        self._flushing = threading.Lock()
        self._counts: dict[str, int] = {}  # {name: how often it was logged without a step}
        self._latest: dict[str, tuple[int, float]] = {}  # {name: (step, value) logged last}
        self._current_step = 0
        self._stopping = False
        self.settings = Settings()
        """What the function reads with `setting()`, and what was set of it."""
        self.paused_for = 0.0
        """Seconds that this rank has stood still in pauses."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._flush_regularly, name="ddpnb-session", daemon=True)

    def __enter__(self) -> Session:
        global _session, _record, _tensor
        _session, _record = self, self.records.append
        torch = sys.modules.get("torch")
        _tensor = torch.Tensor if torch is not None else _OnItsWay
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Send what is left. Nothing that was logged is lost, and the thread is gone."""
        global _session, _record
        self._closed.set()
        self._thread.join()
        self.flush(wait=True)
        _session, _record = None, _outside

    def tell(self, *messages: FromWorker) -> None:
        """Say something of the run, in order. From any thread."""
        self._send(*messages)

    def should_stop(self) -> bool:
        """As the function of this name."""
        page = self._page
        if page is None or not page.check(self._local_rank):
            return False
        if page.is_to_pause(self._local_rank):
            self._pause(page)
        self._take_settings(page)
        if not page.is_to_stop(self._local_rank):
            return False
        if not self._stopping:
            self._stopping = True
            check = page.num_checks(self._local_rank)
            self._send(Stopping(rank=self.place.rank, time=time.monotonic(), check=check))
        return True

    def _pause(self, page: Page) -> None:
        """Stand still. What was logged is sent before, so that nothing moves in a view of a paused run."""
        self.flush(wait=True)
        rank, began = self.place.rank, time.monotonic()
        self._send(Paused(rank=rank, time=began, check=page.num_checks(self._local_rank)))
        while page.is_to_pause(self._local_rank):
            page.rest(self._local_rank)
            self._take_settings(page)
        now = time.monotonic()
        self.paused_for += now - began
        self.stopwatch.leave_out(now - began)
        self._send(Unpaused(rank=rank, time=now))

    # ---- settings

    def setting(self, name: str, default: Value) -> Value:
        """As the function of this name."""
        present = self.settings.read.get(name)
        if present is None:
            present = self._first_read(name, default)
        return present  # type: ignore[return-value]  # it keeps the type of the first default

    def _first_read(self, name: str, default: Setting) -> Setting:
        changes = list(self.settings.first_read(name, checked(name, default)))
        value = self.settings.read[name]
        if self._page is None:
            return value
        if name not in self.settings.claimed:
            self._say(Offered(rank=self.place.rank, time=time.monotonic(), name=name, value=value))
            if not changes:
                self.log_setting(name, value, self._next_step())
        self._tell_changes(changes)
        return value

    def claim_settings(self, values: Mapping[str, Setting], apply: Callable[[str, Setting], None]) -> None:
        """Offer settings that the caller applies himself.

        Args:
            values: as they are now.
            apply: called in a check, on all ranks in the same, with a name and what it was set to; refuses that by a
                ValueError, the same on all.
        """
        self.settings.claim(values, apply)
        for name, value in values.items():
            if self.settings.read.get(name) == value:
                continue  # the function has handed on what it read
            self._say(Offered(rank=self.place.rank, time=time.monotonic(), name=name, value=value))

    def recall_settings(self, values: Mapping[str, Setting]) -> None:
        """Have again what was set in the run from which this one goes on."""
        for each in self.settings.recall(values):
            if isinstance(each, str):
                self.note(each)
            else:
                self._say(Offered(rank=self.place.rank, time=time.monotonic(), name=each.name, value=each.value))

    def say_applied(self, name: str, before: Setting | None, value: Setting, step: int) -> None:
        """Tell the kernel of a change, from this step on."""
        now, rank = time.monotonic(), self.place.rank
        self._say(Applied(rank=rank, time=now, name=name, before=before, value=value, step=step))

    def log_setting(self, name: str, value: Setting, step: int) -> None:
        """Put a number into the history. Unlike `log()` it counts no step: a value may change twice before one."""
        if not isinstance(value, bool | str):
            self.flush(wait=True)
            self._send(self._points(name, [(step, float(value), time.monotonic())]))

    def note(self, text: str) -> None:
        """Something the user should know, once for all ranks."""
        self._say(Noted(time=time.monotonic(), text=text))

    def _take_settings(self, page: Page) -> None:
        packed = page.take_settings(self._local_rank)
        if packed is not None:
            self._tell_changes(self.settings.take(packed))
            self.flush()

    def _tell_changes(self, changes: Iterable[Change | str]) -> None:
        for each in changes:
            if isinstance(each, str):
                self.note(each)
            elif each.name not in self.settings.claimed:  # whoever has claimed it says when he has applied it
                step = self._next_step()
                self.say_applied(each.name, each.before, each.value, step)
                self.log_setting(each.name, each.value, step)

    def _next_step(self) -> int:
        """The step at which the next value is logged, as far as can be known."""
        self.flush(wait=True)
        return self._current_step + 1 if self._latest else self._current_step

    def _say(self, message: FromWorker) -> None:
        """Say what is the same on all ranks: each node's first does."""
        if self._local_rank == 0:
            self._send(message)

    def outlive_kernel(self, does: bool) -> None:
        """Whether this rank, when its kernel is gone, still finishes its step and saves; all ranks stop at the same."""
        if self._lifeline is not None and does:
            self._lifeline.loosen(self._stop_without_kernel)
        elif self._lifeline is not None:
            self._lifeline.tighten()

    def _stop_without_kernel(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for output in (1, 2):
            os.dup2(nowhere, output)  # nobody reads the pipe any more: a print would fail
        if self._page is not None:
            self._page.take_over()

    def num_saves_asked(self) -> int:
        """How often the kernel has asked for a checkpoint so far."""
        return 0 if self._page is None else self._page.num_saves_asked()

    def go_on_from(self, step: int) -> None:
        """Values logged without a step stand at this one from now on, until a later one is given."""
        self._current_step = max(self._current_step, step)

    def latest(self, name: str) -> tuple[int, float] | None:
        """Step and value of what was logged last under a name; None where there is none."""
        self.flush(wait=True)
        return self._latest.get(name)

    def flush(self, *, wait: bool = False) -> None:
        """Send what was logged, how far the loops are, and how steps are spent.

        Args:
            wait: also for values that are still on their way from a GPU.
        """
        with self._flushing:
            messages: list[FromWorker] = [*self._metrics(wait), *self._progress(), *self._unread()]
            if paced := self.stopwatch.news(last=wait):
                messages.append(paced)
            if messages:
                self._send(*messages)
        if self._page is not None:
            self._page.note_memory(self.place.local_rank, peak_bytes())

    def _flush_regularly(self) -> None:
        while not self._closed.wait(FLUSH_INTERVAL):
            try:
                self.flush()
            except Exception:
                traceback.print_exc()  # one batch is lost, and said; the next may be better

    def _metrics(self, wait: bool) -> Iterator[Metrics]:
        points: dict[str, list[tuple[int, float, float]]] = {}
        for step, moment, named in self._arrived(wait):
            if step is None:
                step = self._step_of(named)
            elif step > self._current_step:
                self._current_step = step
            for name, value in named.items():
                points.setdefault(name, []).append((step, value, moment))
        for name, rows in points.items():
            self._latest[name] = rows[-1][:2]
            yield self._points(name, rows)

    def _points(self, name: str, rows: list[tuple[int, float, float]]) -> Metrics:
        steps, values, times = zip(*rows, strict=True)
        return Metrics(
            rank=self.place.rank,
            time=time.monotonic(),
            name=name,
            steps=array("q", steps).tobytes(),
            values=array("d", values).tobytes(),
            times=array("d", times).tobytes(),
        )

    def _arrived(self, wait: bool) -> Iterator[tuple[int | None, float, dict[str, float]]]:
        records = self.records
        for _ in range(len(records)):  # and not what is logged meanwhile: a tight loop never ends
            record = records[0]
            for name, value in record[2].items():
                if value.__class__ is not float:
                    if not (wait or value.has_arrived()):
                        return  # later ones wait too: order is kept
                    record[2][name] = value.read()
            yield records.popleft()

    def _step_of(self, named: dict[str, float]) -> int:
        counts, step = self._counts, self._current_step
        for name in named:
            counts[name] = count = counts.get(name, -1) + 1
            if count > step:
                step = count
        self._current_step = step
        return step

    def _progress(self) -> Iterator[Progress]:
        for depth, loop in enumerate(self.loops[:]):
            done = loop.done
            if done != loop.sent:
                turns = loop.turns(done)
                loop.sent = done
                for before, began in [*turns, (done, loop.began)]:
                    yield Progress(
                        rank=self.place.rank,
                        time=time.monotonic(),
                        depth=depth,
                        done=before,
                        total=loop.total,
                        description=loop.description,
                        began=began,
                    )

    def _unread(self) -> Iterator[Noted]:
        """What was set and nothing reads, once a whole step lies behind this rank: one may read after its check."""
        page, settings = self._page, self.settings
        if settings.unread and page is not None and (settings.claimed or page.num_checks(self._local_rank) > 1):
            for text in settings.take_unread():
                if self._local_rank == 0:
                    yield Noted(time=time.monotonic(), text=text)


class _Loop(Iterable[Item]):
    """An iterable that counts what was taken from it."""

    def __init__(self, iterable: Iterable[Item], description: str, total: int | None) -> None:
        self.description = str(description)
        self.total = operator.index(total) if total is not None else _length(iterable)
        self.done = 0
        self.began: float | None = None
        """When the item under way was handed out."""
        self.sent: int | None = None
        """What was last said of it; None: nothing."""
        self._iterable = iterable
        self._is_over = False
        self._turns: deque[tuple[int, float]] = deque(maxlen=_MOST_TURNS)  # (items done, when the next began)

    def turns(self, done: int) -> list[tuple[int, float]]:
        """Epochs that have come and gone since the last flush: (those done before it, when it began), oldest first."""
        found = []
        while self._turns and self._turns[0][0] < done:
            found.append(self._turns.popleft())
        return [turn for turn in found if self.sent is None or turn[0] > self.sent]

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError(f"{type(self._iterable).__name__} has no length")
        return self.total

    def __iter__(self) -> Iterator[Item]:
        session = _session
        self.done, self.began, self.sent, self._is_over = 0, None, None, False
        if session is not None:
            # Loops that are over stay until another takes their place: the view shows how they ended.
            session.loops = [*(loop for loop in session.loops if not loop._is_over), self]
        try:
            for item in self._epochs() if self.description == "epoch" else self._iterable:
                self.began = time.monotonic()
                yield item
                self.done += 1
        finally:
            self._is_over = True

    def _epochs(self) -> Iterator[Item]:
        """The items; of each is told where it began, however short it is."""
        self._turns.clear()
        for item in self._iterable:
            self._turns.append((self.done, time.monotonic()))
            yield item


class _OnItsWay:
    """One number of a GPU, copied without waiting for the device."""

    def __init__(self, name: str, value: torch.Tensor) -> None:
        import torch

        if value.numel() != 1:
            raise _not_one_number(name, value)
        self._copy = value.detach().to("cpu", non_blocking=True)  # into pinned memory: torch does so for this call
        self._event = torch.Event(value.device)
        self._event.record()

    def has_arrived(self) -> bool:
        return self._event.query()

    def read(self) -> float:
        self._event.synchronize()  # at the end of a run the last values are waited for
        return float(self._copy)


def _checked_names(values: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in values:
        if not isinstance(name, str):
            raise TypeError(f"log({{{name!r}: …}}): a name is a str, not {type(name).__name__}")
    return values


def _checked_step(step: Any) -> int:
    step = operator.index(step)
    if not -_MOST_STEPS <= step < _MOST_STEPS:
        raise ValueError(f"log(step={step}): a step is below 2**63")
    return int(step)


def _number(name: str, value: Any) -> Any:
    """`value` as a float, or as a copy on its way from a GPU that `_arrive` can read."""
    if isinstance(value, _tensor):
        if not value.is_cpu:
            return _OnItsWay(name, value)
        if value.numel() != 1:
            raise _not_one_number(name, value)
    try:
        return float(value.item() if hasattr(value, "item") else value)  # an array of one element is no float
    except (TypeError, ValueError):
        kind = type(value).__name__
        raise TypeError(f"log({name}=…) takes a number or a tensor of one element, not {value!r} ({kind})") from None


def _not_one_number(name: str, value: torch.Tensor) -> ValueError:
    return ValueError(
        f"log({name}=…): a tensor of shape {tuple(value.shape)} is not one number; log its mean() or sum()"
    )


def _say_nothing(*_: object) -> None:
    """Takes what is said where nobody listens."""


_session: Session | None = None
"""This process's session; None outside of a launched function."""

_nobody = Session(World(), "cpu", lambda *_: None, None)


def _outside(_: object) -> None:
    warnings.warn("ddpnb.log() outside of a launched function: the values go nowhere", stacklevel=3)


_record: Callable[[tuple[int | None, float, dict[str, Any]]], None] = _outside
"""Takes what `log()` was given; the session's, or one that warns."""
_tensor: Any = ()
"""`torch.Tensor`, or nothing."""


def current_session() -> Session | None:
    """This process's session; None outside of a launched function."""
    return _session


def stopwatch() -> Stopwatch:
    """What takes the times of this process's steps; outside of a launched function one that nobody reads."""
    return (_session or _nobody).stopwatch


def _place() -> World:
    if _session is not None:
        return _session.place
    if is_under_torchrun():
        return World.from_environment(os.environ)
    return _place_in_own_group() or _nobody.place


def _place_in_own_group() -> World | None:
    """Where this process stands in a group that the user made without any launcher; None where there is none.

    Torch does not tell who shares a node. LOCAL_RANK and its like do, where they are set; else it is taken for one.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    own = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    return World.from_environment(os.environ | own)


def _length(iterable: object) -> int | None:
    try:
        return len(iterable)  # type: ignore[arg-type]
    except TypeError:
        return None


def peak_bytes() -> int:
    """The most memory that this process has held so far, in bytes; one system call."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _drop_session_in_child() -> None:
    """A forked grandchild, a DataLoader worker say, inherits the session but not its thread: it must not speak.

    Nor may it count as a check of its rank's what it asks: all ranks make equally many.
    """
    global _record
    if _session is not None:
        _record = _session._send = _say_nothing
        _session._page, _session._flushing = None, threading.Lock()


os.register_at_fork(after_in_child=_drop_session_in_child)
