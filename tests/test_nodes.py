"""Several nodes: two launches in one process for what is decided, two network namespaces for what the network does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
import torch
import torch.distributed as dist

import ddpnb
from ddpnb.autopsy import headline
from ddpnb.messages import Lost, Met
from ddpnb.names import name_of
from ddpnb.state import fold, new_state

from .conftest import DEADLINE, wait_until
from .ranks import on_ranks
from .test_torchrun import HEAD, OURS, places, train

Node = Callable[..., ddpnb.Launcher]


@pytest.fixture
def port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def node(port: int) -> Node:
    """Makes the launcher of one of two nodes, which meet on loopback."""

    def make(node_rank: int, **options: Any) -> ddpnb.Launcher:
        place = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": port, "timeout": 30, "nproc_per_node": 1}
        rest = {"view": False, "threads_per_worker": 1, "node_rank": node_rank}
        return ddpnb.Launcher(**(place | rest | options))

    return make


def workers() -> list[int]:
    return [pid for pid in psutil.pids() if (name_of(pid) or "").startswith(f"ddpnb{os.getpid()}.")]


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    yield
    wait_until(lambda: not workers(), what="the end of all workers")


# ---- where everybody stands


def test_ranks_are_counted_through_nodes_of_different_size(node: Node) -> None:
    def work() -> tuple[Any, ...]:
        total = torch.ones(1) * (ddpnb.rank() + 1)
        dist.all_reduce(total)
        print("rank", ddpnb.rank())
        return (*places(), total.item(), os.environ["GROUP_WORLD_SIZE"], os.environ["GLOO_SOCKET_IFNAME"])

    second = node(1, nproc_per_node=2)(work)  # comes first, and waits
    first = node(0)(work)

    assert {0: (0, 0, 3, 1, 0, 6.0, "2", "lo")} == first.results(DEADLINE)
    assert {1: (1, 0, 3, 2, 1, 6.0, "2", "lo"), 2: (2, 1, 3, 2, 1, 6.0, "2", "lo")} == second.results(DEADLINE)
    assert (0, 1) == (first.result()[0], second.result()[0])
    assert (3, 3) == (first.world_size, second.world_size)
    assert {1: "rank 1\n", 2: "rank 2\n"} == second.output()
    assert "rank 2\n" == second.output(2)
    with pytest.raises(IndexError, match="there is no rank 0 here; ranks here are 1 … 2"):
        second.output(0)


def test_one_node_with_an_address_is_reached_there(port: int) -> None:
    launcher = ddpnb.Launcher(nproc_per_node=1, view=False, master_addr="127.0.0.1", master_port=port)

    run = launcher(lambda: (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))

    assert ("127.0.0.1", port) == run.result(DEADLINE)


def test_when_the_nodes_have_met_the_ranks_get_their_numbers() -> None:
    state = new_state("train", 4, backend="gloo", started=0.0, here=range(2, 4))

    met = fold(state, Met(time=1.0, first_rank=1, num_ranks=2, world_size=3))

    assert [2, 3] == [rank.rank for rank in state.ranks]
    assert ([1, 2], 3) == ([rank.rank for rank in met.ranks], met.world_size)


def test_a_run_on_several_nodes_cannot_be_steered_yet(node: Node) -> None:
    runs = [node(rank)(dist.barrier) for rank in range(2)]
    first, second = runs

    for ask in (first.pause, second.unpause, lambda: first.set(lr=0.1)):
        with pytest.raises(RuntimeError, match="does not reach the other nodes of barrier yet"):
            ask()
    assert [None, None] == [run.exception(DEADLINE) for run in runs]


# ---- failures


def test_a_worker_that_is_killed_on_one_node_is_named_on_both(node: Node) -> None:
    def work() -> None:
        dist.barrier()
        if ddpnb.node_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    runs = [node(rank)(work) for rank in range(2)]
    first, second = (run.exception(DEADLINE) for run in runs)

    assert isinstance(first, ddpnb.WorkerError)
    assert isinstance(second, ddpnb.WorkerError)
    assert (1, 1) == (first.rank, second.rank)
    assert str(first).startswith("failed on node 1: rank 1 was killed by SIGKILL (signal 9)\n")
    assert "rank 0: raised in its wake RuntimeError" in str(first)
    assert str(second).startswith("rank 1 was killed by SIGKILL (signal 9)\n")


def test_an_exception_on_one_node_ends_the_other(node: Node) -> None:
    def work() -> None:
        dist.barrier()
        if ddpnb.node_rank() == 0:
            raise ValueError("a bad batch")
        while True:
            signal.pause()

    runs = [node(rank)(work) for rank in range(2)]
    first, second = (run.exception(DEADLINE) for run in runs)

    assert isinstance(first, ValueError)
    assert str(second).startswith("failed on node 0: rank 0 raised ValueError in test_nodes.py, line ")
    assert "rank 1: stood in" in str(second)


def test_a_node_whose_kernel_is_killed_is_named(node: Node, port: int, tmp_path: Path) -> None:
    def work() -> None:
        dist.barrier()
        while True:
            signal.pause()

    script = tmp_path / "second.py"
    script.write_text(
        HEAD + "import signal\n"
        "def work():\n    dist.barrier()\n    say('here')\n    signal.pause()\n"
        "ddpnb.launch(work, nproc_per_node=1, nnodes=2, node_rank=1, master_addr='127.0.0.1', "
        f"master_port={port}).result()"
    )
    env = os.environ | {"PYTHONPATH": OURS}
    with subprocess.Popen([sys.executable, script], env=env, stderr=subprocess.PIPE) as process:
        run = node(0)(work)
        assert process.stderr is not None
        assert any(b"here" in line for line in process.stderr)
        process.kill()

    error = run.exception(DEADLINE)

    assert isinstance(error, ddpnb.WorkerError)
    assert 1 == error.rank
    assert str(error).startswith("failed on node 1: it has gone without a word: its kernel was ended, or ")


def test_a_loss_that_blames_its_peers_is_an_echo() -> None:
    state = new_state("train", 3, backend="gloo", started=0.0, here=range(1))
    echo = Lost(time=1.0, node_rank=1, rank=1, text="rank 1 raised RuntimeError: closed by peer", is_echo=True)
    cause = Lost(time=2.0, node_rank=2, rank=2, text="rank 2 was killed by SIGKILL (signal 9)", is_echo=False)

    both = fold(fold(state, echo), cause)

    assert "failed on node 1: rank 1 raised RuntimeError: closed by peer" == headline(fold(state, echo))
    assert "failed on node 2: rank 2 was killed by SIGKILL (signal 9)" == headline(both)


# ---- ending


def test_a_stop_on_one_node_ends_the_run_on_both(node: Node) -> None:
    def work() -> None:
        dist.barrier()
        print("here")
        while True:
            signal.pause()

    runs = [node(rank)(work) for rank in range(2)]
    wait_until(lambda: all("here" in "".join(run.output().values()) for run in runs), DEADLINE)
    runs[1].stop()

    for run in runs:
        assert isinstance(run.exception(DEADLINE), ddpnb.RunStopped)


def test_a_loop_that_is_stopped_on_one_node_ends_at_the_same_step_on_both(node: Node) -> None:
    def work() -> tuple[int, int]:
        model = ddpnb.wrap(torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = ddpnb.loader(torch.utils.data.TensorDataset(torch.randn(64, 3)), 2)
        loop = ddpnb.Loop(model, optimizer, loader, epochs=100_000)
        for (inputs,) in loop:
            loop.update(model(inputs).square().mean())
        return loop.step, loop.samples

    runs = [node(rank, nproc_per_node=2)(work) for rank in range(2)]
    wait_until(lambda: all("loss" in run.state.history for run in runs), DEADLINE)
    runs[1].stop()

    ended = [value for run in runs for value in run.results(DEADLINE).values()]
    assert 4 == len(ended)
    assert 1 == len(set(ended))
    assert ended[0][0] > 0


def test_node_zero_keeps_the_store_until_all_have_ended(node: Node) -> None:
    def work() -> bool:
        if ddpnb.rank() == 1:
            for _ in range(20):
                dist.new_group([1])  # needs the store, long after rank 0 has returned
                time.sleep(0.02)
        return True

    runs = [node(rank)(work) for rank in range(2)]

    assert [True, True] == [run.result(DEADLINE) for run in runs]


def test_a_stop_of_node_zero_while_it_waits_ends_those_that_came(node: Node, port: int) -> None:
    with closing(socket.create_server(("127.0.0.1", port))) as node_zero:
        run = node(1)(places)
        connection, _ = node_zero.accept()
        with connection, connection.makefile("rw") as lines:
            assert {"node_rank": 1, "nnodes": 2, "num_ranks": 1, "backend": "gloo"} == json.loads(lines.readline())
            print('{"asked": "stop"}', file=lines, flush=True)

            assert isinstance(run.exception(DEADLINE), ddpnb.RunStopped)


def test_a_stop_while_nodes_are_awaited_ends_at_once_and_frees_the_port(node: Node, port: int) -> None:
    for rank in range(2):
        run = node(rank)(places)
        run.stop()

        assert isinstance(run.exception(10), ddpnb.RunStopped)
    socket.create_server(("127.0.0.1", port)).close()


# ---- meeting


@pytest.mark.parametrize(("here", "missing"), [(0, 1), (1, 0)])
def test_a_node_that_never_comes_is_named(node: Node, port: int, here: int, missing: int) -> None:
    run = node(here, timeout=0.5)(places)

    error = run.exception(DEADLINE)

    assert isinstance(error, ddpnb.LaunchError)
    assert f"node {missing} of 2 did not come to 127.0.0.1:{port} within 0.5 s (timeout=…)" in str(error)


def test_nodes_that_came_are_told_who_did_not(node: Node, port: int) -> None:
    runs = [node(0, nnodes=3, timeout=2)(places), node(1, nnodes=3)(places)]

    for run in runs:
        assert f"node 2 of 3 did not come to 127.0.0.1:{port} within 2 s" in str(run.exception(DEADLINE))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nnodes": 3}, "node 0 was launched with nnodes=2, backend='gloo', node 1 with nnodes=3, backend='gloo'"),
        ({"backend": None}, "node 0 was launched with nnodes=2, backend='gloo', node 1 with nnodes=2, backend=None"),
    ],
)
def test_a_node_that_does_not_fit_is_told_why_and_may_come_again(
    node: Node, options: dict[str, Any], words: str
) -> None:
    first = node(0)(places)

    assert words in str(node(1, **options)(places).exception(DEADLINE))

    second = node(1)(places)
    assert [0, 1] == [first.result(DEADLINE)[0], second.result(DEADLINE)[0]]


def test_two_nodes_of_the_same_number_are_refused(node: Node) -> None:
    runs = [node(0, nnodes=3)(places), node(1, nnodes=3)(places), node(1, nnodes=3)(places)]
    refusal = "there is a node 1 already; each has a node_rank of its own, 0 … 2"

    wait_until(lambda: any(run.done() for run in runs[1:]), DEADLINE)
    (refused,) = (run for run in runs[1:] if run.done())
    (kept,) = (run for run in runs[1:] if not run.done())
    last = node(2, nnodes=3)(places)

    assert refusal in str(refused.exception())
    assert [0, 1, 2] == [run.result(DEADLINE)[0] for run in (runs[0], kept, last)]


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"{}\n", b'{"node_rank": "1"}\n', b"[" * 70_000])
def test_a_stranger_at_the_port_does_no_harm(node: Node, port: int, said: bytes) -> None:
    first = node(0)(places)
    with closing(socket.create_connection(("127.0.0.1", port), 10)) as stranger:
        stranger.sendall(said)
        second = node(1)(places)

        # It is still connected.
        assert [0, 1] == [first.result(DEADLINE)[0], second.result(DEADLINE)[0]]


def test_a_port_that_is_in_use_is_an_error_at_once(node: Node, port: int) -> None:
    words = f"node 0 cannot listen on 127.0.0.1:{port}: something listens there already; choose another master_port"
    with (
        closing(socket.create_server(("127.0.0.1", port))),
        pytest.raises(ddpnb.LaunchError, match=words),
    ):
        node(0)(places)


def test_a_name_that_leads_to_its_own_machine_alone_is_refused(node: Node) -> None:
    try:
        if not socket.gethostbyname(socket.gethostname()).startswith("127."):
            pytest.skip("this machine's own name does not lead to loopback")
    except socket.gaierror:
        pytest.skip("this machine's own name leads nowhere")
    with pytest.raises(ddpnb.LaunchError, match=r"is 127\.0\..* on node 0 itself, which no other node reaches"):
        node(0, master_addr=socket.gethostname())(places)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("192.0.2.1", "it is no address of this machine, and node 0 has to be the one that has it"),
        ("no-such-host.invalid", "master_addr='no-such-host.invalid' is no address that is known here"),
    ],
)
def test_an_address_that_node_zero_does_not_have_is_an_error_at_once(node: Node, address: str, words: str) -> None:
    with pytest.raises(ddpnb.LaunchError, match=words):
        node(0, master_addr=address)(places)


# ---- two hosts


@dataclass
class Hosts:
    """Two network namespaces with a cable between them."""

    names: tuple[str, str]
    interfaces: tuple[str, str]
    addresses = ("10.77.0.1", "10.77.0.2")

    def start(self, node_rank: int, *command: str | Path, **variables: str) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
        env |= {"PYTHONPATH": OURS, "OMP_NUM_THREADS": "1"} | variables
        inside = ["ip", "netns", "exec", self.names[node_rank], sys.executable, *map(str, command)]
        return subprocess.Popen(inside, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def pull_cable(self) -> None:
        ip("-n", self.names[1], "link", "set", self.interfaces[1], "down")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and iproute2 for network namespaces")
    unique = uuid4().hex[:8]
    made = Hosts((f"{unique}-0", f"{unique}-1"), (f"v0{unique}", f"v1{unique}"))
    try:
        try:
            for name in made.names:
                ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr}")
        (a, b), (va, vb) = made.names, made.interfaces
        ip("link", "add", va, "netns", a, "type", "veth", "peer", "name", vb, "netns", b)
        for name, interface, address in zip(made.names, made.interfaces, made.addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
            ip("-n", name, "link", "set", interface, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield made
        wait_until(lambda: not [*processes_in(a), *processes_in(b)], what="the end of all processes on both hosts")
    finally:
        for name in made.names:
            for pid in processes_in(name):
                os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def processes_in(name: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    return list(map(int, found.stdout.split()))


SEED = """
import argparse, signal
parser = argparse.ArgumentParser()
for name, default in (("nproc_per_node", 1), ("nnodes", 1), ("node_rank", 0), ("master_port", 29500)):
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--master_addr")
options = vars(parser.parse_args())

