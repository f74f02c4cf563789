"""A run that makes no steps: the rank that the others wait for is named, with the line where each stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddpnb.messages import Asked, Exited, Halted, Hung, Returned, Stack
from ddpnb.report import hang, hang_headline
from ddpnb.state import RunState, fold

from .conftest import Kernel
from .messages_for_tests import folded, metrics

HANGS = {
    "an extra all_reduce on one rank": (
        """
        def train():
            for step in range(1000):
                ddpnb.log(step=step, loss=1.0)
                if ddpnb.rank() == 1 and step == 5:
                    dist.all_reduce(torch.ones(1))
                dist.barrier()
        """,
        r"rank 0 waits in barrier\(\), Cell In\[\d+\], line 6; rank 1 waits in all_reduce\(\), Cell In\[\d+\], line 5",
        "dist.all_reduce(torch.ones(1))",
    ),
    "a DataLoader worker that sleeps": (
        """
        class Numbers(torch.utils.data.Dataset):
            def __len__(self): return 100
            def __getitem__(self, index):
                if index == 20 and ddpnb.rank() == 1:
                    time.sleep(600)
                return torch.ones(1)

        def train():
            for batch in torch.utils.data.DataLoader(Numbers(), 2, num_workers=2):
                ddpnb.log(loss=1.0)
                dist.all_reduce(batch)
        """,
        r"rank 1 in the DataLoader, Cell In\[\d+\], line 9; rank 0 waits in all_reduce\(\)",
        "time.sleep(600)",
    ),
    "a DataLoader worker that sleeps beside a pool of the function's own": (
        """
        class Numbers(torch.utils.data.Dataset):
            def __len__(self): return 100
            def __getitem__(self, index):
                if index == 20:
                    time.sleep(600)
                return torch.ones(1)

        def train():
            pool = torch.multiprocessing.get_context("fork").Pool(2)
            pool.map_async(time.sleep, [600, 600])
            for batch in torch.utils.data.DataLoader(Numbers(), 2, num_workers=1):
                ddpnb.log(loss=1.0)
        """,
        r"ranks 0, 1 in the DataLoader, Cell In\[\d+\], line 11",
        "its DataLoader worker: Cell",
    ),
    "a model of torch's alone that computes for long": (
        """
        def train():
            model = ddpnb.wrap(torch.nn.LSTM(64, 256, 4))
            for step in range(1000):
                ddpnb.log(step=step, loss=1.0)
                length = 10**6 if ddpnb.rank() == 1 and step == 5 else 2
                model(torch.ones(1, 1, 64).expand(length, 1, 64))[0].sum().backward()
        """,
        r"rank 1 at Cell In\[\d+\], line 6; rank 0 waits in backward\(\)",
        "model(torch.ones(1, 1, 64)",
    ),
    "a data set that sleeps in a Loop": (
        """
        class Numbers(torch.utils.data.Dataset):
            def __len__(self): return 100
            def __getitem__(self, index):
                if index == 20:
                    time.sleep(600)
                return torch.ones(1)

        def train():
            model = ddpnb.wrap(torch.nn.Linear(1, 1))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for inputs in (loop := ddpnb.Loop(model, optimizer, ddpnb.loader(Numbers(), 1), epochs=1)):
                loop.update(model(inputs).sum())
        """,
        r"rank 0 in the DataLoader, Cell In\[\d+\], line 5; rank 1 waits in backward\(\)",
        "time.sleep(600)",
    ),
    "an infinite loop in one rank": (
        """
        def train():
            model = ddpnb.wrap(torch.nn.Linear(8, 8))
            for step in range(1000):
                ddpnb.log(step=step, loss=1.0)
                while ddpnb.rank() == 1 and step == 5:
                    pass
                model(torch.ones(2, 8)).sum().backward()
        """,
        r"rank 1 at Cell In\[\d+\], line [56]; rank 0 waits in backward\(\)",
        "model(torch.ones(2, 8)).sum().backward()",
    ),
    "a rank that was stopped from outside": (
        """
        import signal
        def train():
            for step in range(1000):
                ddpnb.log(step=step, loss=1.0)
                dist.all_reduce(torch.ones(1))
                if ddpnb.rank() == 1 and step == 5:
                    os.kill(os.getpid(), signal.SIGSTOP)
        """,
        r"rank 1 stopped \(SIGSTOP\); rank 0 waits in all_reduce\(\)",
        "signal.SIGCONT",
    ),
    "a regular expression that holds the interpreter": (
        """
        import re
        def train():
            for step in range(1000):
                ddpnb.log(step=step, loss=1.0)
                dist.all_reduce(torch.ones(1))
                if ddpnb.rank() == 1 and step == 5:
                    time.sleep(1)  # until what was logged has gone out
                    re.match("(a+)+$", 40 * "a" + "b")
        """,
        r"rank 1 at Cell In\[\d+\], line 8; rank 0 waits in all_reduce\(\)",
        're.match("(a+)+$"',
    ),
    "a function that makes no sign at all": (
        """
        def train():
            if ddpnb.rank() == 1:
                time.sleep(600)
            dist.barrier()
        """,
        r"rank 1 at Cell In\[\d+\], line 3; rank 0 waits in barrier\(\)",
        "time.sleep(600)",
    ),
}


@pytest.mark.parametrize("kind", HANGS)
def test_a_hang_is_told_with_the_rank_that_is_waited_for_and_its_line(kernel: Kernel, kind: str) -> None:
    function, headline, source = HANGS[kind]
    kernel.run(function)

    text = kernel.run("""
        run = two(train)
        run.hang_after = 1
        until(run, ddpnb.Run.hang)
        print(run.hang())
        run.kill()
    """).text

    assert re.search(r"no step for \d+ s: .*" + headline, text), text
    assert source in text


def test_what_was_stopped_and_goes_on_is_no_hang_any_more(kernel: Kernel) -> None:
    value = kernel.value("""
        import signal
        def train():
            for step in range(10**9):
                ddpnb.log(loss=1.0)
                dist.all_reduce(torch.ones(1))
                if ddpnb.should_stop():
                    return "value"

        run = two(train)
        run.hang_after = 0.5
        until(run, lambda run: len(run.state.history.get("loss", {})) == 2)
        os.kill(run.state.ranks[1].pid, signal.SIGSTOP)
        until(run, ddpnb.Run.hang)
        halted = run.state.ranks[1].halted
        os.kill(run.state.ranks[1].pid, signal.SIGCONT)
        until(run, lambda run: run.hang() is None)
        until(run, lambda run: not run.state.ranks[1].halted)
        run.stop()
        print((halted, run.result()))
    """)

    assert (True, "value") == value


def test_whoever_keeps_waiting_is_told_again_after_twice_the_time(kernel: Kernel) -> None:
    silences = kernel.value("""
        def train():
            for step in range(1000):
                ddpnb.log(step=step, loss=1.0)
                if step == 5:
                    time.sleep(600)

        run = two(train)
        run.hang_after = 0.5
        silences = []
        for _ in range(2):
            until(run, ddpnb.Run.hang)
            silences.append(run.state.hung.silence)
            run.keep_waiting()
            until(run, lambda run: run.hang() is None)
        print(silences)
        run.kill()
    """)

    assert 0.5 <= silences[0]
    assert silences[0] + 1.0 <= silences[1]


def test_neither_slow_steps_nor_a_busy_function_without_steps_are_a_hang(kernel: Kernel) -> None:
    hung = kernel.value("""
        def train():
            for step in range(5):
                ddpnb.log(step=step, loss=1.0)
                time.sleep(1.5)

        def compute():
            until = time.monotonic() + 5
            while time.monotonic() < until:
                pass

        hung, runs = [], [two(train), two(compute)]
        for run in runs:
            run.hang_after = 1
            run.watchers.append(lambda run: hung.append(run.state.hung))
        print(([run.result() for run in runs], any(hung)))
    """)

    assert ([None, None], False) == hung


def test_the_last_checkpoint_may_take_long(kernel: Kernel, tmp_path: Path) -> None:
    hung = kernel.value(f"""
        def train(save=torch.save):
            def save_slowly(*args, **kwargs):
                until = time.monotonic() + 2
                while time.monotonic() < until:
                    pass
                save(*args, **kwargs)
            torch.save = save_slowly
            model = ddpnb.wrap(torch.nn.Linear(1, 1))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for inputs in (loop := ddpnb.Loop(model, optimizer, ddpnb.loader(torch.ones(20, 1), 1), epochs=1)):
                loop.update(model(inputs).sum())

        hung = []
        run = ddpnb.Launcher(nproc_per_node=2, view=False, run_dir={str(tmp_path)!r})(train)
        run.hang_after = 0.5
        run.watchers.append(lambda run: hung.append(run.state.hung))
        run.result()
        print((any(hung), run.state.saved.step))
    """)

    assert (False, 10) == hung


def test_a_run_that_nobody_watches_never_hangs(kernel: Kernel) -> None:
    hung = kernel.value("""
        def train():
            for step in range(10):
                ddpnb.log(step=step, loss=1.0)
            time.sleep(2)

        hung = []
        run = two(train)
        run.hang_after = 0.2
        run.hang_after = None
        run.watchers.append(lambda run: hung.append(run.state.hung))
        run.result()
        print((any(hung), run.hang_after, run.hang()))
    """)

    assert (False, None, None) == hung


@pytest.mark.parametrize("seconds", ["0", "-1", "float('nan')"])
def test_a_patience_that_cannot_be_is_refused(kernel: Kernel, seconds: str) -> None:
    reply = kernel.run(f"""
        run = two(lambda: None)
        run.wait()
        run.hang_after = {seconds}
    """)

    assert "ValueError" == reply.error
    assert "a number of seconds above 0, or None" in reply.message


STUCK = {
    "without the interpreter's lock": "torch.ones(8000, 8000) @ torch.ones(8000, 8000)",
    "with it": "(lock := ctypes.PyDLL(None).pthread_mutex_lock)(mutex), lock(mutex)",
}


@pytest.mark.parametrize("how", STUCK)
def test_stacks_are_there_while_ranks_are_stuck_in_compiled_code(kernel: Kernel, how: str) -> None:
    stacks = kernel.value(f"""
        import ctypes
        def train():
            model, mutex = ddpnb.wrap(torch.nn.Linear(8, 8)), ctypes.create_string_buffer(64)
            print("here", flush=True)
            if ddpnb.rank() == 1:
                {STUCK[how]}
            model(torch.ones(2, 8)).sum().backward()

        run, stacks = two(train), {{}}
        until(run, here)
        while "run_backward" not in stacks.get(0, "") or "line 6" not in stacks.get(1, ""):
            stacks = run.stacks()
            assert not run.done()
        print(dict(stacks))
        run.kill()
    """)

    assert "line 7, in train\n    model(torch.ones(2, 8)).sum().backward()" in stacks[0]
    assert f"line 6, in train\n    {STUCK[how]}" in stacks[1]


# ---- in words


def stack(rank: int, *frames: tuple[str, int, str]) -> Stack:
    """What faulthandler writes; the innermost frame first."""
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in frames]
    return Stack(time=2.0, rank=rank, text="\n".join(["Stack (most recent call first):", *lines]) + "\n")


ALL_REDUCE = ("/site-packages/torch/distributed/distributed_c10d.py", 3252, "all_reduce")
BACKWARD = ("/site-packages/torch/autograd/graph.py", 979, "_engine_run_backward")


def hung(num_ranks: int, *messages: object) -> RunState:
    return folded(num_ranks, [*messages, Hung(time=9.0, silence=12.3)])  # type: ignore[list-item]


def test_ranks_that_stand_alike_are_named_together() -> None:
    waiting = [stack(rank, ALL_REDUCE, ("cell", 7, "train")) for rank in range(15)]

    line = hang_headline(hung(16, *waiting, stack(15, ("cell", 9, "train"))))

    assert "no step for 12 s: rank 15 at cell, line 9; ranks 0, 1, 2, 3, 4, 5 and 9 more wait in all_reduce()" == line


def test_a_rank_that_returned_early_is_named_before_those_that_wait_for_it() -> None:
    state = hung(2, Returned(time=1.0, rank=0, value=b""), stack(1, ALL_REDUCE, ("cell", 7, "train")))

    assert "no step for 12 s: rank 0 returned already; rank 1 waits in all_reduce()" == hang_headline(state)
    assert "Every rank must make the same collective calls in the same order." in hang(state)


def test_what_hung_can_be_read_after_it_was_ended() -> None:
    state = hung(2, *(stack(rank, ALL_REDUCE, ("cell", 7 + rank, "train")) for rank in range(2)))
    before = hang(state)

    for rank in range(2):
        killed = Exited(time=9.0, rank=rank, exitcode=-9, ended_by_us=True, memory=None, oom_kills=None)
        state = fold(state, killed)

    assert before == hang(state)


def test_nobody_is_advised_to_end_what_is_ending() -> None:
    state = hung(1, stack(0, ALL_REDUCE, ("cell", 7, "train")))

    after = hang(fold(state, Asked(time=10.0, how="kill")))

    assert (True, False) == ("run.kill()" in hang(state), "run.kill()" in after)


def test_a_stopped_rank_is_last_seen_where_its_newest_stack_was() -> None:
    told = [stack(1, ALL_REDUCE, ("cell", 7, "train")), Halted(time=2.0, rank=1, halted=True)]

    text = hang(hung(2, metrics(1, "loss", [1.0, 2.0]), *told, stack(0, BACKWARD, ("cell", 8, "train"))))

    assert "rank 1 stopped (SIGSTOP); rank 0 waits in _engine_run_backward()" in text
    assert (
        "rank 1 (step 1): its process was stopped from outside (SIGSTOP); last seen in all_reduce(), cell, line" in text
    )


def test_ranks_that_wait_in_one_line_have_made_unequal_calls() -> None:
    state = hung(2, *(stack(rank, ALL_REDUCE, ("cell", 7, "train")) for rank in range(2)))

    assert "All wait in one line: some have made fewer calls before it." in hang(state)


def test_a_rank_by_itself_waits_for_nobody() -> None:
    assert "no step for 12 s: rank 0 at cell, line 7" == hang_headline(
        hung(1, stack(0, BACKWARD, ("cell", 7, "train")))
    )


def test_a_rank_that_has_not_answered_is_told_with_its_phase() -> None:
    text = hang(hung(1))

    assert "rank 0 does not say where" in text
    assert "last seen in the function" in text
