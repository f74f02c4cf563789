"""The same function under torchrun, alone, and launched: the real torchrun, and what its variables say."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpnb
from ddpnb.train.membership import join
from ddpnb.world import World, is_under_torchrun

from .conftest import DEADLINE, Kernel, have_ended, wait_until
from .ranks import on_ranks, refused

OURS = str(Path(__file__).parents[1])


def train(steps: int = 5) -> list[float]:
    """Weights of a DDP model in fp64 after some steps, each rank on its own rows of one batch."""
    world = join()
    torch.manual_seed(0)
    inputs, targets = torch.randn(12, 3, dtype=torch.float64), torch.randn(12, 1, dtype=torch.float64)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        rows = slice(world.rank, None, world.world_size)
        nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def places() -> tuple[int, ...]:
    return (ddpnb.rank(), ddpnb.local_rank(), ddpnb.world_size(), ddpnb.local_world_size(), ddpnb.node_rank())


HEAD = f"""
import json, os, torch, ddpnb
import torch.distributed as dist
from torch import nn
from ddpnb.train.membership import join

{inspect.getsource(train)}
{inspect.getsource(places)}
def say(value):
    os.write(1, (json.dumps(value) + "\\n").encode())  # in one piece: ranks share the pipe
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(HEAD + text)
    return path


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": OURS, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def torchrun(path: Path, nproc_per_node: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc_per_node}"]
    return subprocess.run([*command, path], env=environment(), capture_output=True, text=True, timeout=DEADLINE)


def python(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, path], env=environment(), capture_output=True, text=True, timeout=DEADLINE)


def printed(done: subprocess.CompletedProcess[str]) -> list[Any]:
    """The lines of JSON that the ranks printed, in any order."""
    assert 0 == done.returncode, done.stderr
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=str)


# ---- the same values everywhere


def test_torchrun_a_script_and_a_launch_train_to_the_same_bits(tmp_path: Path) -> None:
    launches = "say(ddpnb.launch(train, nproc_per_node=2, threads_per_worker=1).result())"
    launched = on_ranks(2, train)

    under_torchrun = printed(torchrun(script(tmp_path, launches + "\nsay(train())")))
    alone = printed(python(script(tmp_path, launches)))

    assert launched[0] == launched[1]
    assert 2 * launched == under_torchrun
    assert [launched[0]] == alone


def test_one_process_without_a_launch_trains_as_a_world_of_one(tmp_path: Path) -> None:
    (expected,) = on_ranks(1, train)

    done = python(script(tmp_path, "say(train())"))

    assert [expected] == printed(done)
    assert "" == done.stderr


# ---- in place


def test_each_rank_gets_its_own_value_and_rank_zero_speaks_for_all(tmp_path: Path) -> None:
    text = """
def work():
    for step in ddpnb.progress(range(4), "step"):
        ddpnb.log(loss=step)
    dist.init_process_group("gloo")
    return places()

for nproc_per_node in (5, 2):
    run = ddpnb.launch(work, nproc_per_node=nproc_per_node, start_method="spawn")
    say([run.result(), run.results(), run.done(), run.world_size, places(), len(run.history["loss"])])
"""
    done = torchrun(script(tmp_path, text))

    place = {rank: [rank, rank, 2, 2, 0] for rank in range(2)}
    expected = [[place[rank], {str(rank): place[rank]}, True, 2, place[rank], 4] for rank in (0, 0, 1, 1)]
    lines = [line for line in done.stdout.splitlines() if not line.startswith("ddpnb: the process group is there")]
    assert expected == sorted(map(json.loads, lines))
    ignored = "torchrun has started this process; without effect in launch: "
    assert [f"{ignored}nproc_per_node=5, start_method='spawn'", f"{ignored}start_method='spawn'"] == [
        line.partition("UserWarning: ")[2] for line in done.stderr.splitlines() if "UserWarning" in line
    ]
    ends = [line for line in done.stderr.splitlines() if line.startswith("work: finished · step 4/4")]
    assert 2 == len(ends)


