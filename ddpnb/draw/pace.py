"""How the ranks spend their steps, as figures to be drawn, and who holds up the others.

Runs in: kernel
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..messages import Paced
from ..state import RunState

ENOUGH_STEPS = 20
"""Steps of each rank before anybody is named …"""
_ENOUGH_SECONDS = 1.0
"""… and how long they took: the first ones are no rank's fault."""
_SHARE = 0.3
"""Of a step: a rank is named for what is more than this, and than `_SECONDS`; less is the scheduler's doing."""
_SECONDS = 0.005

Cause = Literal["data loading", "compute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPace:
    """A typical step of one rank: data + compute + wait = step, in seconds."""

    rank: int
    step: float
    data: float
    """Waiting for the next batch; 0 in an own loop whose loader nobody sees, and then it is in `compute`."""
    compute: float
    """What is neither of the others."""
    wait: float | None
    """Waiting for other ranks; None where that cannot be seen, and then it is in `compute`."""
    samples: float | None
    """Samples a second; None where they are not counted."""
    memory: int | None
    """Bytes held now; None where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The rank that the others wait for."""

    rank: int
    cause: Cause | None
    """What it takes longer for than the others; None in an own loop whose loader nobody sees."""
    excess: float
    """Seconds of each step that its own work takes longer than that of the next slowest."""

    @property
    def words(self) -> str:
        """As a view says it beside the rank: "slowest: data loading"."""
        return "slowest" if self.cause is None else f"slowest: {self.cause}"


def paces(state: RunState) -> tuple[RankPace, ...]:
    """How each rank spends its steps, by rank; those are missing of which no step was timed yet."""
    return tuple(
        RankPace(
            rank=paced.rank,
            step=paced.step,
            data=paced.data,
            compute=max(0.0, paced.step - paced.data - (paced.wait or 0.0)),
            wait=paced.wait,
            samples=paced.samples,
            memory=paced.memory,
        )
        for rank in state.ranks
        if (paced := rank.paced) is not None and paced.num_steps
    )


def slowest(state: RunState) -> Straggler | None:
    """The rank that all others wait for; None where none stands out, or where it is too early to tell.

    The one that waits least does the most work of its own, since all end a step together. Waits are compared, and not
    what is left of the steps: ranks tell their medians at different moments, and where all grow slower, he who told
    last would stand out.
    """
    if not all(rank.paced is not None and _is_enough(rank.paced) for rank in state.ranks):
        return None
    ranks = paces(state)
    if len(ranks) < 2 or any(each.wait is None for each in ranks):
        return None
    first, *others = sorted(ranks, key=_wait)
    excess = _wait(others[0]) - _wait(first)
    if excess < max(_SECONDS, _SHARE * first.step):
        return None
    return Straggler(rank=first.rank, cause=_cause(first, others), excess=excess)


def _is_enough(paced: Paced) -> bool:
    return paced.num_steps >= ENOUGH_STEPS and paced.num_steps * paced.step >= _ENOUGH_SECONDS


def _cause(first: RankPace, others: list[RankPace]) -> Cause | None:
    """What the rank takes most longer for than any other does."""
    if first.samples is None:
        return None
    data = first.data - max(each.data for each in others)
    compute = first.compute - max(each.compute for each in others)
    return "data loading" if data > compute else "compute"


def _wait(each: RankPace) -> float:
    return each.wait or 0.0
