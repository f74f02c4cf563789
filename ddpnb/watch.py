"""Notices that a run makes no steps any more, and says so; it never ends anything.

A rank's signs of life are what it tells anyway: its checks on the shared page, which `Loop`, `evaluate` and
`should_stop()` count, the points it logs, the items of its loops. A rank that gave some and is silent for much longer
than usual is taken for hung. One that gives none, or whose loops are over, may do anything: that it waits for something
is only said where no process of any rank has computed for a long time.

Runs in: kernel
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from . import process
from .agreement import Page
from .messages import AnyMessage, Halted, Hung, Woke
from .state import RankState, RunState

HANG_AFTER = 10.0
"""Seconds of silence after which a rank may be taken for hung."""

_USUAL = 5
"""Of its usual intervals a rank may be silent, where that is longer."""
_ONCE = 2
"""Times the longest silence that ended by itself, where that is longer: an evaluation without signs comes again."""
_IDLE = 3
"""Times `hang_after` that all ranks may wait without computing, where none gives signs of life."""
_IDLE_SHARE = 0.02
"""Of a processor: what threads in the background use."""
_FEW = 3
"""Signs of one kind that make a rank one that gives signs: values logged before the first step are none of a step."""
_NEWEST = 20  # intervals that the usual one is taken from
_LOOK = 1.0
"""Most seconds between two looks; an idle kernel is woken for each."""
_ANSWER = 1.0
"""Seconds that ranks have to say where they stand before it is said that they hang."""
_SOON = 0.02  # seconds between looks while they do


@dataclass(slots=True)
class _Pulse:
    """One rank's signs of life."""

    since: float
    """Monotonic time of the last sign."""
    signs: tuple[int, ...] = ()
    """What was counted then, a number for each kind."""
    intervals: deque[float] = field(default_factory=lambda: deque(maxlen=_NEWEST))
    """Seconds between looks that saw a sign: as long as a step, or as a look's interval."""
    longest: float = 0.0
    """Seconds of the longest silence that ended by itself: it was slow, and may be so again."""
    used: float | None = None
    """Seconds of processor time it had used when that was last looked at; None before."""
    looked: float = 0.0
    """Monotonic time of that."""
    idle_since: float = 0.0

    @property
    def gives_signs(self) -> bool:
        return max(self.signs, default=0) >= _FEW

    def beat(self, signs: tuple[int, ...], now: float, was_halted: bool) -> None:
        silence = now - self.since
        if any(self.signs):
            self.intervals.append(silence)
        self.signs, self.since = signs, now
        if self.gives_signs and not was_halted:
            self.longest = max(self.longest, silence)

    def look_at_use(self, pid: int, now: float) -> None:
        used = process.seconds_used(pid)
        most = _IDLE_SHARE * (now - self.looked)
        if used is None or self.used is None or used - self.used > most:
            self.idle_since = now
        self.used, self.looked = used, now


