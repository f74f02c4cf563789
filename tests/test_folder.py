"""A run's folder: what is written while a run goes on, what is read from it, and what a new run may go on from."""

from __future__ import annotations

import fcntl
import json
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pandas as pd
import pytest

import ddpnb
from ddpnb import candidates, draw, folder, journal, lock, recorder
from ddpnb.context import current_session
from ddpnb.folder import Folder
from ddpnb.messages import (
    AnyMessage,
    Applied,
    Asked,
    Ended,
    Exited,
    Halted,
    Hung,
    Interrupted,
    Lost,
    Met,
    Metrics,
    Noted,
    Offered,
    Output,
    Paced,
    Paused,
    Phase,
    Recalled,
    Resumed,
    Returned,
    Saved,
    Stack,
    Started,
    Steered,
    Stopping,
    Unpaused,
    Woke,
)
from ddpnb.plan import Options, make_plan, settled_by_torchrun
from ddpnb.state import RunState, fold, new_state
from ddpnb.world import World

from .conftest import DEADLINE, have_ended, wait_until
from .messages_for_tests import finished, folded, metrics, output, progress, raised

OURS = str(Path(__file__).parents[1])

two = ddpnb.Launcher(nproc_per_node=2, view=False, threads_per_worker=1)
alone = ddpnb.Launcher(nproc_per_node=1, view=False, threads_per_worker=1)


# ---- functions that are launched


def train(steps: int = 20, *, learning_rate: float = 0.1) -> float:
    loss = math.nan
    for step in range(steps):
        loss = 1 / (step + 1) + ddpnb.rank() * learning_rate
        ddpnb.log({"loss": loss}, step=step)
    print(f"rank {ddpnb.rank()} is here")
    return loss


def save(steps: int, first: int = 1) -> None:
    """Log some steps, numbered from 0 as a Loop's, and publish what stands for a checkpoint after the last of them."""
    session = current_session()
    assert session is not None
    assert session.folder is not None
    for step in range(first, first + steps):
        ddpnb.log({"loss": 1 / step + ddpnb.rank()}, step=step - 1)
    path = checkpoint(session.folder, first + steps - 1)
    session.tell(Saved(rank=ddpnb.rank(), time=time.monotonic(), path=str(path), step=first + steps - 1, epoch=0))
    ddpnb.log({"loss": 99.0}, step=first + steps - 1)  # what is done after the checkpoint will be done again


def resume(steps: int) -> tuple[str, ...]:
    """Go on from the first candidate; returns all of them."""
    session = current_session()
    assert session is not None
    step = int(session.candidates[0].name.removeprefix("step-"))
    if ddpnb.is_rank_zero():
        path = str(session.candidates[0])
        session.tell(Resumed(rank=0, time=time.monotonic(), path=path, step=step, epoch=0))
    save(steps, first=step + 1)
    return tuple(map(str, session.candidates))


def told() -> tuple[str | None, tuple[str, ...], str]:
    session = current_session()
    assert session is not None
    return str(session.folder), tuple(map(str, session.candidates)), session.arguments


def wait_for(path: Path) -> int:
    ddpnb.log(loss=1.0)
    print("waiting", flush=True)
    while not path.exists():
        time.sleep(0.01)
    ddpnb.log(loss=2.0)
    print("done", flush=True)
    return 1


def ask_until_stopped() -> int:
    ddpnb.log(loss=1.0)
    while not ddpnb.should_stop():
        time.sleep(0.001)
    return 1


def count_saves(path: Path) -> int:
    session = current_session()
    assert session is not None
    assert session._page is not None
    print("waiting", flush=True)
    while not session._page.num_saves_asked():
        time.sleep(0.001)
    return session._page.num_saves_asked()


# ---- short ways


def checkpoint(run: Path, step: int) -> Path:
    path = run / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")
    return path


def made(run_dir: Path, name: str = "train") -> Folder:
    """The folder of a run that has begun."""
    options = Options(run_dir=run_dir, name=name)
    plan = make_plan(options, train)
    return folder.make(run_dir, options, plan, new_state(name, 2, backend="gloo", started=0.0), train, "{}", ())


def ended(run_dir: Path, *steps: int) -> Path:
    """The folder of a run that has ended, with checkpoints."""
    home = made(run_dir)
    home.release()
    for step in steps:
        checkpoint(home.path, step)
    return home.path


def written(run: Path, messages: Sequence[AnyMessage], state: RunState | None = None) -> list[AnyMessage]:
    """Record messages; returns what the recorder had to say."""
    said: list[AnyMessage] = []
    writer = recorder.Recorder(run, state or new_state("train", 2, backend="gloo", started=0.0), said.append)
    writer.tell(*messages)
    writer.close(Ended(time=9.0, problem=None))
    return said


