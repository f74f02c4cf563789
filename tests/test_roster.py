"""`ddpnb.runs()`: what was launched here, and what a folder keeps."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import pytest

import ddpnb
from ddpnb import run as runs_module


def one() -> None:
    """What a run of these tests does."""
    ddpnb.log(loss=0.25)


def launched(name: str, run_dir: Path | None = None) -> ddpnb.Run:
    return ddpnb.launch(one, nproc_per_node=0, view=False, name=name, run_dir=run_dir)


@pytest.fixture(autouse=True)
def no_runs_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "_newest", type(runs_module._newest)(maxlen=10))
    monkeypatch.setattr(runs_module, "_of_this_kernel", type(runs_module._of_this_kernel)())


def test_runs_are_kept_in_order_though_nobody_holds_them() -> None:
    for number in range(12):
        launched(f"run {number}")
    gc.collect()

    assert [f"run {number}" for number in range(2, 12)] == [run.name for run in ddpnb.runs()]


def test_a_folder_s_runs_come_before_this_kernel_s_and_each_once(tmp_path: Path) -> None:
    earlier, here = launched("earlier", tmp_path), launched("here", tmp_path)
    other = launched("elsewhere")
    runs_module._newest.remove(earlier)  # as if another kernel had launched it

    listed = ddpnb.runs(tmp_path)

    assert ["earlier", "here", "elsewhere"] == [run.name for run in listed]
    assert listed[1] is here
    assert listed[2] is other


def test_what_cannot_be_read_is_left_out_and_named(tmp_path: Path) -> None:
    damaged = launched("damaged", tmp_path)
    runs_module._newest.clear()
    assert damaged.dir is not None
    (damaged.dir / "run.json").write_text("{")

    with pytest.warns(UserWarning, match=r"damaged is left out"):
        assert [] == ddpnb.runs(tmp_path)


def test_a_folder_that_vanished_has_no_runs(tmp_path: Path) -> None:
    launched("gone", tmp_path / "runs")
    runs_module._newest.clear()
    shutil.rmtree(tmp_path / "runs")

    assert "no runs" == repr(ddpnb.runs(tmp_path / "runs"))


def test_a_list_of_runs_is_a_table() -> None:
    launched("<b>train</b>")

    head, row = repr(ddpnb.runs()).splitlines()

    assert ["run", "status", "ranks", "time", "value", "folder"] == head.split()
    assert ["0", "<b>train</b>", "finished", "1", "0:00", "loss", "0.250"] == row.split()
