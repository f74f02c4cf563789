"""What a view says of a run in words: status, place, progress, values, the last lines written.

Text, HTML and matplotlib say the same, because all ask here.

Runs in: kernel
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain

from ..messages import Progress
from ..report import report
from ..series import Series
from ..state import RankState, RunState
from .curves import Curve, mean
from .words import NAME_LENGTH, count, cut, duration, number, path, rate

_RATE_POINTS = 200
"""Newest points that the speed is measured over."""
_LINE_LENGTH = 160
"""Characters shown of a line of output."""
_REPORT_LENGTH = 20_000
"""Characters shown of a failure's report; `run.result()` raises all of it."""

# CSI and OSC sequences of a terminal, then what is left of control characters.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class LastLines:
    """The newest lines of the ranks' output."""

    lines: tuple[tuple[int, str], ...]
    """(rank, line), by rank, then by age."""
    hidden_ranks: int
    """Ranks that wrote and had no room here."""


def status(state: RunState) -> str:
    """Where the run is, and whose fault it was."""
    if state.status == "failed" and state.first_failure:
        return f"failed on rank {state.first_failure.rank}"
    if state.status == "finished" and state.asked:
        return "stopped early, value kept"
    if state.status == "interrupted":
        return "interrupted: its kernel ended"
    if state.status == "running" and state.hung:
        return "no steps"
    if state.status == "running" and state.pausing:
        return "pausing …"
    return state.status


def place(state: RunState) -> list[str]:
    """Where the run computes: ["4 ranks", "gloo", "cpu"]."""
    kinds = sorted({rank.device.partition(":")[0] for rank in state.ranks if rank.device})
    return [count(state.world_size, "rank"), *filter(None, [state.backend]), *kinds]


def kept(state: RunState) -> list[str]:
    """What lasts: ["resumed from step 96", "saved at step 120 in runs/digits/…/checkpoints/step-00000120"]."""
    words = [] if state.resumed is None else [f"resumed from step {state.resumed.step:,}"]
    if state.saved is not None:
        return [*words, f"saved at step {state.saved.step:,} in {path(state.saved.path)}"]
    return words if state.folder is None else [*words, f"folder {path(state.folder)}"]


def elapsed(state: RunState, now: float) -> float:
    """Seconds since the launch, up to the end; without those in which it was paused."""
    return (now if state.ended is None else state.ended) - state.started - _paused(state, now)


def _paused(state: RunState, now: float) -> float:
    return state.paused_for + (0.0 if state.paused_since is None else now - state.paused_since)


def fraction(state: RunState) -> float | None:
    """How much of rank 0's loops is done, 0 … 1; None where the outermost has no length."""
    loops = state.ranks[0].progress
    return _fraction(loops) if loops and loops[0].total else None


def facts(state: RunState, now: float) -> list[str]:
    """Progress, speed and time: ["epoch 2/5", "step 340/900", "86 steps/s", "0:14 elapsed", "0:22 left"].

    Steps are those made in all epochs, as a checkpoint counts them.
    """
    series = _busiest(state)
    words = _loops(state, None if series is None else _num_made(series))
    if state.ended is not None:
        return [*words, duration(elapsed(state, now))]
    if state.hung is not None:  # no speed and no end: what was measured before is over
        return [*words, f"{duration(elapsed(state, now))} elapsed"]
    speed = _speed(series, since=state.went_on) if series else None
    if speed:
        words.append(rate(speed, "step"))
    samples = [rank.paced.samples for rank in state.ranks if rank.paced and rank.paced.samples]
    if samples:
        words.append(rate(sum(samples), "sample"))
    words.append(f"{duration(elapsed(state, now))} elapsed")
    left = _left(state, now)
    if left is not None:
        words.append(f"{duration(left)} left")
    return words


def values(state: RunState, *, but: Collection[str | None] = (), limit: int = 6) -> list[str]:
    """The newest values, meaned over the ranks: ["accuracy 0.930", "lr 0.100"]; those in `but` are drawn already."""
    names = [name for name in list(state.history) if name not in but]
    shown = [f"{cut(name, NAME_LENGTH)} {number(newest(state, name))}" for name in names[:limit]]
    return shown + [f"and {len(names) - limit} more"] * (len(names) > limit)


def newest(state: RunState, name: str) -> float:
    """Mean over the ranks of their last values."""
    last = [series.last for series in dict(state.history[name]).values()]
    return mean([point[1] for point in last if point])


def bad_values(curve: Curve) -> str | None:
    """That some values are nan or infinite, and whose; None where all are finite."""
    bad = [line for line in curve.lines if line.bad]
    total = sum(line.bad for line in bad)
    if not total:
        return None
    whose = "" if len(curve.lines) == 1 else f" ({_ranks([line.rank for line in bad])})"
    return f"{total:,} {'value is' if total == 1 else 'values are'} not finite{whose}"


