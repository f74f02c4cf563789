"""`save_checkpoint` and `load_checkpoint`: the same bits come back, and what cannot be loaded is said on all ranks."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import ddpnb
from ddpnb import checkpoints
from ddpnb.checkpoints import MANIFEST, Manifest
from ddpnb.errors import CheckpointError
from ddpnb.train import snapshot
from ddpnb.train.checkpoint import load_checkpoint, save_checkpoint
from ddpnb.train.checks import TrainingWarning
from ddpnb.train.loading import loader as make_loader
from ddpnb.train.wrapping import state_dict, wrap

from .ranks import on_ranks

State = dict[str, Any]


class Net(nn.Module):
    """With all that a state may hold."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.module = nn.Linear(3, width)  # named like DDP's prefix
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 2, bias=False)
        self.tied = nn.Linear(width, 2, bias=False)
        self.tied.weight = self.head.weight
        self.register_buffer("scalar", torch.tensor(2.5))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("brief", torch.arange(4).to(torch.bfloat16))
        self.register_buffer("image", torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last))
        self.register_buffer("counts", torch.tensor([1, 1 << 40]))
        self.register_buffer("flags", torch.tensor([True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.norm(self.module(x)))
        return scores


class Average:
    """A user's own object with tensors and numbers."""

    def __init__(self) -> None:
        self.kept: Any = None

    def state_dict(self) -> Any:
        return self.kept

    def load_state_dict(self, state: Any) -> None:
        self.kept = state


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer | None, steps: int = 2) -> None:
    for step in range(steps):
        inputs = torch.linspace(-1, 1, 15).reshape(5, 3) * (step + 1)
        model(inputs).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def plain(value: Any) -> Any:
    """Comparable with ==, to the bit: a tensor as its dtype, shape, strides and bytes."""
    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        content = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(whole.dtype), tuple(whole.shape), whole.stride(), content
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    return value


def same(first: Any, second: Any) -> bool:
    """Whether two states are equal to the bit."""
    return bool(plain(first) == plain(second))


def refusal(path: Path | str, **arguments: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, **arguments)
    return str(caught.value)


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    """No test finds a process group in its own process; `loader` makes one."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of a trained Net and its SGD, at a path that is not easy."""
    path = tmp_path / "ein Ordner mit Ümläuten 数" / "digits"
    model = Net()
    optimizer = sgd(model)
    trained(model, optimizer)
    save_checkpoint(path, epoch=4, model=model, optimizer=optimizer)
    return path


# ---- there and back, in one process


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_model_and_optimizer_come_back_to_the_bit(
    tmp_path: Path, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    model = Net()
    optimizer = make_optimizer(model)
    trained(model, optimizer)
    save_checkpoint(tmp_path / "digits", epoch=4, model=model, optimizer=optimizer)
    other = Net()
    other_optimizer = make_optimizer(other)

    assert 5 == load_checkpoint(tmp_path / "digits", model=other, optimizer=other_optimizer)
    assert same(model.state_dict(), other.state_dict())
    assert same(optimizer.state_dict(), other_optimizer.state_dict())
    assert other.head.weight is other.tied.weight
    for each, own in ((model, optimizer), (other, other_optimizer)):
        trained(each, own)
    assert same(model.state_dict(), other.state_dict())
    assert not dist.is_initialized()


def test_plain_torch_reads_the_files(saved: Path) -> None:
    model, optimizer = Net(), sgd(Net())
    load_checkpoint(saved, model=model)
    again = Net()
    again.load_state_dict(torch.load(saved / "model.pt", weights_only=True))
    optimizer.load_state_dict(torch.load(saved / "optimizer.pt", weights_only=True))

    assert same(model.state_dict(), again.state_dict())
    assert 0.9 == optimizer.param_groups[0]["momentum"]
    assert "momentum_buffer" in optimizer.state_dict()["state"][0]


def test_scheduler_scaler_loader_and_own_objects_come_back(tmp_path: Path) -> None:
    def objects() -> dict[str, Any]:
        model = Net()
        optimizer = sgd(model)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=20),
            "scaler": torch.amp.GradScaler("cpu", init_scale=64.0),
            "loader": make_loader(TensorDataset(torch.arange(20)), batch_size=4, shuffle=True),
            "state": [Average(), Average()],
        }

    there, here = objects(), objects()
    trained(there["model"], there["optimizer"])
    for _ in range(3):
        there["scheduler"].step()
    batches = iter(there["loader"])
    next(batches)
    big = torch.arange(1 << 20)
    there["state"][0].kept = {
        "mean": big[5:7],
        3: [torch.tensor(1.5), (float("inf"), None, "ü", True)],
        "numpy": np.float32(2),
    }
    save_checkpoint(tmp_path / "digits", epoch=0, **there)
    load_checkpoint(tmp_path / "digits", **here)

    expected = {"mean": big[5:7], 3: [torch.tensor(1.5), (float("inf"), None, "ü", True)], "numpy": 2.0}
    assert same(expected, here["state"][0].kept)
    assert here["state"][1].kept is None
    assert there["scheduler"].state_dict() == here["scheduler"].state_dict()
    assert 64.0 == here["scaler"].state_dict()["scale"]
    assert plain(list(batches)) == plain(list(here["loader"]))
    assert (tmp_path / "digits" / "state.pt").stat().st_size < 1 << 16  # the slice, and not what it is a slice of


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> tuple[Any, ...]:
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()

    model, optimizer = Net(), sgd(Net())
    draw()
    save_checkpoint(tmp_path / "digits", epoch=0, model=model, optimizer=optimizer)
    expected = draw()
    load_checkpoint(tmp_path / "digits", model=model)
    without = draw()
    load_checkpoint(tmp_path / "digits", model=model, optimizer=optimizer)

    assert expected == draw()
    assert expected != without