def until(run: ddpnb.Run, claim: Callable[[ddpnb.Run], bool]) -> None:
    """Wait for a message after which the claim holds."""
    changed = threading.Event()
    run.watchers.append(lambda _: changed.set())
    while not claim(run):
        assert changed.wait(DEADLINE), run.output()
        changed.clear()


def is_waiting(run: ddpnb.Run) -> bool:
    return "waiting" in run.output(0)


# ---- what is written


def test_a_run_leaves_all_that_was_said_of_it_in_its_own_folder(tmp_path: Path) -> None:
    run = ddpnb.Launcher(nproc_per_node=2, view=False, run_dir=tmp_path / "my rüns", env={"KEY": "secret"})(
        train, 20, learning_rate=0.5
    )
    run.results()

    assert run.dir is not None
    described = folder.describe(run.dir)
    assert [run.dir] == list((tmp_path / "my rüns").iterdir())
    assert {"run.json", "lock", "journal.jsonl", "output", "checkpoints"} == {path.name for path in run.dir.iterdir()}
    assert {"steps": 20, "learning_rate": 0.5} == described["arguments"]
    assert ("tests.test_folder.train", 2, "gloo") == tuple(
        described[name] for name in ("function", "world_size", "backend")
    )
    assert "secret" not in (run.dir / "run.json").read_text()
    assert {"python", "torch", "ddpnb", "numpy"} == described["versions"].keys()
    assert "rank 1 is here\n" == (run.dir / "output" / "rank-1.txt").read_text()
    assert None is lock.holder(run.dir)


def test_pandas_reads_a_journal(tmp_path: Path) -> None:
    run = ddpnb.Launcher(nproc_per_node=2, view=False, run_dir=tmp_path)(train, 20)
    run.results()

    assert run.dir is not None
    frame = pd.read_json(run.dir / "journal.jsonl", lines=True, precise_float=True)
    points = frame[frame.kind == "Metrics"].explode(["steps", "values", "times"])
    assert run.history["loss", 1].tolist() == points[points["rank"] == 1]["values"].tolist()
    assert list(range(20)) == points[points["rank"] == 0]["steps"].tolist()


def test_a_recorded_message_is_read_as_it_was() -> None:
    steps, values = bytes(array("q", [-3, 2**62, 0])), bytes(array("d", [math.nan, -math.inf, 0.1]))
    times = bytes(array("d", [1.5, 2.0, 2.0]))
    said: list[AnyMessage] = [
        Started(time=1.0, rank=0, pid=4, device="cpu"),
        Met(time=1.0, first_rank=0, num_ranks=2, world_size=4),
        Metrics(time=2.0, rank=1, name='a "löss"\n', steps=steps, values=values, times=times),
        progress(0, 0, 3, None, "epoch"),
        Stopping(time=2.0, rank=0, check=4),
        Paused(time=2.0, rank=1, check=3),
        Unpaused(time=2.5, rank=1),
        Offered(time=2.0, rank=0, name="mode", value="a"),
        Offered(time=2.0, rank=0, name="is_on", value=True),
        Applied(time=2.0, rank=0, name="lr", before=None, value=0.1, step=3),
        Applied(time=2.0, rank=0, name="steps", before=3, value=2**53, step=4),
        Paced(time=2.0, rank=0, num_steps=9, step=0.1, data=0.0, wait=None, samples=3.5, memory=1 << 30),
        Saved(time=2.0, rank=0, path="/a/\udc80", step=3, epoch=0),
        Resumed(time=2.0, rank=0, path="/a b/ü", step=3, epoch=0),
        replace(raised(1), exception=None),
        Exited(time=3.0, rank=1, exitcode=-9, ended_by_us=False, memory=None, oom_kills=2),
        Stack(time=3.0, rank=0, text="File …"),
        Lost(time=3.0, node_rank=1, rank=2, text="gone", is_echo=True),
        Asked(time=3.0, how="stop"),
        Steered(time=3.0, how="pause"),
        Halted(time=3.0, rank=0, halted=True),
        Hung(time=3.0, silence=12.5),
        Woke(time=3.0),
        Noted(time=3.0, text="a note"),
        Phase(time=3.0, rank=0, phase="threads"),
        Returned(time=3.0, rank=0, value=b""),
        Ended(time=4.0, problem=None),
    ]

    assert {*get_args(AnyMessage)} - {Output, Recalled, Interrupted} == {type(each) for each in said}
    assert said == read([line for message in said for line in journal.lines(message, 0.5)], 0.5)


