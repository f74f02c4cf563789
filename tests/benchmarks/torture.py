"""Whether anything is lost: interruptions at every step, and kills at random moments of a save.

    python -m tests.benchmarks.torture                   # about 16 minutes
    python -m tests.benchmarks.torture --quick --only kills

Run it from the repository's root.

`bits`: a training of 12 steps is interrupted at each of them, in four ways, on 1 to 4 ranks, while the step before is
still being saved; resumed, it has to end with the sha256 of one that was not interrupted.

`kills`: a training that does nothing but save is killed at random moments. After n steps every weight is -n: a
checkpoint that loads with anything else in it is a damaged one, and one that begins before the last step that was
acknowledged is a lost one.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpnb
from ddpnb import checkpoints
from ddpnb.errors import CheckpointError
from ddpnb.run import Run
from ddpnb.train.checkpoint import load_checkpoint, save_checkpoint
from tests import resumable
from tests.benchmarks.bench import Report, main
from tests.conftest import wait_until

NUM_WEIGHTS = 200_000
WORLD_SIZE = 2
_LONGEST_WAIT = 0.04  # seconds between an acknowledgement and the kill: some saves' length
_RUNS_TO_KEEP = 20  # in one run_dir, before a new one is begun
_DEADLINE = 60.0


class Counter(nn.Module):
    """Whose every weight has a gradient of exactly 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUM_WEIGHTS))

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.weight.sum()

    def holds(self, steps: int) -> bool:
        """Whether it has made so many steps."""
        return bool((self.weight == -steps).all())


@dataclass
class Tally:
    """What so many kills of one kind have done."""

    kills: int = 0
    in_a_save: int = 0
    """A draft or a replaced checkpoint was left: the kill came while one was written or published."""
    lost: int = 0
    damaged: int = 0

    def row(self, kind: str) -> tuple[str, ...]:
        """As the table has it."""
        return kind, *map(str, (self.kills, self.in_a_save, self.lost, self.damaged))


# ---- a loop of one's own


def kill_own_loop(times: int, draw: random.Random, folder: Path) -> Tally:
    """SIGKILL of a process that calls `save_checkpoint` at one path again and again."""
    target, acknowledged = folder / "digits", folder / "acknowledged"
    acknowledged.write_text("0")
    tally, model = Tally(), Counter()
    for _ in range(times):
        child = os.fork()
        if child == 0:
            _save_for_ever(target, acknowledged)
        time.sleep(draw.uniform(0, 4 * _LONGEST_WAIT))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        tally.kills += 1
        tally.in_a_save += any(name.startswith(".") for name in os.listdir(folder))
        try:
            steps = load_checkpoint(target, model=model, missing_ok=True)
        except CheckpointError:
            tally.damaged += 1
            continue
        tally.lost += steps < int(acknowledged.read_text())
        tally.damaged += steps > 0 and not model.holds(steps)
    return tally


def _save_for_ever(target: Path, acknowledged: Path) -> None:
    """In a child: goes on from what is there, and ends by a kill only."""
    try:
        torch.set_num_threads(1)  # a pool of threads does not survive the fork
        model = Counter()
        step = load_checkpoint(target, model=model, missing_ok=True)
        while True:
            step += 1
            with torch.no_grad():
                model.weight.sub_(1)
            save_checkpoint(target, epoch=step - 1, model=model)
            new = acknowledged.with_name("acknowledged-new")
            new.write_text(str(step))
            os.replace(new, acknowledged)
    finally:
        os._exit(1)


# ---- launched runs


def count() -> None:
    """Train for ever, and save after each step."""
    model = ddpnb.wrap(Counter())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = ddpnb.loader(TensorDataset(torch.zeros(1000, 1)), 1)
    loop = ddpnb.Loop(model, optimizer, loader, epochs=1_000_000, checkpoint_every=1, checks=False)
    for (inputs,) in loop:
        if not ddpnb.unwrap(model).holds(loop.step):  # type: ignore[operator]
            raise CheckpointError(f"other weights than those of step {loop.step} were loaded")
        loop.update(model(inputs))


