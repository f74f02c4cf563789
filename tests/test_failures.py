"""A rank fails: the right one is blamed, its own exception arrives, and its text says all there is to know."""

from __future__ import annotations

import re

import pytest

from .conftest import Kernel

FAILURES = {
    "raises while its peers are in a barrier": """
        def train(culprit):
            if ddpnb.rank() == culprit:
                raise ValueError("bad batch")
            dist.barrier()
        """,
    "raises while its peers train": """
        def train(culprit):
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
            for step in range(1000):
                if step == 3 and ddpnb.rank() == culprit:
                    raise ValueError("bad batch")
                model(torch.ones(2, 8)).sum().backward()
        """,
    "raises before the rendezvous": """
        class Argument:
            def __init__(self, culprit): self.culprit = culprit
            def __setstate__(self, state):
                if os.environ["RANK"] == str(state["culprit"]):
                    raise ValueError("cannot be loaded here")

        train = lambda argument: None
        arguments = Argument
        """,
    "raises where there is no group": """
        def train(culprit):
            if ddpnb.rank() == culprit:
                raise ValueError("bad batch")
            dist.init_process_group("gloo")
        options = {"backend": None}
        """,
    "crashes": """
        import ctypes
        def train(culprit):
            if ddpnb.rank() == culprit:
                ctypes.string_at(0)
            dist.barrier()
        """,
    "is killed": """
        import signal
        def train(culprit):
            if ddpnb.rank() == culprit:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
        """,
    "aborts": """
        def train(culprit):
            if ddpnb.rank() == culprit:
                os.abort()
            dist.barrier()
        """,
}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("failure", FAILURES)
def test_the_rank_that_fails_is_blamed(kernel: Kernel, failure: str, world_size: int) -> None:
    kernel.run("options, arguments = {}, int")
    kernel.run(FAILURES[failure])

    blamed = kernel.value(f"""
        launcher = ddpnb.Launcher(nproc_per_node={world_size}, view=False, **options)
        culprits = [*range({world_size}), 0]
        print([launcher(train, arguments(culprit)).exception().rank for culprit in culprits])
    """)

    assert [*range(world_size), 0] == blamed


def test_a_polled_run_blames_the_right_rank_as_well(kernel: Kernel) -> None:
    kernel.run(FAILURES["raises while its peers are in a barrier"])

    blamed = kernel.value("""
        run = two(train, 1)
        while not run.done():
            time.sleep(0.005)
        print((run.state.status, run.exception().rank, type(run.exception()).__name__))
    """)

    assert ("failed", 1, "ValueError") == blamed


# ---- exceptions


def test_the_cell_gets_the_exception_of_the_rank_with_its_own_type(kernel: Kernel) -> None:
    kernel.run(FAILURES["raises while its peers are in a barrier"])

    reply = kernel.run("two(train, 1).result()")

    assert "ValueError" == reply.error
    assert reply.message.startswith("rank 1 raised ValueError in Cell In[")
    assert "bad batch" in reply.message


def test_an_error_tells_cell_line_traceback_and_where_the_others_stood(kernel: Kernel) -> None:
    reply = kernel.run("""
        def inner():
            raise ValueError("bad batch")

        def train():
            if ddpnb.rank() == 1:
                time.sleep(0.3)  # the other gets to its barrier
                inner()
            dist.barrier()

        two(train).result()
    """)

    assert re.match(r"rank 1 raised ValueError in Cell In\[\d+\], line 2: bad batch\n", reply.message)
    assert re.search(r"Cell In\[\d+\], line 2, in inner\n +raise ValueError", reply.message)
    assert re.search(r"Cell In\[\d+\], line 7, in train\n +inner\(\)", reply.message)
    assert re.search(r"rank 0: stood in barrier\(\), Cell In\[\d+\], line 8, in train", reply.message)


def test_an_error_is_caught_by_its_own_type_and_as_a_worker_error(kernel: Kernel) -> None:
    caught = kernel.value("""
        def train():
            return {}["missing"]

        caught = []
        run = two(train)
        for kind in (KeyError, LookupError, ddpnb.WorkerError):
            try:
                run.result()
            except kind as error:
                caught.append((error.args, error.exitcode, error.rank in (0, 1)))
        print(caught)
    """)

    assert [(("missing",), None, True)] * 3 == caught


def test_the_users_own_exception_class_arrives_with_its_fields(kernel: Kernel) -> None:
    caught = kernel.value("""
        class BadBatch(Exception):
            def __init__(self, index, reason):
                super().__init__(index, reason)
                self.index = index

        def train():
            if ddpnb.rank() == 1:
                raise BadBatch(7, "torn")
            dist.barrier()

        try:
            two(train).result()
        except BadBatch as error:
            print((error.index, error.args, error.rank, str(error).startswith("rank 1 raised BadBatch in Cell")))
    """)

    assert (7, (7, "torn"), 1, True) == caught


def test_an_exception_that_cannot_be_unpickled_is_told_in_words(kernel: Kernel) -> None:
    reply = kernel.run("""
        class BadBatch(Exception):
            def __init__(self, index, reason):
                super().__init__(f"batch {index} is {reason}")

        def train():
            raise BadBatch(7, "torn")

        two(train).result()
    """)

    assert "WorkerError" == reply.error
    assert "raised BadBatch in Cell In[" in reply.message
    assert "batch 7 is torn" in reply.message