def test_an_exception_passes_through_and_torchrun_sees_it(tmp_path: Path) -> None:
    text = """
def fail():
    if ddpnb.rank() == 1:
        raise ValueError("a bad batch")
    dist.barrier()

try:
    ddpnb.launch(fail)
finally:
    say([ddpnb.rank(), dist.is_initialized()])
"""
    done = torchrun(script(tmp_path, text))

    assert 1 == done.returncode
    assert "ValueError: a bad batch" in done.stderr
    assert "ChildFailedError" in done.stderr
    assert "[1, false]" in done.stdout


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    text = """
def wait():
    dist.barrier()
    say("here")
    while True:
        dist.all_reduce(torch.ones(1))

ddpnb.launch(wait)
"""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = script(tmp_path, text)
    process = subprocess.Popen(
        [*command, path], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert b'"here"\n' == process.stdout.readline()
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, said = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()

    assert process.returncode
    assert family
    wait_until(lambda: have_ended(family), what="the end of all ranks")
    assert b"wait: failed on rank 0" in said, said


def test_options_hold_in_place_and_a_launch_within_a_launch_is_refused(tmp_path: Path) -> None:
    text = """
def work():
    return os.environ["WORD"], torch.get_num_threads(), dist.is_initialized(), os.environ["TORCHELASTIC_RUN_ID"]

run = ddpnb.launch(work, env={"WORD": "here"}, threads_per_worker=3, backend=None, name="mine")
say([run.result()[:3], run.result()[3] != "ddpnb", "WORD" in os.environ, run.name])
ddpnb.launch(lambda: ddpnb.launch(places))
"""
    done = torchrun(script(tmp_path, text), nproc_per_node=1)

    assert '[["here", 3, false], true, false, "mine"]' == done.stdout.strip()
    assert "a function that is being launched in place cannot launch another one in place" in done.stderr


# ---- who is under torchrun, and where


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        (TORCHRUN, True),
        (BY_HAND, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, False),
        (World().environment(), False),
    ],
)
def test_the_environment_tells_who_is_under_torchrun(
    variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in World().environment():
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert expected == is_under_torchrun()


def test_ranks_are_torchrun_s_without_any_group(monkeypatch: pytest.MonkeyPatch) -> None:
    place = World(rank=5, local_rank=1, world_size=6, local_world_size=2, node_rank=2, nnodes=3)
    for name, value in (place.environment() | TORCHRUN).items():
        monkeypatch.setenv(name, value)

    assert (5, 1, 6, 2, 2) == places()
    assert not ddpnb.is_rank_zero()


@pytest.mark.parametrize(("gpus", "expected"), [(0, "cpu"), (1, "cpu"), (2, "cuda:1"), (8, "cuda:1")])
def test_a_rank_has_its_own_gpu_where_each_of_the_node_has_one(
    gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name, value in (World(rank=3, local_rank=1, world_size=4, local_world_size=2).environment() | TORCHRUN).items():
        monkeypatch.setenv(name, value)

    assert expected == str(ddpnb.device())


def test_a_group_of_the_user_s_own_tells_the_ranks(tmp_path: Path) -> None:
    text = f"""
import torch.multiprocessing as mp

def work(index):
    dist.init_process_group("gloo", init_method="file://{tmp_path}/meet", rank=index, world_size=2)
    say([*places(), join().rank])
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""
    done = python(script(tmp_path, text))

    assert [[0, 0, 2, 2, 0, 0], [1, 1, 2, 2, 0, 1]] == printed(done)


def test_stray_variables_in_a_kernel_are_ignored_with_one_notice() -> None:
    kernel = Kernel(**BY_HAND)
    try:
        first = kernel.run("import ddpnb; print(ddpnb.rank(), ddpnb.world_size(), ddpnb.rank())")
        run = kernel.run("print(ddpnb.launch(lambda: ddpnb.rank(), nproc_per_node=2, view=False).results())")
    finally:
        kernel.close()

    notice = "ddpnb: a notebook's kernel is no rank of torchrun's"
    assert "0 1 0" == first.text
    assert 1 == (first.stderr + run.stderr).count(notice)
    assert "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in its environment: ignored" in first.stderr
    assert "{0: 0, 1: 1}" == run.text


# ---- joining


def test_a_process_alone_joins_a_group_that_nobody_else_can_reach(tmp_path: Path) -> None:
    text = """
import psutil
del os.environ["GLOO_SOCKET_IFNAME"]
world = join()
again = join()
total = torch.ones(2)
dist.all_reduce(total)
listening = [each.laddr.ip for each in psutil.Process().net_connections() if each.status == "LISTEN"]
say([world == again, world.rank, world.world_size, total.tolist(), set(listening) <= {"127.0.0.1"}])
"""
    done = python(script(tmp_path, text))

    assert [[True, 0, 1, [1.0, 1.0], True]] == printed(done)


def test_a_function_without_a_group_is_told_to_make_one() -> None:
    run = ddpnb.Launcher(nproc_per_node=1, view=False, backend=None)(join)

    with pytest.raises(RuntimeError, match="launched with backend=None"):
        run.result()


def test_a_worker_cannot_launch() -> None:
    said = refused(1, RuntimeError, ddpnb.launch, places)

    assert "this is a ddpnb worker: it cannot launch workers of its own" in said


def test_joining_in_a_launched_function_finds_its_group() -> None:
    assert [(0, 2), (1, 2)] == on_ranks(2, lambda: (join().rank, dist.get_world_size()))
