"""A run that was interrupted and resumed ends with the same bits as one that was not."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddpnb
from ddpnb import checkpoints, folder
from ddpnb.context import current_session

from .conftest import DEADLINE, Kernel, have_ended, wait_until
from .ranks import on_ranks
from .resumable import KINDS, NUM_STEPS, Points, digest, interrupted_and_resumed, launcher, train


@functools.cache
def uninterrupted(world_size: int) -> tuple[int, int, str]:
    """What `train` gives by itself."""
    result: tuple[int, int, str] = launcher(world_size)(train).result(100)
    return result


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("kind", "at_step"), list(zip(KINDS, (3, 5, 8, 11), strict=True)))
def test_a_resumed_run_ends_with_the_same_bits(world_size: int, kind: str, at_step: int, tmp_path: Path) -> None:
    first, last, digest = interrupted_and_resumed(world_size, kind, at_step, tmp_path)

    assert 0 < first <= at_step + 1
    assert (NUM_STEPS, uninterrupted(world_size)[2]) == (last, digest)


def test_accumulated_windows_and_shards_are_resumed_too(tmp_path: Path) -> None:
    for options in ({"accumulate": 2}, {"strategy": "fsdp"}, {"accumulate": 3, "strategy": "fsdp"}):
        run_dir = tmp_path / str(options)
        expected = launcher(2)(train, **options).result(100)
        launcher(2, run_dir)(train, "stop", 5, **options).result(100)

        assert (6, *expected[1:]) == launcher(2, run_dir, resume=True)(train, **options).result(100), options


def test_a_run_may_be_interrupted_again_and_again(tmp_path: Path) -> None:
    for at_step in (2, 4, 7, 9):
        launcher(2, tmp_path, resume=True)(train, "stop", at_step).result(100)

    assert (10, *uninterrupted(2)[1:]) == launcher(2, tmp_path, resume=True)(train).result(100)


def test_what_is_finished_is_not_run_again_but_may_be_prolonged(tmp_path: Path) -> None:
    launcher(2, tmp_path)(train, epochs=2).result(100)

    finished = launcher(2, tmp_path, resume=True)(train, epochs=2)
    again = finished.result(100)
    assert finished.dir is not None
    assert 2 == ddpnb.load_checkpoint(finished.dir)
    longer = launcher(2, tmp_path, resume=True)(train, epochs=3).result(100)

    assert (8, 8) == again[:2]
    assert (8, *uninterrupted(2)[1:]) == longer


def test_run_stop_saves_and_says_where(tmp_path: Path) -> None:
    run = launcher(2, tmp_path)(train, epochs=100_000, checkpoint_every=1_000_000)
    _until(run, lambda: "loss" in run.history)

    run.stop()
    _, last, _ = run.result(100)

    assert run.dir is not None
    (saved,) = checkpoints.published(run.dir)
    assert run.state.saved is not None
    assert (str(saved), last) == (run.state.saved.path, checkpoints.step_of(saved))
    assert last == checkpoints.verify(saved).step


def test_a_run_that_has_just_been_told_to_stop_is_waited_for(tmp_path: Path) -> None:
    run = launcher(2, tmp_path)(train, epochs=100_000, checkpoint_every=1_000_000)
    _until(run, lambda: "loss" in run.history)

    run.stop()
    again = launcher(2, tmp_path, resume=True)(train, epochs=1)

    assert run.done()
    assert again.result(100)[0] == run.result()[1]


def test_the_curve_goes_on_with_the_next_step(tmp_path: Path) -> None:
    for at_step in (5, 8):
        launcher(2, tmp_path, resume=True)(train, "SIGKILL of all ranks", at_step, checkpoint_every=1).wait(100)
    run = launcher(2, tmp_path, resume=True)(train)
    run.result(100)

    whole = launcher(2)(train)
    whole.result(100)
    assert list(range(NUM_STEPS)) == run.history.steps("loss").tolist() == whole.history.steps("loss").tolist()
    assert whole.history["loss"].tolist() == run.history["loss"].tolist()


def test_a_run_without_a_checkpoint_is_named_where_an_earlier_one_is_taken(tmp_path: Path) -> None:
    launcher(2, tmp_path)(train, "stop", 3).result(100)
    empty = launcher(2, tmp_path)(train, "SIGKILL of all ranks", 2)
    empty.wait(100)

    run = launcher(2, tmp_path, resume=True)(train)

    assert empty.dir is not None
    assert (4, *uninterrupted(2)[1:]) == run.result(100)
    assert any(empty.dir.name in note and "has no checkpoint" in note for note in run.state.notes)


def test_run_save_saves_while_it_goes_on(tmp_path: Path) -> None:
    run = launcher(2, tmp_path)(train, epochs=100_000, checkpoint_every=1_000_000)
    _until(run, lambda: "loss" in run.history)

    run.save()
    _until(run, lambda: run.state.saved is not None)
    first = run.state.saved
    run.stop()
    _, last, _ = run.result(100)

    assert first is not None
    assert first.step < last


@pytest.mark.parametrize(
    ("every", "expected"),
    [("epoch", [4, 8, 12]), (5, [5, 10, 12]), ("1h", [12]), ("0.000001s", [*range(1, 13)])],
)
def test_checkpoints_come_as_often_as_asked(every: int | str, expected: list[int], tmp_path: Path) -> None:
    run = launcher(2, tmp_path)(train, checkpoint_every=every, keep=100)
    run.result(100)

    assert run.dir is not None
    assert expected == sorted(map(checkpoints.step_of, checkpoints.published(run.dir)))


class Momentum(nn.Module):
    """A network with normalised weights, and an average of it that moves on in each forward, as in MoCo and BYOL."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.average = nn.Linear(2000, 500), nn.Linear(2000, 500)
        self.average.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.net.weight.div_(self.net.weight.norm(dim=1, keepdim=True))
            self.average.weight.lerp_(self.net.weight, 0.1)
        return (self.net(inputs) - self.average(inputs)).square().mean()