@dataclass(frozen=True)
class Trial:
    """What was seen of a run until it was killed."""

    began: int
    """The step that it went on from."""
    acknowledged: int
    """The last step of which it was said that it is saved."""
    is_damaged: bool = False


def kill_runs(kinds: Sequence[str], draw: random.Random, folder: Path) -> dict[str, Tally]:
    """Runs that go on from each other, each killed in one of the `KINDS` of ways."""
    tallies = {kind: Tally() for kind in dict.fromkeys(kinds)}
    run_dir, acknowledged = folder / "runs-0", 0
    for number, kind in enumerate((*kinds, None)):
        trial = (KINDS[kind] if kind else _look)(draw, run_dir)
        if number:
            before = tallies[kinds[number - 1]]
            before.lost += trial.began < acknowledged
            before.damaged += trial.is_damaged
        acknowledged = trial.acknowledged
        if kind:
            tallies[kind].kills += 1
            tallies[kind].in_a_save += _has_draft(run_dir)
        if number % _RUNS_TO_KEEP == _RUNS_TO_KEEP - 1:
            run_dir = _moved(run_dir, folder / f"runs-{number}")
    return tallies


def _kill_ranks(draw: random.Random, run_dir: Path, how_many: int) -> Trial:
    run = _launcher(run_dir)(count)
    first = _first_step(run)
    _wait_for(run, lambda: _acknowledged(run) >= first + draw.randrange(1, 5))
    time.sleep(draw.uniform(0, _LONGEST_WAIT))
    for pid in draw.sample([rank.pid for rank in run.state.ranks if rank.pid is not None], how_many):
        os.kill(pid, signal.SIGKILL)
    error = run.exception(_DEADLINE)
    return Trial(first, _acknowledged(run), isinstance(error, CheckpointError))


def _kill_kernel(draw: random.Random, run_dir: Path) -> Trial:
    said = run_dir.parent / "said"
    said.write_text("")
    code = f"from tests.benchmarks import torture; torture.be_kernel({str(run_dir)!r}, {str(said)!r})"
    with subprocess.Popen([sys.executable, "-c", code]) as kernel:
        wanted = draw.randrange(2, 5)  # lines: the first step, and some that were saved
        wait_until(lambda: len(_lines(said)) >= wanted or kernel.poll() is not None, _DEADLINE, "a save")
        time.sleep(draw.uniform(0, _LONGEST_WAIT))
        kernel.kill()
    steps = [int(line) for line in _lines(said)]
    return Trial(steps[0], steps[-1], is_damaged=len(steps) < wanted)


def be_kernel(run_dir: str, said: str) -> None:
    """In a process of its own: launch, and write down the first step, and each one that is acknowledged."""
    run = _launcher(Path(run_dir))(count)
    with open(said, "a", buffering=1) as file:
        print(_first_step(run), file=file)
        while not run.done():
            known = run.state.saved
            print(_acknowledged(run), file=file)
            _wait_for(run, lambda known=known: run.state.saved is not known)  # type: ignore[misc]


def _look(_: random.Random, run_dir: Path) -> Trial:
    """Go on once more, and stop in peace."""
    run = _launcher(run_dir)(count)
    first = _first_step(run)
    run.stop()
    error = run.exception(_DEADLINE)
    return Trial(first, first, isinstance(error, CheckpointError))


KINDS: dict[str, Callable[[random.Random, Path], Trial]] = {
    "one of two ranks": lambda draw, run_dir: _kill_ranks(draw, run_dir, 1),
    "both ranks": lambda draw, run_dir: _kill_ranks(draw, run_dir, WORLD_SIZE),
    "the kernel": _kill_kernel,
}


def _launcher(run_dir: Path) -> ddpnb.Launcher:
    return ddpnb.Launcher(
        nproc_per_node=WORLD_SIZE, run_dir=run_dir, resume=True, view=False, threads_per_worker=1, timeout=_DEADLINE
    )


def _first_step(run: Run) -> int:
    """The step that a run has gone on from."""
    _wait_for(run, lambda: run.state.saved is not None)
    return 0 if run.state.resumed is None else run.state.resumed.step


def _acknowledged(run: Run) -> int:
    if run.state.saved is not None:
        return run.state.saved.step
    return 0 if run.state.resumed is None else run.state.resumed.step