def test_a_model_without_weights_is_a_model(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "nothing", epoch=0, model=nn.ReLU())

    assert 1 == load_checkpoint(tmp_path / "nothing", model=nn.ReLU())


def test_the_newest_replaces_the_one_before_and_nothing_else_is_left(saved: Path) -> None:
    model = Net(width=9)
    save_checkpoint(saved, epoch=7, model=model)

    assert 8 == load_checkpoint(saved, model=Net(width=9))
    assert [saved.name] == os.listdir(saved.parent)
    assert {"model.pt", "state.json", "rank-0.pt", MANIFEST} == set(os.listdir(saved))


def test_a_relative_path_and_a_link_are_those_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk/digits")
    monkeypatch.chdir(tmp_path)
    for epoch in (1, 2):
        save_checkpoint("link", epoch=epoch, model=Net())
    monkeypatch.chdir(tmp_path / "disk")

    assert 3 == load_checkpoint("digits", model=Net())
    assert (tmp_path / "link").is_symlink()
    assert ["digits"] == os.listdir(tmp_path / "disk")
    assert str(tmp_path / "disk") in refusal(".", model=Net())
    with pytest.raises(FileNotFoundError, match="link"):
        load_checkpoint("link", model=Net())


def test_nothing_there_is_an_error_or_a_fresh_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing_ok=True"):
        load_checkpoint(tmp_path / "nothing", model=Net())

    assert 0 == load_checkpoint(tmp_path / "nothing", model=Net(), missing_ok=True)


def test_the_newest_whole_checkpoint_of_a_run_is_taken_and_the_damaged_one_named(tmp_path: Path) -> None:
    saved = {step: tmp_path / "checkpoints" / checkpoints.name_of(step) for step in (1, 2)}
    for step, path in saved.items():
        save_checkpoint(path, epoch=step, model=Net())
    os.truncate(saved[2] / "model.pt", 100)

    with pytest.warns(TrainingWarning, match="step-00000002/model.pt is damaged: .*; an earlier checkpoint is used"):
        epoch = load_checkpoint(tmp_path, model=Net())
    (saved[1] / "model.pt").unlink()
    text = refusal(tmp_path, model=Net())

    assert 2 == epoch
    assert "no checkpoint of the run is whole" in text
    assert str(saved[2] / "model.pt") in text
    assert str(saved[1] / "model.pt") in text