def listening():
    lines = [line for kind in ("tcp", "tcp6") for line in open(f"/proc/self/net/{kind}") if " 0A " in line]
    return sorted({line.split()[1].partition(":")[0] for line in lines})

def work():
    weights = train()
    dist.barrier()
    seen = listening()
    dist.barrier()
    return ddpnb.rank(), weights, seen

def die():
    dist.barrier()
    if ddpnb.rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

def wait():
    dist.barrier()
    say("waits")
    while True:
        dist.all_reduce(torch.ones(1))

def fate(run):
    error = run.exception()
    return [type(error).__name__, str(error).partition("\\n")[0]]

launch = ddpnb.Launcher(**options, threads_per_worker=1, timeout=60)
say(list(launch(work).results().values()))
say(fate(launch(die)))
say(fate(launch(wait)))
"""


def start_both(hosts: Hosts, path: Path) -> list[subprocess.Popen[str]]:
    """The seed's two command lines."""
    flags = ["--nproc_per_node=2", "--nnodes=2", "--master_addr=10.77.0.1"]
    return [hosts.start(rank, path, *flags, f"--node_rank={rank}") for rank in range(2)]


def read(process: subprocess.Popen[str]) -> list[Any]:
    out, err = process.communicate(timeout=2 * DEADLINE)
    assert 0 == process.returncode, err
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.timeout(300)
def test_two_hosts_train_as_one_and_name_what_they_lost(hosts: Hosts, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(HEAD + SEED)
    one_host = on_ranks(4, train)

    processes = start_both(hosts, path)
    for process in processes:
        assert process.stderr is not None
        assert any("waits" in line for line in process.stderr)
    hosts.pull_cable()
    (first, first_fate, first_loss), (second, second_fate, second_loss) = map(read, processes)

    assert [0, 1, 2, 3] == [rank for rank, *_ in first + second]
    assert one_host == [weights for _, weights, _ in first + second]
    own = {f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}" for address in hosts.addresses}
    assert own >= {address for _, _, seen in first + second for address in seen}
    assert ["WorkerError", "failed on node 1: rank 3 was killed by SIGKILL (signal 9)"] == first_fate
    assert ["WorkerError", "rank 3 was killed by SIGKILL (signal 9)"] == second_fate
    for (kind, words), lost in ((first_loss, 1), (second_loss, 0)):
        assert "WorkerError" == kind
        assert words.startswith(f"failed on node {lost}: it has gone without a word: its kernel was ended, or ")


@pytest.mark.timeout(300)
def test_the_real_torchrun_on_two_hosts_trains_to_the_same_weights(hosts: Hosts, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(HEAD + "say([ddpnb.rank(), ddpnb.node_rank(), ddpnb.launch(train).result()])")
    flags = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=10.77.0.1", "--master-port=29511"]
    one_host = on_ranks(4, train)

    processes = [
        hosts.start(
            rank, "-m", "torch.distributed.run", f"--node-rank={rank}", *flags, path, GLOO_SOCKET_IFNAME=interface
        )
        for rank, interface in enumerate(hosts.interfaces)
    ]
    said = sorted(line for process in processes for line in read(process))

    assert [[rank, rank // 2, one_host[rank]] for rank in range(4)] == said
