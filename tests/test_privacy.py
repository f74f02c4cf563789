"""Private by default, and nothing left behind: sockets, folders, processes, threads, descriptors, files."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .conftest import PRELUDE, Kernel

LISTEN = "0A"
LOOPBACK = re.compile(r"......7F|0{24}01000000|0{16}FFFF0000......7F")  # 127.0.0.0/8, ::1, and ::ffff:127.0.0.0/104

SEED = """
from types import SimpleNamespace

from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

# Setup
def setup(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)

def cleanup():
    dist.destroy_process_group()

# Main training function
def main(rank, world_size, args):
    setup(rank, world_size)

    # Create model and move to GPU
    model = MyModel()

    # Wrap with DDP
    model = DDP(model)

    # Create distributed sampler
    train_sampler = DistributedSampler(
        dataset,
        num_replicas=world_size,
        rank=rank,
        shuffle=True
    )

    train_loader = DataLoader(
        dataset,
        batch_size=args.batch_size,
        sampler=train_sampler,
        num_workers=4
    )

    # Training loop
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)  # Important for shuffle

        for inputs, targets in train_loader:

            outputs = model(inputs)
            loss = criterion(outputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    cleanup()
"""

MISSING_NAMES = """
class MyModel(torch.nn.Linear):
    # A model whose optimizer is the module's own name, as the seed has it.
    def __init__(self):
        global optimizer
        super().__init__(4, 2)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

dataset = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.arange(16) % 2)
args = SimpleNamespace(batch_size=4, epochs=2)

def criterion(outputs, targets):
    loss = torch.nn.functional.cross_entropy(outputs, targets)
    ddpnb.log(loss=loss)
    print("here")
    while not ddpnb.should_stop():  # until the test has looked
        time.sleep(0.01)
    return loss