# ---- files of torch.save


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
def test_a_file_as_tutorials_write_it_is_loaded(tmp_path: Path, prefix: str, legacy: bool) -> None:
    model = Net()
    optimizer = sgd(model)
    trained(model, optimizer)
    weights = {prefix + name: value for name, value in model.state_dict().items()}
    content = {"model": weights, "optimizer": optimizer.state_dict(), "epoch": 6}
    torch.save(content, tmp_path / "checkpoint.pt", _use_new_zipfile_serialization=not legacy)
    other = Net()
    other_optimizer = sgd(other)

    assert 7 == load_checkpoint(tmp_path / "checkpoint.pt", model=other, optimizer=other_optimizer)
    assert same(model.state_dict(), other.state_dict())
    assert same(optimizer.state_dict(), other_optimizer.state_dict())


def test_a_file_of_weights_alone_is_loaded(tmp_path: Path) -> None:
    model, other = Net(), Net()
    torch.save(model.state_dict(), tmp_path / "weights.pt")

    assert 0 == load_checkpoint(tmp_path / "weights.pt", model=other)
    assert same(model.state_dict(), other.state_dict())
    assert "holds no optimizer" in refusal(tmp_path / "weights.pt", model=other, optimizer=sgd(other))


def test_a_file_of_others_may_be_written_over_once_it_was_read(tmp_path: Path) -> None:
    model, other = Net(), Net()
    average = Average()
    torch.save({"model": model.state_dict(), "scheduler": {"mean": torch.ones(3)}}, tmp_path / "file.pt")
    load_checkpoint(tmp_path / "file.pt", model=other, scheduler=average)
    os.truncate(tmp_path / "file.pt", 0)

    assert same({"mean": torch.ones(3)}, average.kept)  # mapped memory would end this process


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be read"),
        (b"\0" * 1000, "cannot be read"),
        (b"just a text", "cannot be read"),
        (b"PK\x03\x04 no zip", "cannot be read"),
        (pickle.dumps([1, 2]), "cannot be read"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "file.pt").write_bytes(content)

    text = refusal(tmp_path / "file.pt", model=Net())

    assert f"{tmp_path / 'file.pt'} {said}" in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([1, 2], "holds no dict, but a list"),
        ({0: torch.ones(2)}, "holds no model's state"),
        ({"model": [1], "epoch": 1}, "holds no model's state"),
        ({"epoch": 1}, "holds no model"),
        ({"model": {}, "epoch": "last"}, "ValueError"),
        ({}, "another model"),
    ],
)
def test_a_file_with_other_contents_is_refused(tmp_path: Path, content: Any, said: str) -> None:
    torch.save(content, tmp_path / "file.pt")

    text = refusal(tmp_path / "file.pt", model=Net())

    assert str(tmp_path / "file.pt") in text
    assert said in text


def test_an_optimizer_of_something_else_is_refused(tmp_path: Path) -> None:
    model = Net()
    contents: list[Any] = [[1], {}, {"param_groups": 7}, {"param_groups": [{}], "state": {}}]
    for content in contents:
        torch.save({"model": model.state_dict(), "optimizer": content}, tmp_path / "file.pt")

        assert "holds no optimizer's state" in refusal(tmp_path / "file.pt", model=model, optimizer=sgd(model))


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_hostile_pickle_is_never_executed(saved: Path, legacy: bool) -> None:
    trace = saved.parent / "executed"
    torch.save(
        {"model": Hostile(trace), "epoch": 0}, saved.parent / "file.pt", _use_new_zipfile_serialization=not legacy
    )
    whole = checkpoints.read_manifest(saved)
    for name in whole.files:
        target = saved.parent / "checkpoints" / "step-00000001"
        _copy_with(saved, target, name, Hostile(trace))
        text = refusal(target, model=Net(), optimizer=sgd(Net()))

        assert str(target) in text
        assert not trace.exists()
    text = refusal(saved.parent / "file.pt", model=Net())
    assert "(posix.mkdir)" in text
    assert "reading it could execute code, and was refused" in text
    assert not trace.exists()
    torch.load(saved.parent / "file.pt", weights_only=False)
    assert trace.exists()  # it would have been


def filled(content: bytes) -> Callable[[checkpoints.Sink], object]:
    return lambda sink: sink.write(content)


