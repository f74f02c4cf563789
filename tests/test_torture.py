"""A few of the kills of `tests.benchmarks.torture`."""

from __future__ import annotations

import random
from pathlib import Path

from .benchmarks.torture import Tally, drawn_kinds, kill_own_loop, kill_runs


def test_no_kill_of_a_saving_process_loses_or_damages_a_checkpoint(tmp_path: Path) -> None:
    tally = kill_own_loop(10, random.Random(1), tmp_path)

    assert (10, 0, 0) == (tally.kills, tally.lost, tally.damaged)
    assert tally.in_a_save


def test_no_kill_of_ranks_or_kernel_loses_or_damages_a_checkpoint(tmp_path: Path) -> None:
    draw = random.Random(2)
    tallies = kill_runs(drawn_kinds(10, draw), draw, tmp_path)
    total = Tally(*(sum(each) for each in zip(*(vars(tally).values() for tally in tallies.values()), strict=True)))

    assert (10, 0, 0) == (total.kills, total.lost, total.damaged)
    assert total.in_a_save
