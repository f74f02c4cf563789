"""Interrupt, stop, kill and the kernel's death: the cell comes back, and nobody stays."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from .conftest import PRELUDE, Kernel, Reply, have_ended, wait_until

DEADLINE = 3.0
"""Seconds until everybody must be gone."""

SAY_WHEN = """
import traceback

def say_when(run, **claims):
    # In a thread: print each claim's name as soon as it holds and the cell waits for the run.
    def waits():
        frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
        return frames[-1].name == "wait" and any(frame.filename.endswith("ddpnb/run.py") for frame in frames)

    def watch():
        for name, claim in claims.items():
            until(run, claim)
            while not waits():
                pass
            print(name, flush=True)

    threading.Thread(target=watch, daemon=True).start()
"""

PLACES = {
    "rendezvous": """
        class Argument:
            def __init__(self): self.weight = 1
            def __setstate__(self, state):
                if os.environ["RANK"] == "1":
                    time.sleep(60)
        train, arguments = (lambda argument: None), [Argument()]
        there = lambda run: run.state.ranks[0].phase == "rendezvous" and run.state.ranks[1].phase == "unpacking"
        """,
    "a collective": """
        def train():
            print("here")
            if ddpnb.rank() == 1:
                time.sleep(60)
            dist.barrier()
        """,
    "sleep": """
        def train():
            print("here")
            time.sleep(60)
        """,
    "code that catches all exceptions": """
        def train():
            print("here")
            while True:
                try:
                    time.sleep(0.01)
                except Exception:
                    pass
        """,
    "code that catches even what is no Exception": """
        def train():
            print("here")
            while True:
                try:
                    time.sleep(0.01)
                except BaseException:
                    pass
        """,
    "a C call that holds the GIL": """
        import ctypes
        def train():
            print("here", flush=True)
            ctypes.PyDLL(None).sleep(60)
        """,
    "a handler for SIGTERM that does nothing": """
        import signal
        def train():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("here")
            time.sleep(60)
        """,
    "a loop over a DataLoader": """
        class Noise(torch.utils.data.Dataset):
            def __len__(self): return 10**6
            def __getitem__(self, index): return torch.randn(4)

        def train():
            loader = torch.utils.data.DataLoader(Noise(), batch_size=4, num_workers=2)
            for step, batch in enumerate(loader):
                if step == 3:
                    print("here")
                time.sleep(0.01)
        """,
}

ASKING = """
def train():
    step = 0
    while not ddpnb.should_stop():
        dist.all_reduce(torch.ones(1))
        step += 1
        if step == 3:
            print("here")
    return step