def _copy_with(saved: Path, target: Path, name: str, content: object) -> None:
    """The same checkpoint with another file in it, which its manifest knows."""
    draft = checkpoints.begin(target)
    files = {}
    for each in checkpoints.read_manifest(saved).files:
        data = (saved / each).read_bytes()
        if each == name:
            torch.save(content, draft / each)
            data = (draft / each).read_bytes()
        files[each] = checkpoints.write(draft / each, filled(data))
    checkpoints.publish(draft, target, Manifest(step=0, epoch=5, world_size=1, files=files))


# ---- what cannot be loaded


def test_damage_anywhere_is_named_and_nothing_is_loaded(saved: Path) -> None:
    draw = random.Random(3)
    model = Net()
    optimizer = sgd(model)
    before = plain(model.state_dict())
    for name in sorted(os.listdir(saved)):
        path = saved / name
        whole = path.read_bytes()
        damaged = [b"", bytes(len(whole)), whole[: len(whole) // 2], whole[:-1]]
        for _ in range(8):
            flipped = bytearray(whole)
            flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
            damaged.append(bytes(flipped))
        for content in damaged:
            path.write_bytes(content)

            assert str(saved) in refusal(saved, model=model, optimizer=optimizer, missing_ok=True)
        path.unlink()
        assert name in refusal(saved, model=model, optimizer=optimizer)
        path.write_bytes(whole)
    assert before == plain(model.state_dict())
    assert 5 == load_checkpoint(saved, model=model, optimizer=optimizer)


def test_another_model_is_told_by_names_and_shapes(saved: Path) -> None:
    other = Net(width=6)
    other.extra = nn.Linear(1, 1)
    del other.brief
    before = plain(other.state_dict())

    text = refusal(saved, model=other)

    assert f"{saved} is a checkpoint of another model" in text
    assert "it does not have 'extra.weight', 'extra.bias'" in text
    assert "this model does not have 'brief'" in text
    assert "'module.weight' is (4, 3) there and (6, 3) here" in text
    assert before == plain(other.state_dict())


def test_another_optimizer_is_told_and_the_model_stays_as_it_was(saved: Path) -> None:
    model = Net()
    before = plain(model.state_dict())
    some = torch.optim.SGD(list(model.parameters())[:2], lr=0.1)

    texts = [
        refusal(saved, model=model, optimizer=adamw(model)),
        refusal(saved, model=model, optimizer=some),
        refusal(saved, optimizer=sgd(Net(width=6))),
    ]

    assert f"{saved} was saved with SGD, and this is AdamW" in texts[0]
    assert "5 parameters in its groups, and this one 2" in texts[1]
    assert "momentum_buffer of parameter 0 is (4, 3) there, and the parameter here is (6, 3)" in texts[2]
    assert before == plain(model.state_dict())


def test_the_optimizer_of_a_file_is_told_by_its_settings(tmp_path: Path) -> None:
    model = Net()
    torch.save({"model": model.state_dict(), "optimizer": sgd(model).state_dict(), "epoch": 1}, tmp_path / "file.pt")

    text = refusal(tmp_path / "file.pt", optimizer=adamw(model))

    assert "is not of this optimizer, a AdamW: it has dampening, momentum, nesterov, and not amsgrad, betas" in text


def test_what_was_not_saved_is_not_loaded_in_silence(tmp_path: Path, saved: Path) -> None:
    model = Net()
    save_checkpoint(tmp_path / "bare", epoch=0, model=model)
    loader = make_loader(TensorDataset(torch.arange(4)), batch_size=2)

    assert "holds no optimizer" in refusal(tmp_path / "bare", model=model, optimizer=sgd(model))
    assert "holds no loader" in refusal(saved, model=model, loader=loader)
    assert "has other objects" in refusal(saved, model=model, state=Average())


def test_an_object_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    average = Average()
    for kept, said in (({"code": print}, "state-0.state_dict()['code'] is of type builtin"), ({(1, 2): 3}, "tuple")):
        average.kept = kept
        with pytest.raises(CheckpointError, match="could not be saved") as caught:
            save_checkpoint(tmp_path / "digits", epoch=0, model=Net(), state=average)

        assert said in str(caught.value)
    assert [] == os.listdir(tmp_path)


def test_an_error_in_a_users_object_is_kept_as_the_cause(saved: Path, tmp_path: Path) -> None:
    class Broken(Average):
        def state_dict(self) -> Any:
            raise ZeroDivisionError("mine")

    with pytest.raises(CheckpointError, match="ZeroDivisionError: mine") as caught:
        save_checkpoint(tmp_path / "other", epoch=0, model=Net(), state=Broken())

    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"epoch": -1}, ValueError),
        ({"epoch": 1.5}, ValueError),
        ({"epoch": True}, ValueError),
        ({"state": 5}, TypeError),
        ({"model": {}}, TypeError),
        ({"optimizer": "SGD"}, TypeError),
        ({"loader": []}, TypeError),
    ],
)
def test_arguments_that_cannot_be_are_refused(tmp_path: Path, arguments: dict[str, Any], kind: type[Exception]) -> None:
    given: dict[str, Any] = {"epoch": 0, "model": Net()} | arguments
    with pytest.raises(kind):
        save_checkpoint(tmp_path / "digits", **given)

    assert [] == os.listdir(tmp_path)