def read(lines: Sequence[str], started: float = 0.0) -> list[AnyMessage]:
    path = Path(f"/tmp/ddpnb-test-journal-{os.getpid()}")
    path.write_bytes(folder.encoded("".join(lines)))
    try:
        return list(journal.Reader(path, started))
    finally:
        path.unlink()


def test_many_points_are_cut_into_lines_and_come_back_as_one() -> None:
    steps, values = array("q", range(10_000)), array("d", range(10_000))
    whole = Recalled(rank=0, time=0.0, name="loss", steps=bytes(steps), values=bytes(values), times=bytes(values))

    lines = list(journal.lines(whole, 0.0))

    assert 3 == len(lines)
    assert [whole, replace(whole, rank=1)] == read([*lines, *journal.lines(replace(whole, rank=1), 0.0)])


HOSTILE = [
    "nothing",
    "[]",
    "null",
    '{"kind": "Popen", "time": 1}',
    '{"kind": "Started", "time": 1, "rank": true, "pid": 4, "device": "cpu"}',
    '{"kind": "Started", "time": NaN, "rank": 0, "pid": 4, "device": "cpu"}',
    '{"kind": "Started", "time": 1e999, "rank": 0, "pid": 4, "device": "cpu"}',
    '{"kind": "Asked", "time": 1, "how": "rm -rf"}',
    '{"kind": "Exited", "time": 1, "rank": -1, "exitcode": 0, "ended_by_us": false, "memory": null, "oom_kills": null}',
    '{"kind": "Output", "time": 1, "rank": 7, "text": "no such rank"}',
    '{"kind": "Metrics", "time": 1, "rank": 0, "name": "loss", "steps": [1], "values": [1, 2], "times": [1]}',
    '{"kind": "Metrics", "time": 1, "rank": 0, "name": "loss", "steps": [1.5], "values": [1], "times": [1]}',
    '{"kind": "Metrics", "time": 1, "rank": 0, "name": "loss", "steps": [1e300], "values": [1], "times": [1]}',
    "[" * 100_000,
]


def test_a_hostile_journal_is_skipped_line_by_line_counted_and_said_once(tmp_path: Path) -> None:
    run = ended(tmp_path)
    good = [line for message in [metrics(0, "loss", [0.5]), *finished(2)] for line in journal.lines(message, 0.0)]
    (run / "journal.jsonl").write_text("\n".join(HOSTILE) + "\n" + "".join(good) + '{"kind": "Metr')

    opened = ddpnb.open_run(run)

    assert (
        f"{len(HOSTILE)} lines of {run}/journal.jsonl skipped: damaged, or of another version",
    ) == opened.state.notes
    assert ([0.5], "finished") == (opened.history["loss"].tolist(), opened.state.status)


def test_a_full_disk_is_said_once_and_the_run_goes_on(tmp_path: Path) -> None:
    run = ddpnb.Launcher(nproc_per_node=1, view=False, run_dir=tmp_path / "runs")(flood, tmp_path / "go")
    until(run, is_waiting)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))  # a write that goes beyond it fails, as on a full disk
    try:
        (tmp_path / "go").touch()
        value = run.result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    opened = ddpnb.open_run(tmp_path / "runs")
    assert (1, 500) == (value, len(run.history["loss"]))
    assert 0 < len(opened.history["loss"]) < 500
    assert (f"{run.dir} cannot be written: File too large. The run goes on, its record has gaps",) == run.state.notes
    assert "interrupted" == opened.state.status  # its last words are missing, and nobody is left


def flood(go: Path) -> int:
    wait_for(go)
    for step in range(2, 500):
        ddpnb.log(loss=1.0)
        if step % 100 == 0:
            session = current_session()
            assert session is not None
            session.flush()
    return 1


def test_a_folder_that_vanishes_is_said_once_and_the_run_goes_on(tmp_path: Path) -> None:
    run = ddpnb.Launcher(nproc_per_node=1, view=False, run_dir=tmp_path / "runs")(wait_for, tmp_path / "go")
    until(run, is_waiting)
    assert run.dir is not None
    run.dir.rename(tmp_path / "moved")
    for path in sorted((tmp_path / "moved").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "go").touch()

    assert 1 == run.result()
    assert [2.0] == run.history["loss"].tolist()[1:]
    (note,) = run.state.notes
    assert note.startswith(f"{run.dir} cannot be written: ")


def test_a_disk_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_PATIENCE", 0.2)
    home = made(tmp_path)
    os.mkfifo(home.path / "journal.jsonl")  # opening it waits for a reader

    said = written(home.path, [output(0, "x" * 1000)] * 1000)

    assert 1 == len(said)
    assert isinstance(said[0], Noted)
    assert "could not be written within" in said[0].text
    reader = os.open(home.path / "journal.jsonl", os.O_RDONLY)
    wait_until(lambda: not recording_threads(), what="the end of the recorder")
    os.close(reader)
    home.release()