"""


@pytest.fixture(scope="module")
def shared_kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    assert kernel.run(PRELUDE + SAY_WHEN).error is None
    yield kernel
    kernel.close()


@pytest.fixture(autouse=True)
def _usual_names(request: pytest.FixtureRequest) -> None:
    if "kernel" in request.fixturenames:
        request.getfixturevalue("kernel").run("there, arguments = here, []")


def interrupted(kernel: Kernel, code: str, *words: str) -> tuple[Reply, list[psutil.Process]]:
    """Run a cell and interrupt it at each of the words that it prints; its reply, and the workers at the first one."""
    awaited = list(words)
    family: list[psutil.Process] = []

    def press(text: str) -> None:
        if awaited and awaited[0] in text.split():
            family.extend([] if family else kernel.workers())
            awaited.pop(0)
            kernel.interrupt()

    reply = kernel.wait(kernel.start(code), on_stdout=press)
    assert not awaited, f"the cell never said {awaited}: {reply}"
    return reply, family


# ---- interrupt


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_ends_ranks_in(kernel: Kernel, place: str) -> None:
    kernel.run(PLACES[place])

    reply, family = interrupted(kernel, "run = two(train, *arguments)\nsay_when(run, now=there)\nrun.result()", "now")

    assert "KeyboardInterrupt" == reply.error
    assert len(family) == (6 if "DataLoader" in place else 2)
    wait_until(lambda: have_ended(family), DEADLINE, "the end of all workers")
    assert (True, True, "stopped") == kernel.value("print((run.done(), run.cancelled(), run.state.status))")


def test_an_interrupt_stops_ranks_that_ask_at_the_same_step_and_their_value_is_kept(kernel: Kernel) -> None:
    kernel.run(ASKING)

    reply, family = interrupted(kernel, "run = two(train)\nsay_when(run, now=here)\nrun.result()", "now")
    results = kernel.value("print((run.results(), run.cancelled(), run.state.status))")

    assert "KeyboardInterrupt" == reply.error
    assert have_ended(family)
    assert results[0][0] == results[0][1] >= 3
    assert (False, "finished") == results[1:]


def test_a_second_interrupt_kills(kernel: Kernel) -> None:
    kernel.run("""
        def train():
            while True:
                if ddpnb.rank() == 0 and ddpnb.should_stop():
                    time.sleep(60)  # a save that takes its time
                elif ddpnb.rank() == 1 and ddpnb.should_stop():
                    time.sleep(60)
                print("here")
                time.sleep(0.01)
    """)

    reply, family = interrupted(
        kernel,
        """
        run = two(train)
        say_when(run, first=here, second=lambda run: all(rank.stopping for rank in run.state.ranks))
        run.result()
        """,
        "first",
        "second",
    )

    assert "KeyboardInterrupt" == reply.error
    wait_until(lambda: have_ended(family), DEADLINE, "the end of all workers")
    assert (True, "RunKilled") == kernel.value("print((run.cancelled(), type(run.exception()).__name__))")


def test_an_interrupt_of_another_cell_leaves_the_run_alone(kernel: Kernel) -> None:
    kernel.run(ASKING + "run = two(train)\nuntil(run, here)")

    reply, _ = interrupted(kernel, "print('now', flush=True)\ntime.sleep(30)", "now")
    status = kernel.value("print((run.state.status, len(run.stacks())))")
    kernel.run("run.stop(); run.wait()")

    assert "KeyboardInterrupt" == reply.error
    assert ("running", 2) == status


def test_an_interrupt_of_a_cell_that_awaits_ends_the_run(kernel: Kernel) -> None:
    kernel.run(PLACES["sleep"])

    reply, family = interrupted(
        kernel,
        """
        run = two(train)
        until(run, here)
        print("now", flush=True)
        await run
        """,
        "now",
    )

    assert reply.error in ("KeyboardInterrupt", "CancelledError")
    wait_until(lambda: have_ended(family), DEADLINE, "the end of all workers")


# ---- stop and kill


def test_a_function_that_asks_stops_at_the_same_step_on_all_ranks(kernel: Kernel) -> None:
    kernel.run(ASKING)

    steps = kernel.value("""
        steps = []
        for attempt in range(10):
            run = two(train)
            until(run, here)
            run.stop()
            steps.append(run.results())
        print(steps)
    """)

    assert [step[0] for step in steps] == [step[1] for step in steps]


def test_a_stopped_function_that_never_asked_has_no_value(kernel: Kernel) -> None:
    kernel.run(PLACES["sleep"])

    reply = kernel.run("run = two(train)\nuntil(run, here)\nrun.stop()\nrun.result()")

    assert "RunStopped" == reply.error
    assert "ranks 0, 1 did not ask ddpnb.should_stop()" in reply.message
    assert (True, None) == kernel.value("print((run.cancelled(), run.state.first_failure))")


def test_what_a_function_raises_when_it_is_told_to_stop_is_no_failure_of_its_peer(kernel: Kernel) -> None:
    kernel.run("""
        def train():
            print("here")
            while not ddpnb.should_stop():
                time.sleep(0.01)
            dist.barrier()
            return "saved"
    """)

    results = kernel.value("run = two(train)\nuntil(run, here)\nrun.stop()\nprint(run.results())")

    assert {0: "saved", 1: "saved"} == results


def test_killed_workers_are_gone_and_the_result_says_so(kernel: Kernel) -> None:
    kernel.run(ASKING + "run = two(train)\nuntil(run, here)")
    family = kernel.workers()

    reply = kernel.run("run.kill()\nrun.result()")

    assert "RunKilled" == reply.error
    assert have_ended(family)
    assert ("killed", True) == kernel.value("print((run.state.status, run.cancelled()))")


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_run_can_be_ended_before_its_workers_are_up(kernel: Kernel, how: str) -> None:
    ended = kernel.value(f"""
        run = two(lambda: time.sleep(60))
        run.{how}()
        print((run.wait(30), run.cancelled()))
    """)

    assert (True, True) == ended


def test_a_thread_that_the_function_left_running_is_waited_for(kernel: Kernel) -> None:
    output = kernel.value("""
        def train():
            def later():
                time.sleep(0.3)
                print("written", flush=True)
            threading.Thread(target=later).start()
            return "value"

        run = two(train)
        print((run.result(), str(run.output(0))))
    """)

    assert ("value", "written\n") == output


def test_a_child_that_the_function_left_behind_is_gone_with_it(kernel: Kernel) -> None:
    children = kernel.value("""
        import subprocess
        print(list(two(lambda: subprocess.Popen(["sleep", "60"]).pid).results().values()))
    """)

    assert 2 == len(children)
    wait_until(lambda: not any(map(_lives, children)), DEADLINE, "the end of the children")


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ---- what the kernel keeps


def test_the_kernels_own_signal_handlers_are_left_alone(kernel: Kernel) -> None:
    unchanged = kernel.value("""
        import signal
        def handlers():
            numbers = signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1
            return [signal.getsignal(number) for number in numbers]
        before, mask = handlers(), signal.pthread_sigmask(signal.SIG_BLOCK, [])
        run = two(time.sleep, 0.1)
        during = handlers()
        run.result()
        print((before == during == handlers(), mask == signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    """)

    assert (True, True) == unchanged


def test_training_goes_on_after_the_launching_thread_has_ended(kernel: Kernel) -> None:
    kernel.run(ASKING)

    results = kernel.value("""
        runs = []
        thread = threading.Thread(target=lambda: runs.append(two(train)))
        thread.start()
        thread.join()
        until(runs[0], here)
        runs[0].stop()
        print(runs[0].results())
    """)

    assert results[0] == results[1] >= 3


# ---- the kernel's death


@pytest.fixture
def doomed_kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    kernel.run(PRELUDE.replace("%load_ext ddpnb", ""))
    yield kernel
    kernel.close()


@pytest.mark.parametrize(
    ("start_method", "disposition"),
    [("forkserver", "default_int_handler"), ("spawn", "SIG_IGN"), ("fork", "SIG_IGN")],
)
def test_nobody_survives_a_sigkill_of_the_kernel(doomed_kernel: Kernel, start_method: str, disposition: str) -> None:
    family = _training(doomed_kernel, f"start_method={start_method!r}", disposition)
    servants = doomed_kernel.descendants()

    psutil.Process(doomed_kernel.pid).kill()

    assert 6 == len(family)
    wait_until(lambda: have_ended(family), DEADLINE, "the end of all workers")
    wait_until(lambda: have_ended(servants), 10 * DEADLINE, "the end of the worker server")


def test_nobody_survives_an_ordinary_end_of_the_kernel(doomed_kernel: Kernel) -> None:
    family = _training(doomed_kernel)

    doomed_kernel.manager.shutdown_kernel()

    wait_until(lambda: have_ended(family), 2 * DEADLINE, "the end of all workers")


def _training(kernel: Kernel, options: str = "", disposition: str = "default_int_handler") -> list[psutil.Process]:
    """Have two ranks run with two DataLoader workers each; returns these six."""
    kernel.run(PLACES["a loop over a DataLoader"])
    reply = kernel.run(f"""
        import signal
        signal.signal(signal.SIGINT, signal.{disposition})
        run = ddpnb.Launcher(nproc_per_node=2, view=False, {options})(train)
        until(run, here)
    """)
    assert reply.error is None, reply.traceback
    return kernel.workers()