# ---- where nothing of ours may go, or can


def _content(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in sorted(folder.rglob("*")) if each.is_file()}


@pytest.mark.parametrize("name", ["notes.txt", MANIFEST])
def test_a_folder_of_somebody_else_stays_as_it_is(tmp_path: Path, name: str) -> None:
    foreign = tmp_path / "project"
    foreign.mkdir()
    (foreign / name).write_text(json.dumps({"name": "my web page", "files": {}}))
    (foreign / "work").write_text("of months")
    before = _content(tmp_path)

    with pytest.raises(CheckpointError, match=r"something else is there, and stays.*choose another path") as caught:
        save_checkpoint(foreign, epoch=0, model=Net())

    assert str(foreign) in str(caught.value)
    assert before == _content(tmp_path)
    assert str(foreign) in refusal(foreign, model=Net())


def test_a_file_that_the_user_has_put_into_a_checkpoint_is_not_lost(saved: Path) -> None:
    (saved / "notes.txt").write_text("mine")
    before = _content(saved.parent)

    with pytest.raises(CheckpointError, match=r"'notes.txt', which would be lost"):
        save_checkpoint(saved, epoch=5, model=Net())

    assert before == _content(saved.parent)


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.write_text("mine")])
def test_an_empty_folder_or_a_file_is_not_replaced(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "there")
    with pytest.raises(CheckpointError, match="choose another path"):
        save_checkpoint(tmp_path / "there", epoch=0, model=Net())

    assert ["there"] == os.listdir(tmp_path)
    assert str(tmp_path / "there") in refusal(tmp_path / "there", model=Net(), missing_ok=True)


def test_a_file_where_a_folder_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match=r"Not a directory|File exists") as caught:
        save_checkpoint(tmp_path / "file" / "digits", epoch=0, model=Net())

    assert str(tmp_path / "file") in str(caught.value)
    assert "mine" == (tmp_path / "file").read_text()


def test_on_a_full_disk_the_one_before_stands(small_disk: Path) -> None:
    target = small_disk / "digits"
    save_checkpoint(target, epoch=1, model=Net())
    big = nn.Linear(1000, 1000)

    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        save_checkpoint(target, epoch=2, model=big)

    assert str(small_disk / ".draft-digits" / "model.pt") in str(caught.value)
    assert 2 == load_checkpoint(target, model=Net())
    assert ["digits"] == os.listdir(small_disk)  # the space is free again
    save_checkpoint(target, epoch=3, model=Net())
    assert 4 == load_checkpoint(target, model=Net())


def test_a_read_only_folder_is_named(saved: Path) -> None:
    folder = saved.parent
    if os.geteuid() or subprocess.run(["mount", "--bind", "-o", "ro", folder, folder]).returncode:
        pytest.skip("may not make a folder read-only")
    try:
        with pytest.raises(CheckpointError, match="Read-only file system") as caught:
            save_checkpoint(saved, epoch=5, model=Net())

        assert str(folder) in str(caught.value)
        assert 5 == load_checkpoint(saved, model=Net())
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_path_that_another_process_writes_at_is_refused(saved: Path) -> None:
    draft = checkpoints.begin(saved)
    (draft / "model.pt").write_text("of the other one")
    folder = os.open(draft, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)  # as the other one has

    with pytest.raises(CheckpointError, match="another process is writing there at this moment"):
        save_checkpoint(saved, epoch=8, model=Net())

    assert "of the other one" == (draft / "model.pt").read_text()
    os.close(folder)
    save_checkpoint(saved, epoch=8, model=Net())
    assert 9 == load_checkpoint(saved, model=Net())