def _moved_by_forwards(until: int | None) -> tuple[int, str]:
    ddpnb.seed_everything(0)
    model = ddpnb.wrap(Momentum())
    loader = ddpnb.loader(TensorDataset(torch.randn(64, 2000, generator=torch.Generator().manual_seed(0))), 4)
    loop = ddpnb.Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, epochs=2, checkpoint_every=1)
    first = loop.step
    for (inputs,) in loop:
        if loop.step == until:
            os.kill(os.getpid(), signal.SIGKILL)
        loop.update(model(inputs))
    return first, digest(ddpnb.state_dict(model))


def test_what_a_forward_changes_is_saved_as_it_was_between_the_steps(tmp_path: Path) -> None:
    expected = launcher(2)(_moved_by_forwards, None).result(100)[1]

    for step in (6, 11):
        launcher(2, tmp_path, resume=True)(_moved_by_forwards, step).wait(100)
    first, found = launcher(2, tmp_path, resume=True)(_moved_by_forwards, None).result(100)

    assert first > 6
    assert expected == found


def _of_quality(qualities: list[float]) -> None:
    model = ddpnb.wrap(nn.Linear(2, 1))
    loader = ddpnb.loader(TensorDataset(torch.ones(4, 2)), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = ddpnb.Loop(model, optimizer, loader, epochs=len(qualities), keep=2, best="quality", mode="max")
    for (inputs,) in loop:
        loop.update(model(inputs).mean())
        if loop.epoch_done:
            ddpnb.log(quality=qualities[loop.epoch])


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    run = launcher(2, tmp_path)(_of_quality, [1.0, 3.0, float("nan"), 2.0, 0.0])
    run.result(100)

    assert run.dir is not None
    assert [5, 4, 2] == [checkpoints.step_of(found) for found in checkpoints.published(run.dir)]


def _of_late_quality() -> None:
    model = ddpnb.wrap(nn.Linear(2, 1))
    loader = ddpnb.loader(TensorDataset(torch.ones(20, 2)), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = ddpnb.Loop(model, optimizer, loader, epochs=3, checkpoint_every=2, keep=1, best="quality", mode="max")
    for (inputs,) in loop:
        loop.update(model(inputs).mean())
        if loop.epoch_done:
            ddpnb.log(quality=1.0 - loop.epoch)


def test_a_score_belongs_to_the_weights_that_were_evaluated(tmp_path: Path) -> None:
    run = launcher(2, tmp_path)(_of_late_quality)
    run.result(100)

    assert run.dir is not None
    assert [15, 5] == [checkpoints.step_of(found) for found in checkpoints.published(run.dir)]


def _apart() -> int:
    model = ddpnb.wrap(nn.Linear(2, 1), "none")
    loader = ddpnb.loader(TensorDataset(torch.ones(20, 2)), 2)
    loop = ddpnb.Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, epochs=2, checkpoint_every=1)
    for (inputs,) in loop:
        loop.update(model(inputs).mean())
    return loop.step


def test_ranks_that_train_apart_are_not_saved_and_it_is_said(tmp_path: Path) -> None:
    run = launcher(2, tmp_path)(_apart)

    assert [10, 10] == list(run.results(100).values())
    assert any("weights of their own" in note for note in run.state.notes)
    assert run.dir is not None
    assert [] == checkpoints.published(run.dir)


_kept: list[Any] = []


def _keeps_the_iterator() -> int:
    model = ddpnb.wrap(nn.Linear(2, 1))
    loader = ddpnb.loader(TensorDataset(torch.ones(20, 2)), 2)
    loop = ddpnb.Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, epochs=2, checkpoint_every=1)
    _kept.append(iter(loop))
    for _ in range(2):
        loop.update(model(next(_kept[0])[0]).mean())
    return loop.step


