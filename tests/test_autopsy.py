"""What is known of a failure: cause and cure of the kinds that everybody meets, last values, the failing line."""

from __future__ import annotations

import re

import pytest

from ddpnb.autopsy import autopsy
from ddpnb.messages import Exited, Output, Raised
from ddpnb.state import RunState

from .conftest import Kernel
from .messages_for_tests import folded, metrics, raised

UNUSED = """
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        def forward(self, inputs):
            return self.used(inputs)
"""
DATA = """
    import signal
    class Data(torch.utils.data.Dataset):
        def __init__(self, number): self.number = number
        def __len__(self): return 100
        def __getitem__(self, index):
            if index == 20 and ddpnb.rank() == 1:
                os.kill(os.getpid(), self.number)
            return torch.ones(4)
"""
FAILURES = {
    "memory that Python cannot have": (
        """
        def train():
            bytearray(1 << 60)
        """,
        "This machine's memory ran out",
        "smaller batch",
    ),
    "memory that torch cannot have": (
        """
        def train():
            torch.empty(1 << 58)
        """,
        "This machine's memory ran out",
        "smaller batch",
    ),
    "a kill": (
        """
        def train():
            os.kill(os.getpid(), 9)
        """,
        "Somebody killed it, or memory ran out.",
        "smaller batch",
    ),
    "parameters that DDP misses": (
        UNUSED
        + """
    def train():
        model = torch.nn.parallel.DistributedDataParallel(Two())
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
        """,
        "Some parameters had no part in the loss",
        "find_unused_parameters=True",
    ),
    "parameters that the Loop misses": (
        UNUSED
        + """
    def train():
        model = ddpnb.wrap(Two())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for inputs in (loop := ddpnb.Loop(model, optimizer, ddpnb.loader(torch.ones(8, 4), 2), epochs=1)):
            loop.update(model(inputs).sum())
        """,
        "Some parameters had no part in the loss",
        "find_unused_parameters=True",
    ),
    "a shape that differs in a model": (
        """
        def train():
            torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4 + ddpnb.rank()))
        """,
        "The model is not the same on all ranks.",
        "same arguments",
    ),
    "layers that only one rank has": (
        """
        def train():
            layers = [torch.nn.Linear(4, 4) for _ in range(1 + ddpnb.rank())]
            torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
        """,
        "The model is not the same on all ranks.",
        "same arguments",
    ),
    "a size that differs in a collective": (
        """
        def train():
            dist.all_reduce(torch.ones(4 + ddpnb.rank()))
            dist.barrier()
        """,
        "tensors of different shape or dtype",
        "ddpnb.gather() takes values that differ",
    ),
    "a dtype that differs in a collective": (
        """
        def train():
            dist.all_reduce(torch.ones(4, dtype=torch.float64 if ddpnb.rank() else torch.float32))
            dist.barrier()
        """,
        "tensors of different shape or dtype",
        "TORCH_DISTRIBUTED_DEBUG",
    ),
    "a size that differs in a gathering": (
        """
        def train():
            dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4 + ddpnb.rank()))
        """,
        "The tensors that this call was given differ",
        "ddpnb.gather() takes values that differ",
    ),
    "a port that is taken": (
        """
        import socket
        def train():
            with socket.create_server(("127.0.0.1", 0)) as server:
                socket.create_server(server.getsockname())
        """,
        "The port is taken",
        "Port 0 takes one that is free",
    ),
    "a port that is taken, as torch says it": (
        """
        import socket
        def train():
            with socket.create_server(("127.0.0.1", 0)) as server:
                dist.TCPStore("127.0.0.1", server.getsockname()[1], is_master=True)
        """,
        "The port is taken",
        "Port 0 takes one that is free",
    ),
    "a DataLoader worker that is killed": (
        DATA
        + """
    def train():
        for batch in torch.utils.data.DataLoader(Data(signal.SIGKILL), 2, num_workers=2):
            dist.all_reduce(batch)
        """,
        "A process of the DataLoader was ended",
        "num_workers=0 shows where",
    ),
    "a DataLoader worker without shared memory": (
        DATA
        + """
    def train():
        for batch in torch.utils.data.DataLoader(Data(signal.SIGBUS), 2, num_workers=2):
            dist.all_reduce(batch)
        """,
        "Shared memory (/dev/shm) ran out",
        "--shm-size",
    ),
    "a rank that does not come": (
        """
        two = ddpnb.Launcher(nproc_per_node=2, view=False, timeout=3)
        def train():
            if ddpnb.rank() == 1:
                time.sleep(600)
            dist.all_reduce(torch.ones(1))
        """,
        "Rank 1, which stood in Cell In[",
        "timeout=1800",
    ),
    "ranks in different collectives": (
        """
        two = ddpnb.Launcher(nproc_per_node=2, view=False, timeout=2)
        def train():
            dist.barrier() if ddpnb.rank() else dist.all_reduce(torch.ones(1))
            time.sleep(600)
        """,
        "The ranks waited for each other",
        "same collective calls",
    ),
    "a rank that returned early": (
        """
        def train():
            if ddpnb.rank() == 1:
                dist.barrier()
        """,
        "Rank 0 has already returned from the function, while rank 1 waited",
        "same collective calls",
    ),
    "a lambda for another process": (
        """
        def train():
            list(torch.utils.data.DataLoader([lambda: 1], num_workers=1, multiprocessing_context="spawn"))
        """,
        "cannot be pickled",
        "function with a name",
    ),
    "a value that cannot be returned": (
        """
        def train():
            return (number for number in range(3))
        """,
        "cannot be pickled",
        "function with a name",
    ),
    "a GPU that is not there": (
        """
        def train():
            torch.ones(1, device="cuda")
        """,
        "asks for a GPU",
        "ddpnb.device()",
    ),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_known_failure_is_told_with_its_cause_and_what_helps(kernel: Kernel, kind: str) -> None:
    function, cause, cure = FAILURES[kind]
    kernel.run("two = ddpnb.Launcher(nproc_per_node=2, view=False)")
    kernel.run(function)

    text = kernel.run("print(two(train).exception())").text

    likely = re.search(r"^Likely cause: (.*)\nWhat helps: (.*)$", text, re.MULTILINE)
    assert likely, text
    assert cause in likely[1]
    assert cure in likely[2]
    assert text.endswith(likely[0])


@pytest.mark.parametrize(
    ("said", "cause", "cure"),
    [
        (
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.64 GiB",
            "The GPU's memory ran out.",
            "accumulate=2",
        ),
        (
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use …",
            "CUDA was in use before this process was forked, and a fork cannot use it.",
            "start_method='fork'",
        ),
    ],
)
def test_what_only_a_gpu_says_is_known_as_well(said: str, cause: str, cure: str) -> None:
    found = autopsy(folded(2, [raised(1, said)])).cure

    assert found is not None
    assert cause == found.cause
    assert cure in found.cure


def test_a_failure_of_ones_own_has_no_likely_cause() -> None:
    assert autopsy(folded(1, [raised(0, "bad batch")])).cure is None


UNRELATED = {
    "code that would catch it": """
        def train():
            try:
                {}["lr"]
            except (KeyError, MemoryError): raise ValueError("no lr")
        """,
    "a name that contains it": """
        class SharedMemoryErrorCount(Exception): pass
        def train():
            raise SharedMemoryErrorCount("3")
        """,
    "code of a data set that speaks of it": """
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 8
            def __getitem__(self, index): raise ValueError("no sample")  # Address already in use, Can't pickle
        def train():
            list(torch.utils.data.DataLoader(Data(), num_workers=1))
        """,
    "a crash after an error that was caught": """
        import ctypes
        def train():
            print("CUDA out of memory: half the batch", flush=True)
            ctypes.string_at(0)
        """,
    "an end after an error that was caught": """
        def train():
            print("MemoryError: half the batch", flush=True)
            os._exit(3)
        """,
}


@pytest.mark.parametrize("kind", UNRELATED)
def test_what_only_looks_like_a_known_failure_has_no_likely_cause(kernel: Kernel, kind: str) -> None:
    kernel.run("two = ddpnb.Launcher(nproc_per_node=2, view=False)")
    kernel.run(UNRELATED[kind])

    text = kernel.run("print(two(train).exception())").text

    assert text.startswith("rank ")
    assert "Likely cause" not in text


def test_an_aborted_rank_has_said_why() -> None:
    said = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\nterminate called\n"
    death = Exited(time=1.0, rank=0, exitcode=-6, ended_by_us=False, memory=None, oom_kills=None)

    found = autopsy(folded(2, [Output(time=0.5, rank=0, text=said), death]))

    assert found.cure is not None
    assert "Another rank did not come to the collective in time." == found.cure.cause


def test_memory_that_the_system_saw_run_out_is_no_guess() -> None:
    found = autopsy(folded(1, [Exited(time=1.0, rank=0, exitcode=-9, ended_by_us=False, memory=None, oom_kills=1)]))

    assert found.cure is not None
    assert "Memory ran out, and the system ended it." == found.cure.cause


# ---- the last values


def values_of(*logged: tuple[int, list[float]], world_size: int = 2) -> tuple[str, ...]:
    """What is told of a loss that ranks have logged before rank 0 failed."""
    messages = [metrics(rank, "loss", values) for rank, values in logged]
    return autopsy(folded(world_size, [*messages, raised(0)])).values


def test_the_last_value_is_told() -> None:
    assert ("loss 0.25 at step 2",) == values_of((0, [1.0, 0.5, 0.25]))


def test_of_several_names_the_loss_is_told_and_what_is_no_number() -> None:
    logged = [metrics(0, "lr", [0.1, 0.1]), metrics(0, "loss", [0.5]), metrics(0, "grad_norm", [1.0, float("inf")])]

    told = autopsy(folded(1, [*logged, raised(0)])).values

    assert ("loss 0.5 at step 0", "grad_norm 1 at step 0; inf from step 1 on") == told


def test_where_a_value_became_nan_is_told_with_the_rank_that_was_first() -> None:
    nan = float("nan")

    told = values_of((0, [0.5, 0.31, 0.3, nan]), (1, [0.5, 0.31, nan, nan]))

    assert ("loss 0.3 at step 2; nan from step 2 on, first on rank 1",) == told


def test_an_infinite_value_that_passed_is_told_as_one() -> None:
    assert ("loss 0.25 at step 2; inf at step 1",) == values_of((0, [1.0, float("inf"), 0.25]), world_size=1)


def test_a_loss_that_never_was_a_number_has_no_last_value() -> None:
    assert ("loss nan from step 0 on, first on ranks 0, 1",) == values_of(*((rank, [float("nan")]) for rank in (0, 1)))


# ---- the failing line


TRACEBACK = """Traceback (most recent call last):
  File "/tmp/cell.py", line 9, in <module>
    train()
  File "/tmp/cell.py", line 4, in train
    raise ValueError("bad batch")
  File "/lib/python3.11/site-packages/other.py", line 3, in check
    check(1)
ValueError: bad batch
"""


def failed(num_ranks: int, *others: Raised | Output) -> RunState:
    own = raised(0)
    first = Raised(
        time=0.5,
        rank=0,
        phase="running",
        type_name=own.type_name,
        text="bad batch",
        traceback=TRACEBACK,
        location="/tmp/cell.py:4",
        is_echo=False,
        exception=None,
    )
    return folded(num_ranks, [first, *others])


def test_the_failing_line_is_the_innermost_of_the_users() -> None:
    found = autopsy(failed(1))

    assert ("cell.py, line 4", 'raise ValueError("bad batch")') == (found.place, found.source)
    assert (0, "rank 0 raised ValueError in cell.py, line 4: bad batch") == (found.rank, found.headline)


def test_ranks_that_did_the_same_are_told_together() -> None:
    found = autopsy(failed(4, raised(1, "late"), raised(3, "late")))

    assert ("ranks 1, 3: raised as well ValueError: late", "rank 2: was in the function; it did not say where") == (
        found.others
    )