def test_what_a_save_that_was_cut_short_has_left_is_no_part_of_the_next(saved: Path) -> None:
    (checkpoints.begin(saved) / "model-3.pt").write_text("left")
    save_checkpoint(saved, epoch=8, model=Net())

    assert {"model.pt", "state.json", "rank-0.pt", MANIFEST} == set(os.listdir(saved))


def test_halves_of_two_checkpoints_are_never_loaded(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = snapshot.load
    other = Net()
    model = Net()
    before = plain(model.state_dict())

    def save_and_load(path: Path) -> Any:
        if path.name == "optimizer.pt":  # the model has been read
            save_checkpoint(saved, epoch=8, model=other, optimizer=sgd(other))
        return load(path)

    monkeypatch.setattr(snapshot, "load", save_and_load)
    text = refusal(saved, model=model, optimizer=sgd(model))

    assert "it has been replaced meanwhile" in text
    assert before == plain(model.state_dict())


def _save_again_and_again(path: str, value: float) -> list[str]:
    model = nn.Linear(300, 300)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    refusals = []
    for epoch in range(8):
        try:
            save_checkpoint(path, epoch=epoch, model=model)
        except CheckpointError as error:
            refusals.append(str(error))
    return refusals


def test_two_processes_at_one_path_do_not_mix(tmp_path: Path) -> None:
    target = tmp_path / "digits"
    launcher = ddpnb.Launcher(nproc_per_node=1, view=False, threads_per_worker=1)
    runs = [launcher(_save_again_and_again, str(target), value) for value in (1.0, 2.0)]
    refusals = [run.result(timeout=60) for run in runs]
    model = nn.Linear(300, 300)
    load_checkpoint(target, model=model)

    others = {text for texts in refusals for text in texts if "another process is writing there at this" not in text}
    assert set() == others
    assert any(len(texts) < 8 for texts in refusals)
    assert 1 == len({*model.weight.flatten().tolist(), *model.bias.tolist()})
    assert ["digits"] == os.listdir(tmp_path)


def test_a_training_that_goes_on_may_replace_what_is_being_loaded(tmp_path: Path) -> None:
    target = tmp_path / "digits"
    launcher = ddpnb.Launcher(nproc_per_node=1, view=False, threads_per_worker=1)
    model = nn.Linear(300, 300)
    save_checkpoint(target, epoch=0, model=model)
    run = launcher(_save_again_and_again, str(target), 1.0)
    epochs, texts = [], []
    while not run.done():
        try:
            epochs.append(load_checkpoint(target, model=model))
        except CheckpointError as error:
            texts.append(str(error))

    assert [] == run.result(timeout=60)
    assert all("it has been replaced meanwhile" in text for text in texts), texts
    assert sorted(epochs) == epochs
    assert 8 == load_checkpoint(target, model=model)


# ---- cut short


def _killed_at(moment: int, action: Callable[[], object]) -> bool:
    """Do it in a child that kills itself before the given of its touches to the disk; whether it came to that."""
    child = os.fork()
    if child == 0:
        try:
            _kill_myself_at(moment)
            action()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status)


def _kill_myself_at(moment: int) -> None:
    count = 0
    watched = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.scandir", "os.listdir")

    def touch() -> None:
        nonlocal count
        count += 1
        if count == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(lambda event, _: touch() if event in watched else None)
    fsync = os.fsync

    def watched_fsync(descriptor: int) -> None:
        touch()
        fsync(descriptor)
        touch()

    os.fsync = watched_fsync  # type: ignore[assignment]


