"""Checkpoints as files: what was written is there, what was damaged is named, what is not ours stays."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpnb import checkpoints
from ddpnb.checkpoints import MANIFEST, File, Manifest
from ddpnb.errors import CheckpointError

CONTENTS = {"model.pt": b"weights" * 300, "state.json": b"{}", "empty.pt": b""}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder, whose path is not easy."""
    path = tmp_path / "ein Ordner mit Ümläuten 数"
    path.mkdir()
    return path


def save(run: Path, step: int, score: float | None = None, contents: dict[str, bytes] = CONTENTS) -> Path:
    target = checkpoints.folder_of(run) / checkpoints.name_of(step)
    draft = checkpoints.begin(target)
    files = {name: checkpoints.write(draft / name, filled(content)) for name, content in contents.items()}
    checkpoints.publish(draft, target, Manifest(step=step, epoch=1, world_size=1, score=score, files=files))
    return target


def filled(content: bytes) -> Callable[[checkpoints.Sink], object]:
    return lambda sink: sink.write(content)


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def refusal(checkpoint: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoints.verify(checkpoint)
    return str(caught.value)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


# ---- writing


def test_what_was_written_is_read_back(run: Path) -> None:
    checkpoint = save(run, 12, score=0.25)

    manifest = checkpoints.verify(checkpoint)

    expected = {name: File(len(each), hashlib.sha256(each).hexdigest()) for name, each in CONTENTS.items()}
    assert Manifest(step=12, epoch=1, world_size=1, score=0.25, files=expected) == manifest
    assert CONTENTS == {name: (checkpoint / name).read_bytes() for name in CONTENTS}
    assert [checkpoint.name] == names_in(checkpoint.parent)


def test_a_text_that_is_no_utf8_comes_back(run: Path) -> None:
    value = {"path": os.fsdecode(b"caf\xe9"), "name": "café 数"}
    checkpoints.write_json(run / "state.json", value)

    assert value == checkpoints.read_json(run / "state.json")
    assert "café 数" in (run / "state.json").read_bytes().decode(errors="replace")


def test_everything_is_on_the_disk_before_it_has_a_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story: list[str] = []
    fsync, rename = os.fsync, os.rename

    def telling_fsync(descriptor: int) -> None:
        fsync(descriptor)
        story.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def telling_rename(source: Path, target: Path) -> None:
        rename(source, target)
        story.append("rename to " + Path(target).name)

    monkeypatch.setattr(os, "fsync", telling_fsync)
    monkeypatch.setattr(os, "rename", telling_rename)
    save(run, 7)

    draft, name = ".draft-step-00000007", "step-00000007"
    files = [f"sync {each}" for each in CONTENTS]
    around = [f"sync {run.name}", *files, "sync manifest.json", f"sync {draft}", f"rename to {name}"]
    assert [*around, "sync checkpoints"] == story


def test_a_full_disk_is_named_with_the_file(small_disk: Path) -> None:
    standing = save(small_disk, 1)
    with pytest.raises(OSError, match="No space left") as caught:
        save(small_disk, 2, contents={"model.pt": bytes(2 << 20)})

    assert str(checkpoints.draft_of(standing.with_name("step-00000002")) / "model.pt") == caught.value.filename
    assert [standing] == checkpoints.published(small_disk)
    checkpoints.verify(standing)


def test_a_folder_that_has_vanished_is_not_made_anew(run: Path) -> None:
    run.rmdir()
    with pytest.raises(FileNotFoundError) as caught:
        save(run, 1)

    assert str(checkpoints.folder_of(run)) == str(caught.value.filename)
    assert not run.exists()


def test_what_a_rank_has_handed_in_is_taken_once(run: Path) -> None:
    draft = checkpoints.begin(checkpoints.folder_of(run) / "step-00000001")
    files = {"model-1.pt": File(3, "abc")}
    before = checkpoints.handed_in(draft, 1)
    checkpoints.hand_in(draft, 1, files)

    assert (None, files, None) == (before, checkpoints.handed_in(draft, 1), checkpoints.handed_in(draft, 1))
    assert [] == names_in(draft)


# ---- damage


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def make_folder_of(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_pipe_of(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [Path.unlink, shorten, lengthen, zero, make_folder_of, make_pipe_of])
@pytest.mark.parametrize("name", ["model.pt", "state.json", MANIFEST])
def test_a_damaged_file_is_named(run: Path, name: str, damage: Callable[[Path], None]) -> None:
    checkpoint = save(run, 1)
    damage(checkpoint / name)

    text = refusal(checkpoint)

    assert str(checkpoint) in text
    assert name in text


def test_a_file_of_zeros_where_there_was_nothing_is_named(run: Path) -> None:
    checkpoint = save(run, 1)
    lengthen(checkpoint / "empty.pt")

    assert f"{checkpoint / 'empty.pt'} is damaged: 1 bytes, and 0 were written" == refusal(checkpoint)


def test_a_flipped_bit_is_found_wherever_it_is(run: Path) -> None:
    draw = random.Random(5)
    checkpoint = save(run, 120, score=0.5)
    manifest = checkpoints.read_manifest(checkpoint)
    for name in ("model.pt", "state.json", MANIFEST):
        path = checkpoint / name
        whole = path.read_bytes()
        for bit in draw.sample(range(len(whole) * 8), min(150, len(whole) * 8)):
            flip(path, bit)

            assert str(checkpoint) in refusal(checkpoint), (name, bit)
            path.write_bytes(whole)
    assert manifest == checkpoints.verify(checkpoint)


def _without_files(found: dict[str, Any]) -> None:
    del found["files"]


def _with_text_for_step(found: dict[str, Any]) -> None:
    found["step"] = "12"


def _with_negative_step(found: dict[str, Any]) -> None:
    found["step"] = -1


def _with_text_for_score(found: dict[str, Any]) -> None:
    found["score"] = "0.5"


def _with_more(found: dict[str, Any]) -> None:
    found["more"] = 1


def _with_list_of_files(found: dict[str, Any]) -> None:
    found["files"] = list(found["files"])


@pytest.mark.parametrize(
    "change",
    [_without_files, _with_text_for_step, _with_negative_step, _with_text_for_score, _with_more, _with_list_of_files],
)
def test_a_manifest_with_other_contents_is_refused(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    checkpoint = save(run, 1)
    _rewrite(checkpoint, change)

    assert f"{checkpoint / MANIFEST} is damaged, or no manifest of a checkpoint" == refusal(checkpoint)


def _rewrite(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest, and seal it anew: nothing but its contents is wrong."""
    found = json.loads((checkpoint / MANIFEST).read_bytes())
    del found["sha256"]
    change(found)
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    (checkpoint / MANIFEST).write_text(json.dumps({**found, "sha256": digest}))


def test_a_manifest_that_is_sealed_anew_is_read(run: Path) -> None:
    checkpoint = save(run, 1)
    _rewrite(checkpoint, lambda found: found.update(step=3))

    assert 3 == checkpoints.verify(checkpoint).step


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\0" * 50, b"[]", b"7", b"{", b"\xff\xfe", b"{}\0", b"[" * 100_000],
    ids=lambda each: repr(each[:9]),
)
def test_a_manifest_of_garbage_is_refused(run: Path, garbage: bytes) -> None:
    checkpoint = save(run, 1)
    (checkpoint / MANIFEST).write_bytes(garbage)

    assert f"{checkpoint / MANIFEST} cannot be read: " in refusal(checkpoint)


@pytest.mark.parametrize("name", ["../secret", "..", ".", "", "a/b", "/etc/passwd", "a\0b", ".hidden", "a\n"])
def test_no_name_in_a_manifest_leads_out_of_the_folder(run: Path, name: str) -> None:
    checkpoint = save(run, 1)
    (checkpoint.parent / "secret").write_bytes(b"")
    manifest = checkpoints.read_manifest(checkpoint)
    digest = hashlib.sha256(b"").hexdigest()
    again = checkpoints.begin(checkpoint)
    checkpoints.publish(again, checkpoint, replace(manifest, files={name: File(0, digest)}))

    assert f"{checkpoint / MANIFEST} is damaged, or no manifest of a checkpoint" == refusal(checkpoint)


def test_a_newer_format_says_what_to_do(run: Path) -> None:
    checkpoint = save(run, 1)
    _rewrite(checkpoint, lambda found: found.update(format=2))

    text = f"{checkpoint} was written by a newer ddpnb (format 2; this one reads 1): upgrade ddpnb"
    assert text == refusal(checkpoint)


def test_what_is_no_checkpoint_is_said_so(run: Path) -> None:
    (run / "file").write_bytes(b"")
    (run / "empty").mkdir()

    assert f"{run / 'empty'} is no checkpoint: there is no manifest.json in it" == refusal(run / "empty")
    assert str(run / "file") in refusal(run / "file")
    assert f"{run / 'nothing' / MANIFEST} is missing" == refusal(run / "nothing")


def test_strangers_in_a_checkpoint_are_told_from_its_own_files(run: Path) -> None:
    checkpoint = save(run, 1)
    (checkpoint / "notes.txt").write_text("mine")
    (checkpoint / ".ipynb_checkpoints").mkdir()

    assert ["notes.txt"] == checkpoints.strangers_in(checkpoint)


# ---- what is there, and what stays


def test_checkpoints_come_newest_first_by_their_number(run: Path) -> None:
    for step in (7, 100_000_000, 99_999_999):
        save(run, step)
    (checkpoints.folder_of(run) / "step-00000008").write_text("a file")
    (checkpoints.folder_of(run) / ".draft-step-00000009").mkdir()

    assert [100_000_000, 99_999_999, 7] == [checkpoints.step_of(each) for each in checkpoints.published(run)]


def test_where_there_is_no_folder_there_is_no_checkpoint(run: Path) -> None:
    assert [] == checkpoints.published(run)
    assert [] == checkpoints.published(run / "nothing")


def test_a_folder_that_cannot_be_read_is_not_taken_for_empty(run: Path) -> None:
    os.symlink("checkpoints", checkpoints.folder_of(run))  # leads to itself

    with pytest.raises(CheckpointError, match=r"cannot be read: .*symbolic links"):
        checkpoints.published(run)


def test_the_newest_and_the_protected_stay(run: Path) -> None:
    saved = {step: save(run, step) for step in range(1, 7)}

    checkpoints.prune(run, keep=2, protected=[saved[3]])

    assert [saved[6], saved[5], saved[3]] == checkpoints.published(run)
    for each in (saved[6], saved[5], saved[3]):
        checkpoints.verify(each)
    assert sorted(each.name for each in (saved[3], saved[5], saved[6])) == names_in(checkpoints.folder_of(run))


def test_what_crashed_saves_have_left_goes_and_nothing_else(run: Path) -> None:
    save(run, 100_000_000)
    folder = checkpoints.folder_of(run)
    left = [".draft-step-99999999", ".doomed-step-00000002", ".doomed-step-100000001"]
    stays = [
        ".draft-step-100000001",  # is being written
        ".draft-mine",
        ".doomed",
        ".hidden",
        ".previous-mine",
        "notes",
        "step-1",
        "step-00000001.bak",
    ]
    for name in (*left, *stays):
        (folder / name).mkdir()
        (folder / name / "file").write_text("content")

    checkpoints.prune(run, keep=1)

    assert sorted([*stays, "step-100000000"]) == names_in(folder)
    assert all((folder / name / "file").exists() for name in stays)


def test_a_checkpoint_that_cannot_be_removed_is_no_failure(run: Path) -> None:
    saved = [save(run, step) for step in (1, 2)]
    folder = checkpoints.folder_of(run)
    if os.geteuid() or subprocess.run(["mount", "--bind", "-o", "ro", folder, folder]).returncode:
        pytest.skip("may not make a folder read-only")
    try:
        checkpoints.prune(run, keep=1)

        assert saved[::-1] == checkpoints.published(run)
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_prune_of_nothing_does_nothing(run: Path) -> None:
    checkpoints.prune(run, keep=1)

    assert [] == names_in(run)