def test_a_kept_iterator_keeps_nobody_from_leaving(tmp_path: Path) -> None:
    assert 2 == launcher(2, tmp_path)(_keeps_the_iterator).result(60)


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    launcher(2)(train, "stop", 3).result(100)

    assert [] == list(tmp_path.iterdir())


# ---- other loaders, objects, ranks


def _plain(stop_at: int | None, kind: str) -> tuple[int, list[float]]:
    ddpnb.seed_everything(1)
    data = TensorDataset(torch.randn(45, 4, generator=torch.Generator().manual_seed(0)))
    sampler = DistributedSampler(data) if kind == "distributed" else None
    generator = torch.Generator().manual_seed(7) if kind == "with a generator" else None
    loader = DataLoader(data, 4, shuffle=sampler is None, sampler=sampler, generator=generator)
    model = ddpnb.wrap(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    loop = ddpnb.Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, epochs=3, checks=False)
    first = loop.step
    for (inputs,) in loop:
        loop.update(model(inputs).square().mean())
        if loop.step == stop_at:
            loop.stop()
    return first, [value.double().sum().item() for value in ddpnb.state_dict(model).values()]


@pytest.mark.parametrize("kind", ["distributed", "shuffled", "with a generator"])
def test_a_plain_dataloader_is_gone_through_again(kind: str, tmp_path: Path) -> None:
    expected = launcher(2)(_plain, None, kind).result(100)[1]

    launcher(2, tmp_path)(_plain, 13, kind).result(100)
    first, found = launcher(2, tmp_path, resume=True)(_plain, None, kind).result(100)

    assert (14, expected) == (first, found)


def _seen(batch: int, stop_at: int | None) -> tuple[int, list[tuple[int, int]]]:
    """(first step, [(epoch, sample)])."""
    model = ddpnb.wrap(nn.Linear(1, 1))
    loader = ddpnb.loader(TensorDataset(torch.arange(53.0)[:, None]), batch, shuffle=True)
    loop = ddpnb.Loop(model, torch.optim.SGD(model.parameters(), lr=1e-4), loader, epochs=2, checks=False)
    first, seen = loop.step, []
    for (inputs,) in loop:
        seen += [(loop.epoch, int(value)) for value in inputs.flatten()]
        loop.update(model(inputs).square().mean() if len(inputs) else model(inputs).sum())
        if loop.step == stop_at:
            loop.stop()
    return first, [each for own in ddpnb.gather(seen) for each in own]


def test_each_sample_is_seen_once_per_epoch_on_4_then_2_then_3_ranks(tmp_path: Path) -> None:
    parts = [
        launcher(4, tmp_path)(_seen, 3, 1).result(100)[1],
        launcher(2, tmp_path, resume=True)(_seen, 6, 5).result(100)[1],
        launcher(3, tmp_path, resume=True)(_seen, 4, None).result(100)[1],
    ]

    assert [(epoch, sample) for epoch in range(2) for sample in range(53)] == sorted(
        each for part in parts for each in part
    )
    assert all(len(part) for part in parts)