def test_a_kill_at_any_moment_leaves_a_checkpoint_that_loads(saved: Path) -> None:
    torch.manual_seed(1)
    old, new = Net(), Net()
    load_checkpoint(saved, model=old)
    known = {5: plain(old.state_dict()), 9: plain(new.state_dict())}
    seen, moment = [], 1
    while _killed_at(moment, lambda: save_checkpoint(saved, epoch=8, model=new)):
        model = Net()
        epoch = load_checkpoint(saved, model=model)

        assert known[epoch] == plain(model.state_dict())
        seen.append(epoch)
        save_checkpoint(saved, epoch=4, model=old)
        assert [saved.name] == os.listdir(saved.parent)  # what was left is gone
        moment += 1
    assert sorted(seen) == seen  # first the old one, from one moment on the new one
    assert {5, 9} == set(seen)
    assert len(seen) > 30


# ---- on ranks


def _wrapped(how: str) -> nn.Module:
    torch.manual_seed(7 + ddpnb.rank())
    net: Any = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    if how == "compiled":
        net = torch.compile(net, backend="eager")
    return wrap(net, strategy="fsdp" if how == "fsdp" else "ddp")


def _save_on_ranks(path: str, how: str) -> dict[str, Any]:
    model = _wrapped(how)
    optimizer = adamw(model)
    _step(model, optimizer)
    loader = make_loader(TensorDataset(torch.arange(24)), batch_size=3, shuffle=True)
    batches = iter(loader)
    next(batches)
    torch.manual_seed(100 + ddpnb.rank())
    save_checkpoint(path, epoch=2, model=model, optimizer=optimizer, loader=loader)
    return _seen(model, optimizer, batches)