class Watch:
    """Looks at the ranks of one run.

    Args:
        page: the run's shared page.
        tell: takes messages.
        ask_stacks: has each rank say where it stands.
    """

    def __init__(self, page: Page, tell: Callable[[AnyMessage], None], ask_stacks: Callable[[], None]) -> None:
        self.hang_after: float | None = HANG_AFTER
        """Seconds of silence; None: nobody watches."""
        self._page = page
        self._tell = tell
        self._ask_stacks = ask_stacks
        self._pulses: dict[int, _Pulse] = {}  # {rank: its signs}
        self._patience = 1  # times the usual
        self._waiting_since = 0.0  # monotonic time at which the user last chose to wait
        self._asked: float | None = None  # monotonic time at which the ranks were asked where they stand
        self._due = 0.0
        self._limit = HANG_AFTER  # `hang_after` at the last look: another thread may set it

    def timeout(self, state: RunState, now: float) -> float | None:
        """Seconds until the next look; None where none is needed."""
        is_on = self.hang_after is not None and _can_hang(state)
        return max(0.0, self._due - now) if is_on else None

    def look(self, state: RunState, now: float, has_answered: bool) -> None:
        """See whether all make steps, and tell what has changed. Cheap where it is not time yet.

        Args:
            state: as it is now.
            now: monotonic time.
            has_answered: all ranks that were asked where they stand have said so.
        """
        limit = self.hang_after
        if limit is None or not _can_hang(state):
            self._rest(state, now)
            return
        self._limit = limit
        if now < self._due:
            return
        for local_rank, rank in enumerate(state.ranks):
            if _is_watched(rank):
                self._feel(state, rank, local_rank, now)
        silence = self._silence(state, now)
        if silence is None:
            self._asked = None
            if state.hung:
                self._tell(Woke(time=now))
        elif state.hung is None:
            self._report(silence, now, has_answered)
        self._due = now + (self._interval() if self._asked is None else _SOON)

    def keep_waiting(self, state: RunState, now: float) -> None:
        """Be patient for twice as long as before, from now on."""
        self._patience *= 2
        self._waiting_since = now
        if state.hung:
            self._tell(Woke(time=now))

    def _rest(self, state: RunState, now: float) -> None:
        """Forget what was seen: a pause is no silence."""
        self._pulses.clear()
        self._asked = None
        if state.hung and not (state.asked or state.first_failure):
            self._tell(Woke(time=now))

    def _interval(self) -> float:
        return min(_LOOK, max(self._limit / 4, _SOON))

    def _feel(self, state: RunState, rank: RankState, local_rank: int, now: float) -> None:
        assert rank.pid is not None
        pulse = self._pulses.setdefault(rank.rank, _Pulse(since=now, idle_since=now))
        signs = self._signs(state, rank, local_rank)
        is_alive = signs != pulse.signs
        if is_alive:
            pulse.beat(signs, now, rank.halted)
        elif not _makes_steps(rank, pulse) and now - pulse.looked >= self._limit:
            pulse.look_at_use(rank.pid, now)
        is_halted = not is_alive and process.is_halted(rank.pid)
        if is_halted != rank.halted:
            self._tell(Halted(rank=rank.rank, time=now, halted=is_halted))

    def _signs(self, state: RunState, rank: RankState, local_rank: int) -> tuple[int, ...]:
        curves = [ranks[rank.rank] for ranks in state.history.values() if rank.rank in ranks]
        points = [curve.num_points - curve.num_recalled for curve in curves]
        # Loops that go on from a checkpoint begin far along.
        items = [] if state.resumed else [loop.done for loop in rank.progress]
        return self._page.num_checks(local_rank), *points, *items

    def _silence(self, state: RunState, now: float) -> float | None:
        """Seconds since the last sign of the rank that is overdue for longest; None where none is."""
        watched = [(rank, self._pulses[rank.rank]) for rank in state.ranks if _is_watched(rank)]
        steppers = [pulse for rank, pulse in watched if _makes_steps(rank, pulse)]
        overdue = [pulse for pulse in steppers if now - self._begin(pulse.since) > self._patience_with(pulse)]
        if overdue:
            return now - min(pulse.since for pulse in overdue)
        if steppers or len(watched) < sum(not rank.has_reported for rank in state.ranks):
            return None
        idle_since = max(pulse.idle_since for _, pulse in watched)
        is_long = now - self._begin(idle_since) > _IDLE * self._limit * self._patience
        return now - idle_since if is_long else None

    def _begin(self, since: float) -> float:
        return max(since, self._waiting_since)

    def _patience_with(self, pulse: _Pulse) -> float:
        usual = median(pulse.intervals) if pulse.intervals else 0.0
        return max(self._limit, _USUAL * usual, _ONCE * pulse.longest) * self._patience

    def _report(self, silence: float, now: float, has_answered: bool) -> None:
        """Ask all ranks where they stand; say that they hang once they have answered, or had the time to."""
        if self._asked is None:
            self._asked = now
            self._ask_stacks()
        elif has_answered or now - self._asked > _ANSWER:
            self._asked = None
            self._tell(Hung(time=now, silence=silence))


def _can_hang(state: RunState) -> bool:
    """Whether steps are to be expected: nobody has asked for an end or a pause, nothing has failed, some rank is on."""
    is_held = state.asked or state.first_failure or state.pausing or state.paused_since is not None
    return not is_held and any(map(_is_watched, state.ranks))


def _is_watched(rank: RankState) -> bool:
    return rank.pid is not None and rank.phase in ("rendezvous", "running") and not rank.has_reported


def _makes_steps(rank: RankState, pulse: _Pulse) -> bool:
    """Whether more signs are to be expected of it: it has given some, and its outermost loop is not over."""
    outermost = rank.progress[0] if rank.progress else None
    is_over = outermost is not None and outermost.done == outermost.total
    return pulse.gives_signs and not is_over