def test_exact_has_the_same_bits_on_any_ranks_and_resumed_on_4_then_2_then_3(tmp_path: Path) -> None:
    exact = {"exact": True, "shards": 8}
    expected = {launcher(world_size)(train, **exact).result(100) for world_size in (1, 2, 3, 4)}

    launcher(4, tmp_path)(train, "stop", 2, **exact).result(100)
    launcher(2, tmp_path, resume=True)(train, "stop", 6, **exact).result(100)
    run = launcher(3, tmp_path, resume=True)(train, **exact)
    first, last, digest = run.result(100)

    assert {(0, last, digest)} == expected
    assert 7 == first
    assert not [note for note in run.state.notes if "ranks" in note or "threads" in note]


class Average:
    """A user's own average of the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.values = [each.detach().clone() for each in model.parameters()]
        self.num_updates = 0

    def update(self, model: nn.Module) -> None:
        self.num_updates += 1
        for own, each in zip(self.values, model.parameters(), strict=True):
            own.lerp_(each.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.num_updates = state["values"], state["num_updates"]


def _averaged(stop_at: int | None) -> tuple[int, list[Any]]:
    ddpnb.seed_everything(0)
    model = ddpnb.wrap(nn.Linear(3, 1))
    average = Average(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = ddpnb.loader(TensorDataset(torch.arange(30.0).reshape(10, 3)), 2)
    loop = ddpnb.Loop(model, optimizer, loader, epochs=4, state=average)
    for (inputs,) in loop:
        loop.update(F.smooth_l1_loss(model(inputs), inputs.sum(1, keepdim=True)))
        average.update(model)
        if loop.step == stop_at:
            loop.stop()
    return average.num_updates, [value.tolist() for value in average.values]


def test_objects_of_the_users_own_are_saved_after_the_loops_body(tmp_path: Path) -> None:
    expected = on_ranks(2, _averaged, None)[0]

    launcher(2, tmp_path)(_averaged, 5).result(100)

    assert expected == launcher(2, tmp_path, resume=True)(_averaged, None).result(100)


def test_what_differs_from_then_is_said(tmp_path: Path) -> None:
    launcher(2, tmp_path)(train, "stop", 3).result(100)

    run = launcher(3, tmp_path, resume=True)(train)
    run.result(100)

    assert any("kind 'stop'" in note or "kind stop" in note for note in run.state.notes)
    assert any("resumed on 3 ranks, saved by 2" in note for note in run.state.notes)


def test_that_nothing_is_left_to_train_is_said(tmp_path: Path) -> None:
    launcher(1, tmp_path)(train).result(100)

    run = launcher(1, tmp_path, resume=True)(train)
    run.result(100)

    last = f"step {NUM_STEPS} was the last: nothing was left to train; raise epochs, or start without resume"
    assert (last,) == run.state.notes


# ---- what cannot be written


def _obstructed(rank: int) -> tuple[str, list[str], list[int]]:
    """Train while a folder lies where the file of a rank should be; the digest, errors, and where they were raised."""
    session = current_session()
    folders = ddpnb.gather(str(session.folder) if session is not None else "")
    draft = checkpoints.draft_of(checkpoints.folder_of(Path(folders[0])) / checkpoints.name_of(4))
    if ddpnb.is_rank_zero():
        (draft / f"rank-{rank}.pt").mkdir(parents=True)
    ddpnb.seed_everything(0)
    model = ddpnb.wrap(nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = ddpnb.loader(Points(), 24 // ddpnb.world_size(), shuffle=True)
    loop = ddpnb.Loop(model, optimizer, loader, epochs=4)  # a checkpoint after steps 4, 8, 12, 16
    errors, steps = [], []
    for inputs, targets in loop:
        try:
            loop.update(F.cross_entropy(model(inputs), targets))
        except ddpnb.CheckpointError as error:
            errors.append(str(error))
            steps.append(loop.step)
    return digest(ddpnb.state_dict(model)), errors, steps


@pytest.mark.parametrize("rank", [0, 1])
def test_what_cannot_be_written_is_raised_on_all_ranks_and_the_training_may_go_on(rank: int, tmp_path: Path) -> None:
    expected = launcher(2)(_undisturbed).result(100)

    run = launcher(2, tmp_path)(_obstructed, rank)
    results = run.results(100)

    assert [expected] * 2 == [results[each][0] for each in range(2)]
    assert results[0] == results[1]
    ((error,), (step,)) = results[0][1:]
    assert f"rank {rank} could not save step 4" in error
    assert f"rank-{rank}.pt" in error
    assert "there is none before it" in error
    assert 5 <= step <= 8
    assert run.dir is not None
    assert [16, 12, 8] == [checkpoints.step_of(found) for found in checkpoints.published(run.dir)]
    assert [] == [path for path in checkpoints.folder_of(run.dir).iterdir() if path.name.startswith(".")]


def _undisturbed() -> str:
    """As `_obstructed`, without a folder."""
    ddpnb.seed_everything(0)
    model = ddpnb.wrap(nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = ddpnb.loader(Points(), 24 // ddpnb.world_size(), shuffle=True)
    for inputs, targets in (loop := ddpnb.Loop(model, optimizer, loader, epochs=4)):
        loop.update(F.cross_entropy(model(inputs), targets))
    return digest(ddpnb.state_dict(model))


def _without_a_folder_at_the_end() -> None:
    session = current_session()
    model = ddpnb.wrap(nn.Linear(2, 1))
    loader = ddpnb.loader(TensorDataset(torch.ones(4, 2)), 2)
    loop = ddpnb.Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, epochs=1)
    for (inputs,) in loop:
        loop.update(model(inputs).mean())
        if session is not None and session.folder is not None and ddpnb.is_rank_zero():
            session.folder.rename(session.folder.with_name("elsewhere"))


def test_a_folder_that_vanished_is_named_at_the_end(tmp_path: Path) -> None:
    with pytest.raises(ddpnb.CheckpointError, match=r"could not save step 1: FileNotFoundError.*_without_a_folder"):
        launcher(2, tmp_path)(_without_a_folder_at_the_end).result(100)


# ---- what cannot be resumed


def _another(kind: str) -> None:
    model: nn.Module = nn.Linear(3, 1)
    if kind == "model":
        model = nn.Linear(5, 1)
    elif kind == "layers":
        model = nn.Sequential(nn.Linear(3, 1))
    model = ddpnb.wrap(model)
    of = torch.optim.AdamW if kind == "optimizer" else torch.optim.SGD
    average = [Average(model)] if kind == "objects" else []
    loader = ddpnb.loader(TensorDataset(torch.ones(10, 5 if kind == "model" else 3)), 2)
    loop = ddpnb.Loop(model, of(model.parameters(), lr=0.1), loader, epochs=1, state=average)
    for (inputs,) in loop:
        loop.update(model(inputs).mean())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("model", "'weight' is (1, 3) there and (1, 5) here"),
        ("layers", "it does not have '0.weight', '0.bias'; this model does not have 'weight', 'bias'"),
        ("optimizer", "was saved with SGD, and this run has AdamW"),
        ("objects", "state-0"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(kind: str, expected: str, tmp_path: Path) -> None:
    launcher(2, tmp_path)(_another, "none").result(100)

    with pytest.raises(ddpnb.CheckpointError) as caught:
        launcher(2, tmp_path, resume=True)(_another, kind).result(100)

    assert expected in str(caught.value)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path) -> None:
    run = launcher(2, tmp_path)(train)
    run.result(100)
    assert run.dir is not None
    newest, before, _ = checkpoints.published(run.dir)
    with open(newest / "model.pt", "r+b") as file:
        file.seek(700)
        file.write(b"\x00\x01\x02")

    resumed = launcher(2, tmp_path, resume=True)(train)

    assert (checkpoints.step_of(before), *uninterrupted(2)[1:]) == resumed.result(100)
    assert any(str(newest / "model.pt") in note and "damaged" in note for note in resumed.state.notes)


def test_where_all_are_damaged_nothing_is_begun_afresh(tmp_path: Path) -> None:
    run = launcher(2, tmp_path)(train, keep=1)
    run.result(100)
    assert run.dir is not None
    (only,) = checkpoints.published(run.dir)
    (only / "optimizer.pt").unlink()

    with pytest.raises(ddpnb.CheckpointError, match=r"optimizer\.pt is missing"):
        launcher(2, tmp_path, resume=True)(train).result(100)


def test_the_record_is_readable(tmp_path: Path) -> None:
    run = launcher(2, tmp_path)(train, "stop", 5)
    run.result(100)
    assert run.dir is not None
    (checkpoint, _) = checkpoints.published(run.dir)

    record = json.loads((checkpoint / "state.json").read_text())

    assert {"epoch": 1, "step": 6, "samples": 136, "skipped": 0, "batches": 2, "windows": 2} == record["position"]
    assert {"epoch": 1, "samples": 48, "seed": 3} == record["loader"]
    assert (2, 1, "AdamW") == (record["world_size"], record["threads"], record["optimizer"])


def _until(run: ddpnb.Run, claim: Any) -> None:
    """Wait for a message after which `claim()` holds."""
    changed = threading.Event()
    run.watchers.append(lambda _: changed.set())
    while not claim():
        assert changed.wait(60), run.output()
        changed.clear()


# ---- the kernel ends


@pytest.mark.parametrize("how", ["killed", "shut down"])
def test_the_work_of_a_kernel_that_ends_is_saved(how: str, tmp_path: Path) -> None:
    kernel = Kernel()
    try:
        kernel.run(f"""
            %load_ext ddpnb
            import pathlib, threading
            from tests.resumable import launcher, train
            run = launcher(2, pathlib.Path({str(tmp_path)!r}))(train, epochs=100_000, checkpoint_every=1_000_000)
            has_begun = threading.Event()
            run.watchers.append(lambda run: "loss" in run.history and has_begun.set())
            assert has_begun.wait(60)
        """)
        workers = kernel.workers()
        assert len(workers) == 2

        if how == "killed":
            os.kill(kernel.pid, signal.SIGKILL)
        else:
            kernel.manager.shutdown_kernel(now=False)
        wait_until(lambda: have_ended(workers), what="the end of the workers")
    finally:
        kernel.close()

    (saved,) = checkpoints.published(next(tmp_path.iterdir()))
    manifest = checkpoints.verify(saved)
    resumed = launcher(2, tmp_path, resume=True)(train, epochs=manifest.epoch + 2).result(100)
    assert manifest.step == resumed[0]
    assert launcher(2)(train, epochs=manifest.epoch + 2).result(100)[1:] == resumed[1:]


# ---- under torchrun


_SCRIPT = """
import os, sys, ddpnb, torch
from tests.resumable import train