def recording_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ddpnb-record")]


def test_output_is_kept_up_to_a_limit_and_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "OUTPUT_LIMIT", 10)
    run = ended(tmp_path)

    written(run, [output(0, "123456"), output(1, "ä\n"), output(0, "7890123"), output(0, "456")])

    kept = "1234567890\n[the rest is not kept: more than 10 characters]\n"
    assert (kept, "ä\n") == tuple((run / "output" / f"rank-{rank}.txt").read_text() for rank in (0, 1))


def test_after_the_end_all_is_written_the_thread_is_gone_and_the_lock_is_free(tmp_path: Path) -> None:
    run = ddpnb.Launcher(nproc_per_node=1, view=False, run_dir=tmp_path)(train)
    run.result()

    assert run.dir is not None
    assert "Ended" in (run.dir / "journal.jsonl").read_text().splitlines()[-1]
    assert ([], None) == (recording_threads(), lock.holder(run.dir))


# ---- its name and its place


def test_launches_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        homes = list(threads.map(lambda _: made(tmp_path), range(24)))
    for home in homes:
        home.release()

    assert 24 == len({home.path for home in homes}) == len(list(tmp_path.iterdir()))


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("a/../../b c", "a-..-..-b-c"),
        ("<lambda>", "lambda"),
        ("..", "run"),
        ("模型" * 150, "模型" * 20),
        ('<img src=x onerror="alert(1)">\0\n', "img-src-x-onerror-alert-1"),
    ],
)
def test_any_name_makes_a_folder(tmp_path: Path, name: str, safe: str) -> None:
    home = made(tmp_path / "runs", name)
    home.release()

    assert (tmp_path / "runs", safe) == (home.path.parent, home.path.name.partition("_")[2].partition("_")[2])
    assert name == ddpnb.open_run(home.path).name


def test_a_relative_run_dir_is_meant_where_the_launch_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = ddpnb.Launcher(nproc_per_node=1, view=False, run_dir="runs")(wait_for, tmp_path / "go")
    monkeypatch.chdir("/")
    (tmp_path / "go").touch()
    run.result()

    assert run.dir is not None
    assert tmp_path / "runs" == run.dir.parent
    assert 2 == len(ddpnb.open_run(tmp_path / "runs").history["loss"])


@pytest.mark.parametrize(
    ("place", "words"),
    [("file", "File exists"), ("file/runs", "Not a directory"), ("/sys/runs", "run_dir='/sys/runs': no folder can be")],
)
def test_a_place_where_no_folder_can_be_made_is_a_launch_error(tmp_path: Path, place: str, words: str) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ddpnb.LaunchError, match=words):
        ddpnb.launch(train, run_dir=tmp_path / place, view=False)


def test_a_run_s_own_folder_is_no_run_dir(tmp_path: Path) -> None:
    run = ended(tmp_path)

    with pytest.raises(ValueError, match="is the folder of one run: pass the one around it"):
        ddpnb.launch(train, run_dir=run, view=False)


def test_a_launch_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ddpnb.LaunchError):
        ddpnb.launch(train, run_dir=tmp_path, nnodes=2, master_addr="192.0.2.1", nproc_per_node=1, view=False)
    with pytest.raises(ddpnb.UnpicklableError):
        ddpnb.launch(train, threading.Lock(), run_dir=tmp_path, nproc_per_node=1, view=False)

    assert [] == list(tmp_path.iterdir())


# ---- what is read


def test_an_opened_run_shows_what_the_run_did(tmp_path: Path) -> None:
    run = ddpnb.Launcher(nproc_per_node=2, view=False, run_dir=tmp_path)(train)
    run.results()

    opened = ddpnb.open_run(tmp_path)

    assert (run.dir, run.name, repr(run), "finished") == (opened.dir, opened.name, repr(opened), opened.state.status)
    for rank in (None, 0, 1):
        key = "loss" if rank is None else ("loss", rank)
        assert run.history[key].tobytes() == opened.history[key].tobytes()
    assert run.output() == opened.output()
    assert run.to_pandas()["seconds"].tolist() == pytest.approx(opened.to_pandas()["seconds"].tolist(), abs=1e-5)
    assert b"\x89PNG" == opened._repr_mimebundle_()[0]["image/png"][:4]
    assert (True, True, False) == (opened.done(), opened.wait(), opened.running())
    assert [] == [thread for thread in threading.enumerate() if thread.name.startswith("ddpnb")]