@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt", "StopIteration", "GeneratorExit"])
def test_what_would_break_the_cell_comes_as_a_worker_error(kernel: Kernel, kind: str) -> None:
    kernel.run(f"""
        def train():
            if ddpnb.rank() == 1:
                raise {kind}()
            dist.barrier()
    """)

    reply = kernel.run("two(train).result()")

    assert "WorkerError" == reply.error
    assert f"rank 1 raised {kind}" in reply.message


def test_the_cause_of_an_exception_is_in_its_traceback(kernel: Kernel) -> None:
    reply = kernel.run("""
        def train():
            try:
                1 / 0
            except ZeroDivisionError as error:
                raise RuntimeError("no mean") from error

        two(train).result()
    """)

    assert "RuntimeError" == reply.error
    assert "ZeroDivisionError: division by zero" in reply.message


def test_errors_in_the_wake_of_another_are_folded(kernel: Kernel) -> None:
    reply = kernel.run("""
        def train():
            if ddpnb.rank() == 1:
                dist.destroy_process_group()
                time.sleep(0.03)
                raise ValueError("bad batch")
            dist.barrier()

        two(train).result()
    """)

    assert "ValueError" == reply.error
    assert reply.message.startswith("rank 1 raised ValueError")
    assert "rank 0: raised in its wake" in reply.message


def test_a_rank_that_returns_while_its_peer_waits_is_named(kernel: Kernel) -> None:
    reply = kernel.run("""
        def train():
            if ddpnb.rank() == 0:
                dist.barrier()

        two(train).result()
    """)

    assert "rank 0 raised" in reply.message
    assert "Rank 1 has already returned from the function, while rank 0 waited" in reply.message


# ---- deaths without a word


def test_a_killed_rank_is_told_with_its_memory(kernel: Kernel) -> None:
    kernel.run(FAILURES["is killed"])

    reply = kernel.run("two(train, 1).result()")

    assert "WorkerError" == reply.error
    assert reply.message.startswith("rank 1 was killed by SIGKILL (signal 9)")
    assert "memory ran out" in reply.message
    assert re.search(r"It had held up to \d+ MiB of memory", reply.message)


def test_a_crash_is_told_with_signal_exit_code_and_line(kernel: Kernel) -> None:
    kernel.run(FAILURES["crashes"])

    seen = kernel.value("""
        error = two(train, 1).exception()
        print((type(error) is ddpnb.WorkerError, error.rank, error.exitcode, str(error)))
    """)

    assert (True, 1, -11) == seen[:3]
    assert seen[3].startswith("rank 1 was killed by SIGSEGV (signal 11)")
    assert "crashed in compiled code" in seen[3]
    assert re.search(r"Cell In\[\d+\], line 4, in train\n +ctypes.string_at\(0\)", seen[3])


@pytest.mark.parametrize("code", [0, 7])
def test_leaving_by_os_exit_is_an_error_even_with_code_0(kernel: Kernel, code: int) -> None:
    kernel.run(f"""
        def train():
            if ddpnb.rank() == 1:
                os._exit({code})
            dist.barrier()
    """)

    seen = kernel.value("error = two(train).exception(); print((error.rank, error.exitcode, str(error)))")

    assert (1, code) == seen[:2]
    assert seen[2].startswith(f"rank 1 ended with exit code {code} before the function returned")
    assert "left without a word" in seen[2]


def test_what_ranks_logged_before_a_peers_death_is_kept(kernel: Kernel) -> None:
    kernel.run("""
        import signal

        def train():
            for step in range(100):
                ddpnb.log(loss=step)
            dist.barrier()
            if ddpnb.rank() == 1:
                time.sleep(0.6)  # two batches go out meanwhile
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                ddpnb.log(alive=1.0)
                time.sleep(0.01)
    """)

    seen = kernel.value("""
        run = two(train)
        error = run.exception()
        kept = [run.history["loss", rank].tolist() == list(range(100)) for rank in (0, 1)]
        print((error.rank, kept, len(run.history["alive", 0]) > 10))
    """)

    assert (1, [True, True], True) == seen


def test_all_that_was_printed_before_a_failure_is_there_with_the_error(kernel: Kernel) -> None:
    kernel.run("""
        import ctypes
        def train():
            for line in range(2000):
                print("line", line)
            ctypes.CDLL(None).puts(b"from C, not flushed")
            if ddpnb.rank() == 1:
                raise ValueError("bad batch")
            dist.barrier()
    """)

    seen = kernel.value("""
        run = two(train)
        run.exception()
        lines = run.output(1).splitlines()
        print((lines[:2000] == [f"line {line}" for line in range(2000)], lines[2000:]))
    """)

    assert seen[0]
    assert {"from C, not flushed", "ValueError: bad batch"} <= set(seen[1])


def test_ranks_in_different_collectives_are_named_when_torch_compares_them(kernel: Kernel) -> None:
    kernel.run("""
        def train():
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
            model(torch.ones(3, 2)).sum().backward()
            if ddpnb.rank() == 1:
                dist.barrier()
            else:
                dist.broadcast(torch.zeros(2), 0)

        run = ddpnb.launch(train, nproc_per_node=2, view=False, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    """)

    text = kernel.run("print(run.exception())").text

    assert "Detected mismatch between collectives on ranks" in text
    assert "OpType=BROADCAST" in text
