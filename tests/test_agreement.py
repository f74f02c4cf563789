"""Stopping, pausing and steering at the same step: real processes, one page, and no collective."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ddpnb.agreement import _HOLD, _LOOK_AT, Page, anonymous_file

from .conftest import wait_until

STOPS = 200


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page.create(2)
    yield page
    page.close()


def _check_until_told(rank: int, pages: list[Page], kernel: Connection) -> None:
    chance = random.Random(rank)
    for page in pages:
        kernel.recv()  # all begin together: one that is late would be further behind with each page
        while not page.check(rank):
            time.sleep(chance.random() * 3e-4)  # its training step
        kernel.send(page.num_checks(rank))


def _rank_processes(
    pages: list[Page], num_ranks: int, live: Callable[[int, list[Page], Connection], None] = _check_until_told
) -> list[tuple[multiprocessing.Process, Connection]]:
    fork = multiprocessing.get_context("fork")
    started = []
    for rank in range(num_ranks):
        ours, theirs = fork.Pipe()
        process = fork.Process(target=live, args=(rank, pages, theirs), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    return started


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_no_random_stop_ends_ranks_at_different_checks(num_ranks: int) -> None:
    pages = [Page.create(num_ranks) for _ in range(STOPS)]
    ranks = _rank_processes(pages, num_ranks)
    chance = random.Random(0)

    mismatched = []
    for page in pages:
        for _, rank in ranks:
            rank.send("go")
        wanted = [chance.randrange(1, 20) for _ in ranks]
        while any(page.num_checks(number) < count for number, count in enumerate(wanted)):
            pass
        page.ask_to_stop()
        stopped_at = [rank.recv() for _, rank in ranks]
        if len(set(stopped_at)) > 1:
            mismatched.append(stopped_at)
    for process, rank in ranks:
        process.join()
        rank.close()
    for page in pages:
        page.close()

    assert [] == mismatched


def test_ranks_far_apart_meet_at_the_check_after_the_farthest(page: Page) -> None:
    for _ in range(10):
        assert not page.check(0)
    assert not page.check(1)

    page.ask_to_stop()
    answers = [page.check(1) for _ in range(10)]

    assert page.check(0)
    assert [False] * 9 + [True] == answers


def test_the_answer_stays_yes(page: Page) -> None:
    page.ask_to_stop()

    assert [True, True, True] == [page.check(0) for _ in range(3)]


def test_asking_again_changes_nothing(page: Page) -> None:
    page.ask_to_stop()
    page.check(0)
    page.ask_to_stop()

    assert page.check(1)


def test_a_rank_that_checks_while_the_kernel_decides_waits_for_the_answer(page: Page) -> None:
    numbers = page._numbers
    numbers[_HOLD] = 1
    answers: list[bool] = []
    rank = threading.Thread(target=lambda: answers.append(page.check(0)))
    rank.start()
    wait_until(lambda: page.num_checks(0) == 1, what="the rank's count")
    rank.join(0.05)
    is_waiting = rank.is_alive()
    numbers[_LOOK_AT] = 1
    numbers[_HOLD] = 0
    rank.join()

    assert (True, [True]) == (is_waiting, answers)


def test_a_rank_that_stands_still_does_not_hold_up_the_kernel_and_stops_with_the_others() -> None:
    page = Page.create(2)
    ((process, rank), *_) = _rank_processes([page], 1)
    rank.send("go")
    assert process.pid is not None
    while not page.num_checks(0):
        pass
    os.kill(process.pid, signal.SIGSTOP)
    while "T" not in Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]:
        pass

    began = time.monotonic()
    answered = page.num_checks(0)
    page.ask_to_stop()
    taken = time.monotonic() - began
    os.kill(process.pid, signal.SIGCONT)
    stopped_at = rank.recv()
    process.join()
    rank.close()
    page.close()

    assert answered + 1 == stopped_at
    assert taken < 3  # it does not wait for the rank


def test_a_killed_rank_holds_up_nobody() -> None:
    page = Page.create(2)
    ((process, rank), *_) = _rank_processes([page], 1)
    rank.send("go")
    while not page.num_checks(0):
        pass
    process.kill()
    process.join()
    rank.close()

    page.ask_to_stop()
    wait_until(lambda: page.check(1), what="the other rank's stop")
    page.close()


def test_a_page_remembers_memory_and_checks_of_each_rank(page: Page) -> None:
    assert (None, 0, None) == (page.memory(1), page.num_checks(1), page.check_interval(1))

    page.note_memory(1, 12345)
    for _ in range(3):
        page.check(1)

    assert (12345, 3) == (page.memory(1), page.num_checks(1))
    assert (None, 0) == (page.memory(0), page.num_checks(0))
    assert 0 < (page.check_interval(1) or 0) < 60


def test_an_anonymous_file_has_no_path() -> None:
    descriptor = anonymous_file("ddpnb-test")
    links = os.fstat(descriptor).st_nlink
    os.close(descriptor)

    assert 0 == links


# ---- pausing and settings


def _steered(rank: int, pages: list[Page], kernel: Connection) -> None:
    """Check at random speed until told to stop, as a session does; reports what happened at which check."""
    chance = random.Random(100 + rank)
    for page in pages:
        kernel.recv()
        seen: list[tuple[str, int, int]] = []  # (what, check, version or 0)

        def take(page: Page = page, seen: list[tuple[str, int, int]] = seen) -> None:
            packed = page.take_settings(rank)
            if packed is not None:
                assert len(set(packed)) == 1, "old and new bytes mixed"
                seen.append(("set", page.num_checks(rank), packed[0]))

        while not (page.check(rank) and page.is_to_stop(rank)):
            if page.is_to_pause(rank):
                seen.append(("pause", page.num_checks(rank), 0))
                kernel.send("paused")
                while page.is_to_pause(rank):
                    page.rest(rank)
                    take()
            take()
            if page.is_to_stop(rank):
                break
            time.sleep(chance.random() * 3e-4)
        take()
        kernel.send([*seen, ("stop", page.num_checks(rank), 0)])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_no_random_pause_setting_or_stop_meets_ranks_at_different_checks(num_ranks: int) -> None:
    pages = [Page.create(num_ranks) for _ in range(STOPS)]
    ranks = _rank_processes(pages, num_ranks, _steered)
    chance = random.Random(1)
    everyone = range(num_ranks)

    def offer(page: Page, version: int) -> None:
        wait_until(lambda: page.have_taken(everyone), what="the settings before")
        page.offer_settings(bytes([version]) * chance.randrange(1, 8000), version)

    mismatched = []
    for page in pages:
        for _, rank in ranks:
            rank.send("go")
        is_paused = False
        for version in range(1, 4):
            if chance.random() < 0.7:
                offer(page, 10 * version)
            if chance.random() < 0.4:
                page.ask_to_pause()
                is_paused = True
                if chance.random() < 0.7:
                    offer(page, 10 * version + 1)
                for _, rank in ranks:
                    assert "paused" == rank.recv()
                if chance.random() < 0.3:
                    break  # and stop in the pause
                page.unpause()
                is_paused = False
        page.ask_to_stop()
        told = [rank.recv() for _, rank in ranks]
        last_pause = max((check for what, check, _ in told[0] if what == "pause"), default=0)
        if len({str(each) for each in told}) > 1 or (is_paused and told[0][-1][1] != last_pause):
            mismatched.append(told)
    for process, rank in ranks:
        process.join()
        rank.close()
    for page in pages:
        page.close()

    assert [] == mismatched


def test_a_stop_in_a_pause_is_answered_by_the_very_check(page: Page) -> None:
    page.check(0)
    page.check(1)
    page.ask_to_pause()
    arrived = [(page.check(rank), page.is_to_pause(rank), page.is_to_stop(rank)) for rank in (0, 1)]
    page.ask_to_stop()

    assert [(True, True, False)] * 2 == arrived
    assert [(False, True)] * 2 == [(page.is_to_pause(rank), page.is_to_stop(rank)) for rank in (0, 1)]


def test_whoever_takes_over_from_a_dead_kernel_ends_its_pause(page: Page) -> None:
    page.ask_to_pause()
    page.check(0)
    page._numbers[_HOLD] = 1  # the kernel died while it was about to ask for something
    page.take_over()

    assert (False, True) == (page.is_to_pause(0), page.is_to_stop(0))
    assert page.check(1)
    assert page.is_to_stop(1)


def test_settings_offered_in_a_pause_are_taken_in_it(page: Page) -> None:
    page.ask_to_pause()
    page.check(0)
    page.offer_settings(b"slow", 1)
    taken = page.take_settings(0), page.take_settings(0)
    is_taken_by_all = page.have_taken([0, 1])
    page.unpause()
    page.check(1)

    assert (b"slow", None) == taken
    assert not is_taken_by_all
    assert b"slow" == page.take_settings(1)
    assert page.have_taken([0, 1])


def test_nobody_looks_further_once_all_have_what_was_asked(page: Page) -> None:
    page.offer_settings(b"{}", 1)
    for rank in (0, 1):
        page.check(rank)
        page.take_settings(rank)
    page.have_taken([0, 1])
    page.ask_to_pause()
    page.unpause()

    assert [False, False] == [page.check(0), page.check(1)]


def test_a_rank_that_is_gone_holds_up_no_settings(page: Page) -> None:
    page.offer_settings(b"1", 1)
    page.check(1)
    page.take_settings(1)

    assert (True, False) == (page.have_taken([1]), page.have_taken([0, 1]))


def test_a_pause_is_no_interval_between_checks(page: Page) -> None:
    page.check(0)
    page.ask_to_pause()
    page.check(0)
    page._last_noted = (2, time.monotonic() - 1000)  # a long pause
    page.rest(0)
    page.unpause()
    page.check(0)

    assert (page.check_interval(0) or 0) < 60