def test_an_opened_run_has_no_value_and_nobody_to_ask(tmp_path: Path) -> None:
    opened = ddpnb.open_run(ended(tmp_path))

    with pytest.raises(RuntimeError, match=r"returned values are not kept there\. Its model is in its checkpoints"):
        opened.result()
    for ask in (opened.stop, opened.kill, opened.save):
        with pytest.raises(RuntimeError, match="was opened from its folder, it is not this kernel's run"):
            ask()


def test_an_opened_run_that_finished_failed_with_nothing(tmp_path: Path) -> None:
    run = ended(tmp_path)
    written(run, [Returned(time=1.0, rank=rank, value=b"") for rank in (0, 1)])

    opened = ddpnb.open_run(run)

    assert ("finished", None) == (opened.state.status, opened.exception())
    with pytest.raises(RuntimeError, match="returned values are not kept there"):
        opened.result()


def test_an_opened_run_that_failed_says_who_is_to_blame(tmp_path: Path) -> None:
    run = ended(tmp_path)
    written(run, [*(Started(time=0.0, rank=rank, pid=1, device="cpu") for rank in (0, 1)), raised(1, "bad shape")])

    with pytest.raises(ddpnb.WorkerError, match="rank 1 raised ValueError: bad shape"):
        ddpnb.open_run(run).result()


def test_open_run_takes_the_newest_of_a_run_dir(tmp_path: Path) -> None:
    runs = [ended(tmp_path) for _ in range(12)]

    assert runs[-1] == ddpnb.open_run(tmp_path).dir
    assert runs[3] == ddpnb.open_run(runs[3]).dir


def test_what_is_no_run_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        ddpnb.open_run(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"is no run's folder, and there is none in it: no run\.json"):
        ddpnb.open_run(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, r"was written by another ddpnb \(format 2, this one reads 1\): upgrade"),
        ({"ranks": [0, 10**9]}, "is damaged"),
        ({"ranks": "ab"}, "is damaged"),
        ({"started": "yesterday"}, "is damaged"),
        ({"cells": []}, "is damaged"),
        ({"world_size": 10**12}, "opens"),
        (None, "is damaged"),
    ],
)
def test_a_damaged_or_newer_description_is_named(tmp_path: Path, change: Any, words: str) -> None:
    run = ended(tmp_path)
    text = (run / "run.json").read_text()
    (run / "run.json").write_text(json.dumps(json.loads(text) | change) if change is not None else text[:50])

    with pytest.raises(ValueError, match=words if words != "opens" else "is damaged"):
        ddpnb.open_run(run)


def test_the_kernel_is_killed_and_the_curve_is_there(tmp_path: Path) -> None:
    code = f"""
        from tests.test_folder import *
        run = ddpnb.launch(wait_for, Path({os.fspath(tmp_path / "never")!r}), run_dir={os.fspath(tmp_path)!r},
                           nproc_per_node=2, view=False)
        until(run, lambda run: is_waiting(run) and len(run.history) and len(run.history["loss"]))
        if not os.fork():  # what a kernel forks, a DataLoader's worker say, does not hold its lock
            time.sleep(600)
        print(*(rank.pid for rank in run.state.ranks), flush=True)
        run.result()
    """
    command = [sys.executable, "-c", "\n".join(line[8:] for line in code.splitlines())]
    kernel = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": OURS}, cwd=OURS, stdout=subprocess.PIPE, text=True
    )
    assert kernel.stdout is not None
    workers = [int(word) for word in kernel.stdout.readline().split()]
    forked = children(kernel.pid)
    going_on = ddpnb.open_run(tmp_path)
    with pytest.raises(ddpnb.LaunchError, match=rf"is still being trained by pid {kernel.pid} on .*: stop it first"):
        ddpnb.launch(train, run_dir=tmp_path, resume=True, view=False)

    kernel.send_signal(signal.SIGKILL)
    kernel.wait()
    wait_until(lambda: have_ended(processes(workers)), what="the end of the workers")
    wait_until(lambda: lock.holder(going_on.dir or tmp_path) is None, what="the lock's release")
    interrupted = ddpnb.open_run(tmp_path)

    for pid in forked:
        os.kill(pid, signal.SIGKILL)
    assert ("running", False, False) == (going_on.state.status, going_on.done(), going_on.wait())
    assert going_on.state.notes[-1].startswith(f"a snapshot: it goes on in pid {kernel.pid} on ")
    assert ("interrupted", [1.0]) == (interrupted.state.status, interrupted.history["loss"].tolist())
    assert "waiting\n" == interrupted.output(1)
    assert "interrupted: its kernel ended" in draw.text_card(interrupted.state, time.monotonic())


def children(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children() if "-c" in child.cmdline()]


def processes(pids: Sequence[int]) -> list[Any]:
    import psutil

    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


# ---- what may be resumed from