def last_lines(state: RunState, limit: int) -> LastLines:
    """The newest lines, `limit` at most: whoever has written most gives way first."""
    lines = {rank.rank: [line for line in map(clean, _spoken(rank, limit)) if line.strip()] for rank in state.ranks}
    lines = {rank: own for rank, own in lines.items() if own}
    num_speakers = len(lines)
    for _ in range(sum(map(len, lines.values())) - limit):
        longest = max(lines, key=lambda rank: (len(lines[rank]), rank))
        lines[longest] = lines[longest][1:]
    shown = {rank: own for rank, own in lines.items() if own}
    return LastLines(tuple((rank, line) for rank, own in shown.items() for line in own), num_speakers - len(shown))


def _spoken(rank: RankState, limit: int) -> list[str]:
    """A rank's newest lines. A traceback at their end is left out: the report has it, or folds it as an echo."""
    if rank.raised is None:
        return rank.output.lines(limit)
    traceback = rank.raised.traceback.splitlines()
    lines = rank.output.lines(limit + len(traceback))
    return lines[: -len(traceback)] if lines[-len(traceback) :] == traceback else lines[-limit:]


def clean(line: str) -> str:
    """A line of output without what would steer a terminal, cut to a width that can be read."""
    return cut(_CONTROL.sub("", line).expandtabs(4), _LINE_LENGTH)


def failure(state: RunState) -> str | None:
    """The report of a failed run; None where nothing failed."""
    if not state.first_failure and not state.problem:
        return None
    return cut(report(state), _REPORT_LENGTH)


def _fraction(loops: tuple[Progress, ...]) -> float:
    if not loops or not loops[0].total:
        return 0.0
    outer, inner = loops[0], loops[1:]
    return min(1.0, (outer.done + _fraction(inner)) / outer.total) if outer.total else 0.0


def _loops(state: RunState, num_made: int | None) -> list[str]:
    """How far rank 0's loops are, and how many steps it has made."""
    loops = state.ranks[0].progress
    words = [_loop(loop, is_inner=loop is loops[-1]) for loop in loops]
    if [loop.description for loop in loops] == ["epoch", "step"]:
        epochs, steps = loops
        if num_made is not None and state.resumed is not None:  # steps may have been others: on more ranks, fewer
            words[1:] = [f"step {num_made:,}"]
        elif epochs.total and steps.total:
            done = min(epochs.done, epochs.total - 1) * steps.total + steps.done
            words[1:] = [f"step {done:,}/{epochs.total * steps.total:,}"]
    elif num_made is not None and (not loops or (len(loops) == 1 and loops[0].description not in ("", "step"))):
        words.append(f"step {num_made:,}")
    return words


def _num_made(series: Series) -> int | None:
    """Steps made so far: numbers of steps begin with 0, unless the first that was logged is 1."""
    if series.last is None:
        return None
    return series.last[0] + (0 if series.buckets[0].first_step == 1 else 1)


def _loop(loop: Progress, *, is_inner: bool) -> str:
    # An outer loop is in its next item while another runs inside; after its last, the inner one is still listed.
    done = loop.done if is_inner or loop.done == loop.total else loop.done + 1
    where = f"{done:,}" if loop.total is None else f"{done:,}/{loop.total:,}"
    return f"{cut(loop.description, NAME_LENGTH)} {where}".strip()


def _left(state: RunState, now: float) -> float | None:
    done, since = fraction(state), state.ranks[0].running_since
    # From the function's first line, not from the launch; and before a moment has passed a guess is worth nothing.
    so_far = 0.0 if since is None else now - since - _paused(state, now)
    return so_far * (1 - done) / done if done and done > 0.02 and so_far > 2 else None


def _busiest(state: RunState) -> Series | None:
    """The series with the most points: that which is logged in every step."""
    every = chain.from_iterable(list(ranks.values()) for ranks in list(state.history.values()))
    return max(every, key=lambda series: series.num_points, default=None)


def _speed(series: Series, since: float | None) -> float | None:
    """Steps per second over the newest points, none from before the last pause."""
    steps, _, times = series.tail(_RATE_POINTS)
    if since is not None:
        first = bisect_left(times, since)
        steps, times = steps[first:], times[first:]
    if len(steps) < 2 or times[-1] <= times[0] or steps[-1] <= steps[0]:
        return None
    return (steps[-1] - steps[0]) / (times[-1] - times[0])


def _ranks(ranks: Iterable[int]) -> str:
    named = [str(rank) for rank in ranks]
    if len(named) > 4:
        return f"{len(named)} ranks"
    return f"rank {named[0]}" if len(named) == 1 else f"ranks {', '.join(named)}"