torch.set_num_threads(1)
first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
kind, at_step = sys.argv[1:3] if first_attempt and len(sys.argv) > 1 else (None, 0)
result = ddpnb.launch(train, kind, int(at_step), checkpoint_every=1, view=False).result()
if ddpnb.rank() == 0:
    print("RESULT", *result, flush=True)
"""


def _torchrun(script: Path, *arguments: str, restarts: int = 0, **environment: str) -> tuple[int, int, str]:
    """What rank 0 of a script under the real torchrun has printed."""
    ours = str(Path(__file__).parents[1])
    variables = os.environ | {"PYTHONPATH": ours, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | environment
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.1", str(script), *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=2 * DEADLINE)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    _, first, last, digest = line.split()
    return int(first), int(last), digest


def test_a_run_of_the_notebook_goes_on_under_torchrun_and_back(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    run_dir = tmp_path / "runs"

    launcher(2, run_dir)(train, "stop", 3).result(100)
    under_torchrun = _torchrun(script, "stop", "7", DDPNB_RUN_DIR=str(run_dir), DDPNB_RESUME="1")
    back = launcher(2, run_dir, resume=True)(train).result(100)

    assert (4, 8) == under_torchrun[:2]
    assert (8, *uninterrupted(2)[1:]) == back


def test_what_torchrun_starts_again_resumes_by_itself(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    run_dir = tmp_path / "runs"

    first, last, digest = _torchrun(script, "SIGKILL of one rank", "6", restarts=1, DDPNB_RUN_DIR=str(run_dir))

    assert 0 < first <= 7
    assert uninterrupted(2)[1:] == (last, digest)
    assert ["finished", "interrupted"] == [ddpnb.open_run(run).state.status for run in folder.runs_in(run_dir)]