def test_candidates_are_newest_first(tmp_path: Path) -> None:
    older, newer = ended(tmp_path, 3, 20), ended(tmp_path, 7)
    (newer / "checkpoints" / ".draft-step-00000099").mkdir()

    assert [("step-00000007"), "step-00000020", "step-00000003"] == [
        path.name for path in candidates.find(tmp_path, True)
    ]
    assert ["step-00000020", "step-00000003"] == [path.name for path in candidates.find(tmp_path, older)]
    chosen = older / "checkpoints" / "step-00000003"
    assert [chosen] == candidates.find(tmp_path, chosen)


def test_a_run_started_again_by_torchrun_goes_on_from_its_own(tmp_path: Path) -> None:
    first, again = ended(tmp_path, 3), ended(tmp_path, 7)
    given = first / "checkpoints" / "step-00000003"

    assert ["step-00000007", "step-00000003"] == [
        path.name for path in candidates.find(tmp_path, given, is_restart=True)
    ]
    assert [again / "checkpoints" / "step-00000007", given] == candidates.find(tmp_path, False, is_restart=True)


def test_workers_are_told_the_folder_the_candidates_and_the_arguments(tmp_path: Path) -> None:
    earlier = ended(tmp_path, 4)
    run = ddpnb.Launcher(nproc_per_node=2, view=False, resume=earlier)(told)

    assert [(str(run.dir), (str(earlier / "checkpoints" / "step-00000004"),), "{}")] * 2 == list(run.results().values())
    assert run.dir is not None
    assert tmp_path == run.dir.parent  # beside the run that it goes on from


def test_in_place_the_function_is_told_the_same(tmp_path: Path) -> None:
    earlier = ended(tmp_path, 4)
    run = ddpnb.launch(told, run_dir=tmp_path, resume=True, nproc_per_node=0, view=False)

    assert (str(run.dir), (str(earlier / "checkpoints" / "step-00000004"),), "{}") == run.result()
    assert run.dir is not None
    assert ("finished", None) == (ddpnb.open_run(run.dir).state.status, lock.holder(run.dir))


def test_nothing_to_resume_from_is_a_fresh_start_and_is_said(tmp_path: Path) -> None:
    run = ddpnb.launch(told, run_dir=tmp_path / "new", resume=True, nproc_per_node=1, view=False)

    assert () == run.result()[1]
    assert (f"nothing to resume from in {tmp_path / 'new'}: a fresh start",) == run.state.notes
    assert run.state.notes == ddpnb.open_run(tmp_path / "new").state.notes


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"resume": True}, ValueError, "resume=True goes on from the newest run in run_dir, and there is none"),
        ({"resume": "nowhere"}, FileNotFoundError, "nowhere' does not exist"),
        ({"resume": "nowhere", "run_dir": "runs"}, FileNotFoundError, "nowhere' does not exist"),
        ({"resume": "plain"}, ValueError, "'plain' is not in a run's folder: say where the new run goes"),
        ({"resume": "plain", "run_dir": "runs"}, ValueError, "'plain' is neither a checkpoint nor a run's folder"),
        ({"resume": "empty"}, FileNotFoundError, "'empty': that run has no checkpoint"),
        ({"resume": 1, "run_dir": "runs"}, TypeError, "resume=1 is not a path: it is a bool, or a path"),
        ({"resume": "", "run_dir": "runs"}, ValueError, "resume='' cannot be a path"),
        ({"run_dir": b"runs"}, TypeError, "run_dir=b'runs' is not a path"),
        ({"run_dir": True}, TypeError, "run_dir=True is not a path"),
        ({"run_dir": "a\0b"}, ValueError, "cannot be a path"),
    ],
)
def test_what_cannot_be_resumed_is_named_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").mkdir()
    ended(tmp_path / "some").rename(tmp_path / "empty")

    with pytest.raises(error, match=words):
        ddpnb.launch(train, nproc_per_node=1, view=False, **options)
    assert not (tmp_path / "runs").exists()


def test_a_run_of_this_kernel_that_goes_on_is_not_resumed(tmp_path: Path) -> None:
    run = ddpnb.Launcher(nproc_per_node=1, view=False, run_dir=tmp_path)(wait_for, tmp_path / "go")

    with pytest.raises(ddpnb.LaunchError, match=rf"is still being trained by this kernel \(pid {os.getpid()}\)"):
        ddpnb.launch(train, run_dir=tmp_path, resume=True, view=False)
    (tmp_path / "go").touch()
    run.result()