def _wait_for(run: Run, claim: Callable[[], bool]) -> None:
    """Wait for a message after which the claim holds, or for the run's end."""
    changed = threading.Event()
    listener = lambda _: changed.set()  # noqa: E731
    run.watchers.append(listener)
    deadline = time.monotonic() + _DEADLINE
    while not claim() and not run.done():
        if not changed.wait(deadline - time.monotonic()):
            raise TimeoutError(f"nothing was saved for {_DEADLINE:.0f} s:\n{run.output()}")
        changed.clear()
    run.watchers.remove(listener)


def _lines(path: Path) -> list[str]:
    """Whole lines; the last one may have been cut."""
    return path.read_text().split("\n")[:-1]


def _has_draft(run_dir: Path) -> bool:
    newest = max(run_dir.iterdir())
    return any(each.name.startswith(".") for each in checkpoints.folder_of(newest).iterdir())


def _moved(run_dir: Path, new: Path) -> Path:
    """Only the newest run, in another folder: the disk is not endless."""
    newest = max(run_dir.iterdir())
    new.mkdir()
    shutil.move(newest, new / newest.name)
    shutil.rmtree(run_dir)
    return new


# ---- the sections


def bits(report: Report, options: Namespace) -> None:
    """Every step of a run, every kind of interruption, 1 to 4 ranks."""
    report.section(f"interruptions of a run of {resumable.NUM_STEPS} steps: ends that have the same bits")
    steps = range(0, resumable.NUM_STEPS, 5 if options.quick else 1)
    rows, num_equal, num_tried = [], 0, 0
    for world_size in range(1, 5):
        expected = resumable.launcher(world_size)(resumable.train).result(_DEADLINE)
        row = []
        for kind in resumable.KINDS:
            with tempfile.TemporaryDirectory(prefix="ddpnb-torture-") as folder:
                ends = [
                    resumable.interrupted_and_resumed(world_size, kind, step, Path(folder, str(step))) for step in steps
                ]
            equal = sum(end[1:] == expected[1:] for end in ends)
            row.append(f"{equal} of {len(ends)}")
            num_equal, num_tried = num_equal + equal, num_tried + len(ends)
        rows.append((f"{world_size} ranks" if world_size > 1 else "1 rank", *row))
    report.table("With the sha256 of the uninterrupted run", ("", *resumable.KINDS), rows)
    report.judge("all have the same bits", f"{num_equal} of {num_tried}", num_equal == num_tried)


def kills(report: Report, options: Namespace) -> None:
    """SIGKILL at random moments."""
    times = 20 if options.quick else 200
    draw = random.Random(0)
    report.section(f"{2 * times} kills at random moments, {NUM_WEIGHTS * 4 // 1000} kB of weights")
    with tempfile.TemporaryDirectory(prefix="ddpnb-torture-") as name:
        folder = Path(name)
        tallies = {"save_checkpoint in an own loop": kill_own_loop(times, draw, folder)}
        (folder / "launched").mkdir()
        tallies |= kill_runs(drawn_kinds(times, draw), draw, folder / "launched")
    report.table(
        "SIGKILL of",
        ("", "kills", "within a save", "lost", "damaged"),
        [each.row(kind) for kind, each in tallies.items()],
    )
    num_kills, lost, damaged = (
        sum(getattr(each, name) for each in tallies.values()) for name in ("kills", "lost", "damaged")
    )
    report.judge("no acknowledged checkpoint lost", f"{lost} after {num_kills} kills", lost == 0)
    report.judge("no damaged one loaded", f"{damaged} after {num_kills} kills", damaged == 0)
    within = sum(each.in_a_save for each in tallies.values())
    report.judge("a quarter of the kills within a save, or it proves little", f"{within}", 4 * within >= num_kills)


def drawn_kinds(times: int, draw: random.Random) -> list[str]:
    """So many of the `KINDS`, of which the kernel takes longest and comes every tenth time."""
    one, both, kernel = KINDS
    return draw.sample([kernel if not n % 10 else both if n % 2 else one for n in range(times)], times)


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(__doc__, {"bits": bits, "kills": kills}))