"""

TUTORIALS_SETUP = """
def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
"""


@pytest.fixture(scope="module")
def temporary_folder() -> Iterator[Path]:
    # Not pytest's own, whose path is too long for sockets where several processes run the tests.
    with tempfile.TemporaryDirectory(prefix="ddpnb-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def shared_kernel(temporary_folder: Path) -> Iterator[Kernel]:
    kernel = Kernel(TMPDIR=str(temporary_folder))
    assert kernel.run(PRELUDE).error is None
    yield kernel
    kernel.close()


def listeners_beyond_loopback(kernel: Kernel) -> list[str]:
    """Addresses of sockets of the kernel and its descendants that listen on more than loopback."""
    family = [psutil.Process(kernel.pid), *kernel.descendants()]
    inodes = {inode for process in family for inode in _socket_inodes(process.pid)}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTEN and inode in inodes and not LOOPBACK.fullmatch(local.partition(":")[0]):
                found.append(local)
    return found


def num_listeners(kernel: Kernel) -> int:
    return sum(
        connection.status == psutil.CONN_LISTEN
        for process in [psutil.Process(kernel.pid), *kernel.descendants()]
        for connection in process.net_connections()
    )


def _socket_inodes(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    for descriptor in os.listdir(folder):
        try:
            target = os.readlink(f"{folder}/{descriptor}")
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            yield target[8:-1]


# ---- sockets


def test_the_watch_sees_a_socket_that_listens_on_every_interface(kernel: Kernel) -> None:
    kernel.run(
        "import socket\nopen_to_all = [socket.create_server(('', 0)), socket.create_server(('::', 0), family=10)]"
    )
    seen = listeners_beyond_loopback(kernel)
    kernel.run("for each in open_to_all: each.close()")

    assert 2 == len(seen)
    assert [] == listeners_beyond_loopback(kernel)


def test_nothing_listens_beyond_loopback_while_ranks_train(kernel: Kernel) -> None:
    kernel.run("""
        def train():
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
            dist.new_group([0, 1]).barrier().wait()
            while not ddpnb.should_stop():
                model(torch.ones(2, 4)).sum().backward()
                print("here")
        run = two(train)
        until(run, here)
    """)
    listening, beyond = num_listeners(kernel), listeners_beyond_loopback(kernel)
    kernel.run("run.stop(); run.result()")

    assert listening > 0  # it did look
    assert [] == beyond


@pytest.mark.parametrize("options", ["", "backend=None"])
@pytest.mark.parametrize("setup", ["", TUTORIALS_SETUP], ids=["the seed's", "the tutorials'"])
def test_the_seeds_main_runs_line_by_line_and_listens_on_loopback_only(
    kernel: Kernel, setup: str, options: str
) -> None:
    kernel.run(SEED + MISSING_NAMES + setup)
    kernel.run(f"""
        launcher = ddpnb.Launcher(nproc_per_node=2, view=False, {options})
        run = launcher(lambda: main(ddpnb.rank(), ddpnb.world_size(), args))
        until(run, here)
    """)

    beyond = listeners_beyond_loopback(kernel)
    seen = kernel.value("run.stop(); print((run.results(), len(run.history['loss', 1]), str(run.output(0))))")

    assert [] == beyond
    assert {0: None, 1: None} == seen[0]
    assert 4 == seen[1]
    assert (0 if options else 1) == seen[2].count("ddpnb: the process group is there already")


def test_gloo_keeps_to_the_loopback_interface_unless_the_user_chose_another(kernel: Kernel) -> None:
    value = kernel.value("""
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        def train():
            return [os.environ[name] for name in names]
        default = ddpnb.launch(train, nproc_per_node=1, backend=None, view=False).result()
        chosen = ddpnb.launch(train, nproc_per_node=1, backend=None, view=False, env={names[0]: "eth7"}).result()
        print((default, chosen))
    """)

    assert (["lo", "lo"], ["eth7", "lo"]) == value


# ---- files


def test_only_the_user_can_look_into_the_runtime_folder(kernel: Kernel, temporary_folder: Path) -> None:
    kernel.run("run = two(time.sleep, 60)\nuntil(run, lambda run: all(rank.pid for rank in run.state.ranks))")
    base = temporary_folder / f"ddpnb-{os.getuid()}"
    folders = [base, *(path for path in base.rglob("*") if path.is_dir())]
    modes = {stat.S_IMODE(folder.stat().st_mode) for folder in folders}
    kernel.run("run.kill(); run.wait()")

    assert len(folders) >= 3
    assert {0o700} == modes


def test_a_runtime_folder_of_somebody_else_is_refused(fresh_kernel: Kernel) -> None:
    with tempfile.TemporaryDirectory() as short:  # a socket's path has no room for pytest's own folder
        theirs = Path(short, f"ddpnb-{os.getuid()}")
        theirs.mkdir()
        theirs.chmod(0o777)
        reply = fresh_kernel.run(f"""
            import tempfile
            from ddpnb import runtime
            tempfile.tempdir = {short!r}
            runtime._own.cache_clear()
            two(len, []).result()
        """)

    assert "PermissionError" == reply.error
    assert "is not a folder of this user alone" in reply.message


def test_the_folder_of_a_killed_kernel_is_swept_by_the_next_launch(kernel: Kernel, temporary_folder: Path) -> None:
    left = temporary_folder / f"ddpnb-{os.getuid()}" / "999999-12345"
    left.mkdir()

    kernel.run("from ddpnb import runtime\nprint(runtime.sweep())")

    assert not left.exists()


# ---- leaks


def test_two_hundred_launches_leave_as_much_as_the_first(kernel: Kernel, temporary_folder: Path) -> None:
    kernel.run("""
        quick = ddpnb.Launcher(nproc_per_node=2, backend=None, view=False)
        def nothing(): pass
        quick(nothing).result()
    """)
    before = _what_there_is(kernel, temporary_folder)

    values = kernel.value("print(sum(quick(lambda: 1).result() for _ in range(200)))")

    assert 200 == values
    assert before == _what_there_is(kernel, temporary_folder)


def test_failures_stops_and_kills_leave_as_much_as_a_success(kernel: Kernel, temporary_folder: Path) -> None:
    kernel.run("two(lambda: 1).result()")
    before = _what_there_is(kernel, temporary_folder)

    kernel.run("""
        def fail(): raise ValueError
        def die(): os.abort()
        for function in (fail, die):
            two(function).wait()
        for end in ("stop", "kill"):
            run = two(time.sleep, 60)
            getattr(run, end)()
            run.wait()
        try:
            two(threading.Lock())
        except TypeError:
            pass
    """)

    assert before == _what_there_is(kernel, temporary_folder)


def _what_there_is(kernel: Kernel, folder: Path) -> dict[str, object]:
    server = next(process for process in kernel.descendants() if process.name() == "ddpnb-server")
    threads = kernel.value("""
        import asyncio, gc
        while any(thread.name.startswith("ddpnb-run") for thread in threading.enumerate()):
            time.sleep(0.001)  # the last thing that a run's thread does is to say that it has ended
        gc.collect()
        cell = sys.stdout.pub_thread  # ipykernel closes the sockets of threads that are gone every ten seconds
        asyncio.run_coroutine_threadsafe(cell._event_pipe_gc(), cell.io_loop.asyncio_loop).result()
        print(sorted(thread.name for thread in threading.enumerate()))
    """)
    return {
        "processes": sorted(process.pid for process in kernel.descendants()),
        "threads": threads,
        "descriptors": _open_kinds(kernel.pid),
        "server's threads": len(os.listdir(f"/proc/{server.pid}/task")),
        "server's descriptors": _open_kinds(server.pid),
        "files": sorted(str(path) for path in folder.rglob("*")),
    }


def _open_kinds(pid: int) -> Counter[str]:
    """How many pipes, sockets … a process holds; IPython opens and closes the files of its history as it likes."""
    targets = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return Counter(target.partition(":")[0] for target in targets if not target.startswith("/") or "memfd" in target)


def test_thirty_two_ranks_start_and_return(kernel: Kernel) -> None:
    values = kernel.value("""
        def train():
            total = torch.ones(1)
            dist.all_reduce(total)
            return int(total)
        print(ddpnb.launch(train, nproc_per_node=32, view=False).results())
    """)

    assert dict.fromkeys(range(32), 32) == values