def hold(path: Path, pipe: Any) -> None:
    """Hold a lock, as workers do whose kernel is gone, until told to end."""
    descriptor = os.open(path, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    pipe.send("held")
    pipe.recv()


@pytest.fixture
def orphans(tmp_path: Path) -> Iterator[tuple[Path, Any]]:
    """A run whose kernel is gone while somebody still writes, and what ends that one."""
    run = ended(tmp_path, 5)
    holder = json.loads((run / "lock").read_text())
    (run / "lock").write_text(json.dumps(holder | {"started": holder["started"] - 100}))
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(run / "lock", theirs))
    process.start()
    assert "held" == ours.recv()
    yield run, ours
    process.kill()
    process.join()


def test_workers_that_are_still_saving_are_waited_for(orphans: tuple[Path, Any]) -> None:
    run, process = orphans
    ender = threading.Timer(0.3, process.send, ["end"])
    ender.start()

    found = candidates.find(run.parent, True)

    ender.join()
    assert ["step-00000005"] == [path.name for path in found]


def test_workers_that_never_end_are_named(orphans: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = orphans
    monkeypatch.setattr(candidates, "_ORPHANS_PATIENCE", 0.1)

    with pytest.raises(
        ddpnb.LaunchError, match=r"its kernel \(pid \d+ on .*\) is gone, and its workers have been saving"
    ):
        candidates.find(run.parent, True)
    assert "its kernel is gone, its workers are still saving" in ddpnb.open_run(run).state.notes


# ---- the curve goes on


def test_the_curve_goes_on_where_it_was(tmp_path: Path) -> None:
    two_there = ddpnb.Launcher(nproc_per_node=2, view=False, run_dir=tmp_path)
    first = two_there(save_on_rank_zero, 5)
    first.results()
    second = ddpnb.Launcher(nproc_per_node=2, view=False, run_dir=tmp_path, resume=True)(resume_on_all, 3)
    second.results()

    whole = [1 / step for step in range(1, 9)]
    assert list(range(9)) == second.history.steps("loss", 0).tolist()
    assert [*whole, 99.0] == second.history["loss", 0].tolist()
    assert [*(value + 1 for value in whole), 99.0] == second.history["loss", 1].tolist()
    times = second.state.history["loss"][0].columns()[2]
    assert sorted(times) == list(times)
    assert second.state.started == pytest.approx(max(times[4], second.state.history["loss"][1].columns()[2][4]))
    assert second.state.resumed is not None
    assert second.state.saved is not None
    assert (5, 8) == (second.state.resumed.step, second.state.saved.step)

    opened = ddpnb.open_run(second.dir or tmp_path)  # it is complete by itself
    assert second.history["loss", 1].tobytes() == opened.history["loss", 1].tobytes()
    assert second.state.resumed.path == folder.describe(second.dir or tmp_path)["resumed_from"]


def save_on_rank_zero(steps: int) -> None:
    _on_ranks(lambda: save(steps), steps)


def resume_on_all(steps: int) -> None:
    _on_ranks(lambda: resume(steps), steps)


def _on_ranks(of_rank_zero: Callable[[], object], steps: int) -> None:
    """Rank 0 saves and resumes; the others log the same steps and no more."""
    session = current_session()
    assert session is not None
    if ddpnb.is_rank_zero():
        of_rank_zero()
        return
    first = int(session.candidates[0].name.removeprefix("step-")) + 1 if session.candidates else 1
    for step in range(first, first + steps):
        ddpnb.log({"loss": 1 / step + ddpnb.rank()}, step=step - 1)
    ddpnb.log({"loss": 99.0}, step=first + steps - 1)


def test_a_missing_journal_of_the_earlier_run_is_a_note(tmp_path: Path) -> None:
    earlier = ended(tmp_path, 4)
    run = ddpnb.launch(resume, 2, run_dir=tmp_path, resume=earlier, nproc_per_node=1, view=False)
    run.result()

    assert [4, 5, 6] == run.history.steps("loss").tolist()
    path = earlier / "journal.jsonl"
    assert (f"the curve begins here: {path} cannot be read: No such file or directory",) == run.state.notes
    assert run.state.notes == ddpnb.open_run(run.dir or tmp_path).state.notes


def test_other_ranks_than_before_go_on_from_the_mean_of_those_that_there_were() -> None:
    began: list[AnyMessage] = [Started(time=0.0, rank=rank, pid=1, device="cpu") for rank in range(4)]
    logged = [metrics(rank, "loss", [rank, rank + 1, 7]) for rank in range(4)]

    found = list(recorder.recalled([*began, *logged, metrics(0, "accuracy", [0.5])], 1, range(2), 100.0))

    values = {(each.name, each.rank): array("d", each.values).tolist() for each in found}
    assert {("loss", 0): [1.5, 2.5], ("loss", 1): [1.5, 2.5], ("accuracy", 0): [0.5]} == values
    assert [99.99, 100.0] == pytest.approx(array("d", found[0].times).tolist())


def test_what_is_recalled_comes_before_what_was_logged_meanwhile() -> None:
    state = folded(1, [metrics(0, "loss", [3.0], first_step=3)])
    times = array("d", [-1.0, 0.0])
    early = Recalled(
        rank=0,
        time=0.0,
        name="loss",
        steps=bytes(array("q", [1, 2])),
        values=bytes(array("d", [1, 2])),
        times=bytes(times),
    )

    state = fold(state, early)
    state = fold(state, metrics(0, "loss", [4.0], first_step=4))

    assert ([1, 2, 3, 4], [1, 2, 3, 4]) == tuple(column.tolist() for column in state.history["loss"][0].columns()[:2])


# ---- asking, and being shown


def test_save_asks_the_ranks(tmp_path: Path) -> None:
    run = ddpnb.Launcher(nproc_per_node=2, view=False, run_dir=tmp_path)(count_saves, tmp_path)
    until(run, lambda run: all("waiting" in text for text in run.output().values()))

    run.save()

    assert {0: 1, 1: 1} == run.results()
    with pytest.raises(RuntimeError, match="count_saves has finished: nothing is left to save"):
        run.save()


def test_save_without_a_folder_says_what_to_write(tmp_path: Path) -> None:
    run = alone(train)
    in_place = ddpnb.launch(train, run_dir=tmp_path, nproc_per_node=0, view=False)

    with pytest.raises(ValueError, match=r"has no folder to save in: launch\(…, run_dir='runs/digits'\)"):
        run.save()
    with pytest.raises(RuntimeError, match="runs in the kernel itself"):
        in_place.save()
    run.result()
    assert None is run.dir


def test_a_stop_without_a_folder_says_that_nothing_was_saved(tmp_path: Path) -> None:
    notes = []
    for launcher in (alone, ddpnb.Launcher(nproc_per_node=1, view=False, run_dir=tmp_path)):
        run = launcher(ask_until_stopped)
        until(run, lambda run: "loss" in run.history)
        run.stop()
        run.result()
        notes.append(run.state.notes)

    assert [("nothing was saved: no run_dir",), ()] == notes


def test_views_say_where_a_run_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    home = f"{tmp_path}/runs/<b>1</b>"
    state = replace(folded(1), folder=home)
    saved = Saved(time=1.0, rank=0, path=f"{home}/checkpoints/step-00000120", step=120, epoch=1)
    resumed = Resumed(time=0.0, rank=0, path="/elsewhere/step-00000096", step=96, epoch=0)

    begun, later = draw.text_card(state, 1.0), draw.text_card(fold(fold(state, resumed), saved), 1.0)

    assert "\nfolder runs/<b>1</b>" in begun
    assert "\nresumed from step 96 · saved at step 120 in runs/<b>1</b>/checkpoints/step-00000120" in later
    page = draw.card(fold(fold(state, resumed), saved), 1.0)
    assert "saved at step 120 in runs/&lt;b&gt;1&lt;/b&gt;/checkpoints/step-00000120" in page
    assert "<b>1</b>" not in page


# ---- arguments


def test_arguments_are_told_by_name_as_json_where_they_are() -> None:
    class Net:
        pass

    class Angry:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    def function(a: int, *rest: int, net: object = None, b: float = 0.1, **more: object) -> None: ...

    told = json.loads(folder.arguments_of(function, (1, 2, 3), {"net": Net(), "c": "x", "d": [1] * 10_000}))

    assert {"a": 1, "rest": [2, 3], "b": 0.1} == {name: told[name] for name in ("a", "rest", "b")}
    assert told["net"].endswith("Net object>")
    assert told["more"].startswith("{'c': 'x', 'd': [1, 1,")
    assert "Angry instance" in json.loads(folder.arguments_of(function, (Angry(),), {}))["a"]


# ---- torchrun


def test_under_torchrun_the_environment_stands_in_for_what_was_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    place = World(world_size=1, local_world_size=1)

    def settled(run_dir: str | None = None, resume: bool | str = False, **environment: str) -> tuple[object, object]:
        for name in ("RUN_DIR", "RESUME"):
            monkeypatch.setenv(f"DDPNB_{name}", environment.get(name, ""))
        options = settled_by_torchrun(Options(run_dir=run_dir, resume=resume), place)
        return options.run_dir, options.resume

    assert (None, False) == settled()
    assert ("runs", True) == settled(RUN_DIR="runs", RESUME="1")
    assert ("own", False) == settled("own", RUN_DIR="runs", RESUME="0")
    assert ("own", "a/b") == settled("own", RESUME="a/b")
    assert ("own", True) == settled("own", True, RESUME="0")
