"""How a kernel steers its workers: pauses, and what is set while they run.

Nothing is sent to a worker: all is written on the shared page (`agreement.py`). Settings wait here until all ranks have
taken those before.

Runs in: kernel
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

from .agreement import Page
from .messages import AnyMessage, Noted, Setting, Steered
from .settings import Set, pack
from .state import RankState, RunState

NEVER_ASKED_PATIENCE = 3.0
"""Seconds after which a function that asks nothing is said to be one that cannot be steered."""


class Helm:
    """The pauses and settings of one run. All but `set` is for one thread.

    Args:
        page: the run's.
    """

    def __init__(self, page: Page) -> None:
        self._page = page
        self._lock = threading.Lock()
        self._set: dict[str, Set] = {}
        self._version = 0  # of what is set here
        self._offered = 0  # of what is on the page
        self._is_taken = True
        self._asked: float | None = None  # when something was asked that has not happened yet
        self._has_noted = False

    def set(self, values: Mapping[str, Setting]) -> None:
        """Change values, all at the same step. From any thread; `look` offers them.

        Raises:
            ValueError: there is no room for so many.
        """
        with self._lock:
            version = self._version + 1
            later = self._set | {name: Set(value, version) for name, value in values.items()}
            pack(later)
            self._set, self._version = later, version

    def pause(self, state: RunState, now: float) -> Iterator[AnyMessage]:
        """Have the ranks stand still at their next common check. No effect where they do, or are to end."""
        if not state.asked and not state.pausing:
            self._page.ask_to_pause()
            yield Steered(time=now, how="pause")

    def unpause(self, state: RunState, now: float) -> Iterator[AnyMessage]:
        """Have the ranks go on. No effect where they do."""
        if state.pausing:
            self._page.unpause()
            yield Steered(time=now, how="unpause")

    def look(self, state: RunState, now: float) -> Iterator[AnyMessage]:
        """Offer what is set, as soon as those who may still ask have taken what was set before."""
        if not self.is_open(state):
            self._asked = None
            return
        if self._asked is None:
            self._asked = now
        asking, first = [each for each in state.ranks if _may_ask(each)], state.ranks[0].rank
        if not self._is_taken:
            self._is_taken = self._page.have_taken(each.rank - first for each in asking)
        if self._is_taken and self._offered < self._version:
            with self._lock:
                packed, self._offered = pack(self._set), self._version
            self._page.offer_settings(packed, self._offered)
            self._is_taken = False
        silent = [each for each in asking if self._is_silent(each, each.rank - first, now)]
        if silent and not self._has_noted:
            self._has_noted = True
            yield Noted(time=now, text=_why_nothing_happens(silent, len(asking)))

    def is_open(self, state: RunState) -> bool:
        """Whether something was asked that has not happened yet: then `look` is to be called now and again."""
        is_pausing = state.pausing and state.paused_since is None
        return state.asked is None and (is_pausing or not self._is_taken or self._offered < self._version)

    def _is_silent(self, rank: RankState, local_rank: int, now: float) -> bool:
        if rank.phase != "running" or rank.running_since is None or self._page.num_checks(local_rank):
            return False
        assert self._asked is not None
        return now > max(rank.running_since, self._asked) + NEVER_ASKED_PATIENCE


def _may_ask(rank: RankState) -> bool:
    return not rank.has_reported and rank.phase not in ("threads", "leaving")


def _why_nothing_happens(silent: list[RankState], num_ranks: int) -> str:
    if len(silent) == num_ranks:
        who = "the function has not asked"
    else:
        who = f"rank {', '.join(str(each.rank) for each in silent)} has not asked"
    return (
        f"{who} ddpnb.should_stop() so far, and is in no Loop's step: a pause or a changed setting counts from the "
        "moment at which all ranks do, once per step"
    )
