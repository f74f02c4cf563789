"""Messages fold into a state: who is blamed, one word for where the run is, and bounded memory."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ddpnb.history import History
from ddpnb.messages import AnyMessage, Asked, Ended, Exited, Metrics, Noted, Output, Phase, Raised, Returned, Started
from ddpnb.series import BUCKETS, LIMIT
from ddpnb.state import (
    CAUSE_SETTLES,
    ECHO_SETTLES,
    OUTPUT_LIMIT,
    RunState,
    Status,
    fold,
    new_state,
    settles_at,
)

SIGABRT, SIGKILL, SIGSEGV = -6, -9, -11


def folded(*messages: AnyMessage, num_ranks: int = 2) -> RunState:
    state = new_state("train", num_ranks, backend="gloo", started=0.0)
    for message in messages:
        state = fold(state, message)
    return state


def raised(rank: int, *, at: float, is_echo: bool = False) -> Raised:
    return Raised(
        rank=rank,
        time=at,
        phase="running",
        type_name="RuntimeError" if is_echo else "ValueError",
        text="Connection reset by peer" if is_echo else "bad batch",
        traceback="",
        location=None,
        is_echo=is_echo,
        exception=None,
    )


def exited(rank: int, exitcode: int, *, at: float, ended_by_us: bool = False) -> Exited:
    return Exited(rank=rank, time=at, exitcode=exitcode, ended_by_us=ended_by_us, memory=None, oom_kills=None)


def returned(rank: int, *, at: float = 1.0) -> Returned:
    return Returned(rank=rank, time=at, value=b"")


def running(num_ranks: int = 2) -> list[AnyMessage]:
    ranks = range(num_ranks)
    started = [Started(rank=rank, time=0.0, pid=100 + rank, device="cpu") for rank in ranks]
    return [*started, *(Phase(rank=rank, time=0.0, phase="running") for rank in ranks)]


def metrics(rank: int, values: Sequence[float], *, first_step: int = 0) -> Metrics:
    steps = range(first_step, first_step + len(values))
    return Metrics(
        rank=rank,
        time=0.0,
        name="loss",
        steps=array("q", steps).tobytes(),
        values=array("d", values).tobytes(),
        times=array("d", steps).tobytes(),
    )


def blamed(*messages: AnyMessage, num_ranks: int = 2) -> int | None:
    """The rank that is blamed, in whatever order the messages arrive."""
    ranks = set()
    for seed in range(5):
        shuffled = random.Random(seed).sample(messages, len(messages))
        failure = folded(*shuffled, num_ranks=num_ranks).first_failure
        ranks.add(failure.rank if failure else None)
    assert len(ranks) == 1
    return ranks.pop()


# ---- blame


def test_an_exception_is_blamed_and_not_the_abort_that_follows() -> None:
    assert 0 == blamed(raised(0, at=1.0), exited(1, SIGABRT, at=1.1))


def test_an_exception_is_blamed_even_when_the_abort_was_seen_earlier() -> None:
    assert 0 == blamed(raised(0, at=1.1), exited(1, SIGABRT, at=1.0))


def test_an_echo_is_never_blamed_where_a_peer_died() -> None:
    assert 1 == blamed(exited(1, SIGKILL, at=1.1), raised(0, at=1.0, is_echo=True))


def test_of_two_exceptions_the_earlier_is_blamed() -> None:
    assert 1 == blamed(raised(0, at=1.2), raised(1, at=1.1))


def test_an_abort_alone_is_blamed() -> None:
    assert 1 == blamed(exited(1, SIGABRT, at=1.0))


def test_an_abort_is_blamed_rather_than_an_echo() -> None:
    assert 1 == blamed(exited(1, SIGABRT, at=1.1), raised(0, at=1.0, is_echo=True))


def test_where_there_are_only_echoes_the_earliest_is_blamed() -> None:
    assert 2 == blamed(raised(0, at=1.2, is_echo=True), raised(2, at=1.1, is_echo=True), num_ranks=3)


def test_a_crash_is_a_cause_and_the_earlier_of_two_causes_is_blamed() -> None:
    assert 0 == blamed(exited(0, SIGSEGV, at=1.0), raised(1, at=1.1))


def test_leaving_with_code_0_before_returning_is_a_failure() -> None:
    assert 1 == blamed(exited(1, 0, at=1.0))


def test_a_rank_that_returned_may_leave() -> None:
    assert folded(returned(1, at=1.0), exited(1, 0, at=1.1)).first_failure is None


def test_a_death_by_our_hand_is_no_failure() -> None:
    assert 0 == blamed(raised(0, at=1.0), exited(1, SIGKILL, at=0.9, ended_by_us=True))


def test_nobody_is_blamed_for_deaths_and_echoes_after_the_asking() -> None:
    for how in ("stop", "kill"):
        echo = replace(raised(0, at=1.1), is_echo=True)
        state = folded(*running(), Asked(time=1.0, how=how), echo, exited(1, -15, at=1.2))

        assert state.first_failure is None


def test_an_own_error_after_a_stop_is_to_blame_and_after_a_kill_is_not() -> None:
    stopped = folded(*running(), Asked(time=1.0, how="stop"), raised(0, at=1.1))
    killed = folded(*running(), Asked(time=1.0, how="kill"), raised(0, at=1.1))

    assert stopped.first_failure is not None
    assert 0 == stopped.first_failure.rank
    assert killed.first_failure is None


def test_a_failure_before_the_asking_stays_to_blame() -> None:
    state = folded(*running(), raised(1, at=1.0), Asked(time=1.1, how="stop"), raised(0, at=1.2))

    assert state.first_failure is not None
    assert 1 == state.first_failure.rank


# ---- when blame is settled


def test_a_cause_settles_after_a_tenth_of_a_second() -> None:
    assert 1.0 + CAUSE_SETTLES == settles_at(folded(raised(0, at=1.0)))
    assert 1.0 + CAUSE_SETTLES == settles_at(folded(exited(0, SIGABRT, at=1.0)))


def test_echoes_leave_half_a_second_for_their_cause() -> None:
    assert 1.0 + ECHO_SETTLES == settles_at(folded(raised(0, at=1.0, is_echo=True)))


def test_blame_is_settled_once_all_have_reported() -> None:
    assert 1.0 == settles_at(folded(raised(0, at=1.0, is_echo=True), returned(1)))


def test_nothing_is_settled_while_nothing_has_failed() -> None:
    assert settles_at(folded(*running(), returned(0))) is None


# ---- status


@pytest.mark.parametrize(
    ("status", "messages"),
    [
        ("starting", []),
        ("starting", running()[:3]),
        ("running", running()),
        ("running", [*running(), returned(0)]),
        ("stopping", [*running(), Asked(time=1.0, how="stop")]),
        ("stopping", [*running(), raised(0, at=1.0)]),
        ("finished", [returned(0), returned(1), Ended(time=2.0, problem=None)]),
        ("finished", [Asked(time=1.0, how="stop"), returned(0), returned(1), Ended(time=2.0, problem=None)]),
        ("failed", [raised(0, at=1.0), Ended(time=2.0, problem=None)]),
        ("failed", [Ended(time=2.0, problem="no more processes")]),
        ("stopped", [Asked(time=1.0, how="stop"), returned(0), Ended(time=2.0, problem=None)]),
        ("killed", [Asked(time=1.0, how="kill"), Ended(time=2.0, problem=None)]),
        ("killed", [Asked(time=1.0, how="kill"), Asked(time=1.0, how="stop"), Ended(time=2.0, problem=None)]),
    ],
)
def test_one_word_says_where_the_run_is(status: Status, messages: list[AnyMessage]) -> None:
    assert status == folded(*messages).status


def test_the_same_messages_give_the_same_state_and_old_states_keep() -> None:
    before = folded(*running())
    after = fold(before, raised(1, at=1.0))

    assert before.first_failure is None
    assert after.first_failure == folded(*running(), raised(1, at=1.0)).first_failure


def test_notes_gather() -> None:
    assert ("a", "b") == folded(Noted(time=0.0, text="a"), Noted(time=0.0, text="b")).notes


# ---- bounded


def test_output_keeps_its_end_and_says_what_it_dropped() -> None:
    state = folded()
    chunk = "x" * 999 + "\n"
    for number in range(3000):
        state = fold(state, Output(rank=0, time=0.0, text=f"{number:04}{chunk}"))
    output = state.ranks[0].output

    assert len(output.text()) <= OUTPUT_LIMIT + 100
    assert output.text().startswith(f"[{output.num_dropped:,} earlier characters dropped]\n")
    assert output.text().endswith(f"2999{chunk}")
    assert 3000 * 1004 == output.num_dropped + len("".join(output.text().partition("\n")[2:]))
    assert "" == state.ranks[1].output.text()


def test_the_last_lines_of_output_are_whole() -> None:
    state = folded(*(Output(rank=0, time=0.0, text=text) for text in ("a\nb", "c\n", "d\n", "e")))

    assert ["bc", "d", "e"] == state.ranks[0].output.lines(3)


def test_a_million_points_are_kept_and_beyond_them_the_older_half_is_thinned() -> None:
    state = folded()
    for first in range(0, LIMIT + 100_000, 10_000):
        state = fold(state, metrics(0, range(first, first + 10_000), first_step=first))
    series = state.history["loss"][0]
    steps, values, _ = series.columns()

    assert LIMIT + 100_000 == series.num_points
    assert len(series) <= LIMIT
    assert 0 == steps[0]
    assert LIMIT + 99_999 == steps[-1] == values[-1]
    assert len(series.buckets) <= 2 * BUCKETS
    assert (0, LIMIT + 99_999) == (series.buckets[0].minimum, series.buckets[-1].maximum)


def test_a_spike_and_a_nan_are_never_lost_from_the_envelope() -> None:
    values = [1.0] * 100_000
    values[54_321], values[66_666] = 99.0, math.nan

    state = folded(*(metrics(0, values[first : first + 777], first_step=first) for first in range(0, 100_000, 777)))
    buckets = state.history["loss"][0].buckets

    assert 99.0 == max(bucket.maximum for bucket in buckets)
    assert 1 == sum(bucket.num_bad for bucket in buckets)
    assert 100_000 - 1 == sum(bucket.num_finite for bucket in buckets)


# ---- history


def test_history_gives_the_mean_over_ranks_and_each_rank_by_itself() -> None:
    history = History(folded(metrics(0, [1.0, 2.0]), metrics(1, [3.0, 4.0])).history)

    assert [2.0, 3.0] == history["loss"].tolist()
    assert [3.0, 4.0] == history["loss", 1].tolist()
    assert [0, 1] == history.steps("loss").tolist()


def test_history_takes_the_mean_of_those_ranks_that_logged_a_step() -> None:
    history = History(folded(metrics(0, [1.0, 2.0, 3.0]), metrics(1, [5.0], first_step=1)).history)

    assert [1.0, 3.5, 3.0] == history["loss"].tolist()
    assert [0, 1, 2] == history.steps("loss").tolist()
    assert [1] == history.steps("loss", 1).tolist()


def test_history_names_what_was_logged_where_a_name_is_wrong() -> None:
    history = History(folded(metrics(0, [1.0])).history)

    with pytest.raises(KeyError, match="nothing was logged under 'los'; logged: 'loss'"):
        history["los"]
    with pytest.raises(KeyError, match="rank 1 logged no 'loss'"):
        history["loss", 1]
    assert "loss" in history
    assert ("loss", 1) not in history