def _load_on_ranks(path: str, how: str) -> dict[str, Any]:
    model = _wrapped(how)
    optimizer = adamw(model)
    loader = make_loader(TensorDataset(torch.arange(24)), batch_size=3, shuffle=True)
    torch.manual_seed(ddpnb.rank())
    epoch = load_checkpoint(path, model=model, optimizer=optimizer, loader=loader)
    return _seen(model, optimizer, loader) | {"epoch": epoch}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.full((4, 3), 1.0 + ddpnb.rank())).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _seen(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> dict[str, Any]:
    """What there is after a checkpoint, and what comes next."""
    seen = {
        "model": plain(state_dict(model)),
        "optimizer": plain(optimizer.state_dict()),
        "drawn": torch.rand(2).tolist(),
        "rest": torch.cat([batch[0] for batch in batches]).tolist(),
    }
    _step(model, optimizer)
    return seen | {"next": plain(state_dict(model))}


@pytest.mark.parametrize("how", ["ddp", "compiled", "fsdp"])
def test_two_ranks_save_and_any_number_loads(tmp_path: Path, how: str) -> None:
    path = str(tmp_path / "digits")
    saved = on_ranks(2, _save_on_ranks, path, how)
    again = on_ranks(2, _load_on_ranks, path, how)
    (alone,) = on_ranks(1, _load_on_ranks, path, "ddp" if how != "ddp" else "fsdp")
    bare = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    epoch = load_checkpoint(path, model=bare)

    assert [each | {"epoch": 3} for each in saved] == again
    assert saved[0]["drawn"] != saved[1]["drawn"]
    assert (3, 3) == (epoch, alone["epoch"])
    assert saved[0]["model"] == plain(bare.state_dict()) == alone["model"]
    assert saved[0]["optimizer"] == alone["optimizer"]
    assert sorted(saved[0]["rest"] + saved[1]["rest"]) == sorted(alone["rest"])


def _refusals(paths: list[str]) -> list[str]:
    """What this rank hears of each, one after the other: no rank may be left behind in the one before."""
    model = _wrapped("ddp")
    texts = []
    for path in paths:
        try:
            load_checkpoint(path, model=model, optimizer=sgd(model))
        except (CheckpointError, FileNotFoundError) as error:
            texts.append(f"{type(error).__name__}: {error}")
        else:
            texts.append("nothing")
    return texts


def test_bad_checkpoints_are_refused_on_all_ranks_alike(tmp_path: Path) -> None:
    cases = {
        "nothing": "FileNotFoundError: there is no checkpoint at",
        "empty": "no manifest.json",
        "damaged": "rank-1.pt is damaged",
        "other": "was saved with AdamW",
        "text.pt": "cannot be read",
        "another model": "this model does not have 'scalar'",
    }
    paths = {name: tmp_path / name for name in cases}
    paths["empty"].mkdir()
    paths["text.pt"].write_text("no checkpoint")
    on_ranks(2, _save_on_ranks, str(paths["other"]), "ddp")  # with AdamW
    on_ranks(2, _save_on_ranks, str(paths["damaged"]), "ddp")
    os.truncate(paths["damaged"] / "rank-1.pt", 10)
    save_checkpoint(paths["another model"], epoch=0, model=Net(), optimizer=sgd(Net()))

    texts, others = on_ranks(2, _refusals, [str(path) for path in paths.values()])

    assert texts == others
    for text, (name, said) in zip(texts, cases.items(), strict=True):
        assert name in text
        assert said in text


def _loop_on_ranks(how: str) -> dict[str, Any]:
    torch.manual_seed(3)
    model = _wrapped(how)
    optimizer = adamw(model)
    loop = ddpnb.Loop(model, optimizer, make_loader(TensorDataset(torch.randn(12, 3)), batch_size=3), epochs=2)
    for (inputs,) in loop:
        loop.update(model(inputs).square().mean())
    return {"model": plain(state_dict(model)), "optimizer": plain(optimizer.state_dict())}


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_what_a_loop_has_saved_is_loaded_from_the_runs_folder(tmp_path: Path, how: str) -> None:
    launcher = ddpnb.Launcher(nproc_per_node=2, view=False, threads_per_worker=1, run_dir=tmp_path / "runs")
    run = launcher(_loop_on_ranks, how)
    saved = run.result(timeout=60)
    bare = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = adamw(bare)

    assert run.dir is not None
    assert 2 == load_checkpoint(run.dir, model=bare, optimizer=optimizer)
    assert saved == {"model": plain(bare.state_dict()), "optimizer": plain(optimizer.state_dict())}
    assert not dist.is_initialized()


def _load_what_one_rank_cannot(path: str) -> str:
    model = _wrapped("ddp")
    if ddpnb.rank() == 1:
        model = nn.Linear(1, 1)
    try:
        load_checkpoint(path, model=model)
    except CheckpointError as error:
        return str(error)
    return "nothing"


def test_what_does_not_fit_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    on_ranks(2, _save_on_ranks, str(tmp_path / "digits"), "ddp")

    first, second = on_ranks(2, _load_what_one_rank_cannot, str(tmp_path / "digits"))

    assert first == second
    assert "could not be loaded on rank 1: " in first
    assert "another model" in first


def _save_what_cannot_be(path: str, disk: str) -> list[str]:
    model = wrap(nn.Linear(400, 400))
    average = Average()
    average.kept = {"code": print}
    texts = []
    for target, state in ((path, (average,)), (disk, ()), (__file__, ())):
        try:
            save_checkpoint(target, epoch=0, model=model, state=state)
        except CheckpointError as error:
            texts.append(str(error))
    dist.barrier()
    return texts


def test_what_rank_zero_cannot_write_is_raised_on_all(tmp_path: Path, small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(700_000))

    first, second = on_ranks(2, _save_what_cannot_be, str(tmp_path / "digits"), str(small_disk / "digits"))

    assert first == second
    assert 3 == len(first)
    for text, said in zip(first, ["builtin_function", "No space left", "choose another path"], strict=True):
        assert said in text
    assert ["filler"] == os.listdir(small_disk)


def _save_without_a_group(path: str) -> None:
    save_checkpoint(path, epoch=0, model=nn.Linear(1, 1))


def test_ranks_without_a_group_do_not_write_over_each_other(tmp_path: Path) -> None:
    launcher = ddpnb.Launcher(nproc_per_node=2, view=False, backend=None)
    with pytest.raises(RuntimeError, match="init_process_group"):
        launcher(_save_without_a_group, str(tmp_path / "digits")).result(timeout=60)

    assert not (tmp_path / "digits").exists()


def test_nothing_is_warned_of(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Net()
        save_checkpoint(tmp_path / "digits", epoch=0, model=model, optimizer=sgd(model))
        load_checkpoint(tmp_path / "digits", model=model, optimizer=sgd(model))
