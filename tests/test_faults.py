"""Faults that somebody who tried to break ddpnb has found; each is mended, and stays so."""

from __future__ import annotations

import functools
import math
from unittest.mock import MagicMock

import pytest

import ddpnb
from ddpnb.errors import WorkerError, worker_error
from ddpnb.plan import Options, make_plan

from .conftest import Kernel


def test_ranks_and_launches_draw_different_random_numbers(kernel: Kernel) -> None:
    numbers = kernel.value("""
        def draw():
            import random
            import numpy
            return torch.rand(1).item(), numpy.random.rand(), random.random()
        print([*two(draw).results().values(), *two(draw).results().values()])
    """)

    for drawn in zip(*numbers, strict=True):
        assert 4 == len(set(drawn))


def test_what_is_changed_after_the_launch_arrives_as_it_was(kernel: Kernel) -> None:
    means = kernel.value("""
        x = torch.ones(10_000_000)
        run = two(lambda v: v.mean().item(), x)
        x.zero_()
        print(run.results())
    """)

    assert {0: 1.0, 1: 1.0} == means


def test_a_result_leaves_the_classes_of_the_notebook_alone(kernel: Kernel) -> None:
    kernel.run("""
        def act(): return 10
        class Net:
            n = 0
            def __call__(self): return act()
        def train():
            Net.n = 7
            return Net()
        back = two(train).result()
    """)
    kernel.run("def act(): return 100")

    assert (100, 0, True) == kernel.value("print((Net()(), Net.n, type(back) is Net))")


def test_attributes_of_tensors_travel_both_ways(kernel: Kernel) -> None:
    seen = kernel.value("""
        p = torch.nn.Parameter(torch.ones(1))
        p._no_weight_decay = True
        b = torch.nn.Buffer(torch.ones(1))
        def train():
            return p._no_weight_decay, isinstance(b, torch.nn.Buffer), p, b
        there, buffer_there, p2, b2 = two(train).result()
        print((there, buffer_there, p2._no_weight_decay, isinstance(b2, torch.nn.Buffer)))
    """)

    assert (True, True, True, True) == seen


def test_workers_have_the_environment_of_the_moment_of_launch(kernel: Kernel) -> None:
    seen = kernel.value("""
        two(len, []).result()
        os.environ["SET_LATER"] = "yes"
        os.environ["SET_AND_GONE"] = "no"
        two(len, []).result()
        del os.environ["SET_AND_GONE"]
        print(two(lambda: (os.environ.get("SET_LATER"), os.environ.get("SET_AND_GONE"))).results())
        del os.environ["SET_LATER"]
    """)

    assert {0: ("yes", None), 1: ("yes", None)} == seen


def test_a_watcher_that_raises_holds_up_nothing(kernel: Kernel) -> None:
    assert 0 == kernel.value("""
        run = two(len, [])
        run.watchers.append(lambda run: 1 / 0)
        print(run.result())
    """)


def test_a_callable_that_answers_to_any_name_gets_a_name() -> None:
    assert isinstance(make_plan(Options(nproc_per_node=1), MagicMock()).name, str)
    assert "print" == make_plan(Options(nproc_per_node=1), functools.partial(functools.partial(print))).name


def test_a_swept_away_folder_is_made_again(kernel: Kernel) -> None:
    seen = kernel.value("""
        import shutil
        from ddpnb import runtime
        two(len, []).result()
        shutil.rmtree(runtime.folder())
        print((two(len, []).results(), two(len, []).results()))
    """)

    assert ({0: 0, 1: 0}, {0: 0, 1: 0}) == seen


def test_an_error_after_the_stop_was_seen_is_the_run_s_error(kernel: Kernel) -> None:
    reply = kernel.run("""
        def train():
            print("here", flush=True)
            while not ddpnb.should_stop():
                time.sleep(0.01)
            raise OSError(28, "disk full while saving", "weights.pt")
        run = two(train)
        until(run, here)
        run.stop()
        try:
            run.result()
        except OSError as error:
            print((error.errno, error.filename, run.state.status))
    """)

    assert "(28, 'weights.pt', 'failed')" == reply.text


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ('progress([1, 2], 7, total=__import__("numpy").int64(2))', None),
        ('log({("a", 1): 1.0})', "TypeError"),
        ("log({1: 1.0})", "TypeError"),
        ("log(step=1)", "TypeError"),
        ("log(loss=1.0, step=2**63)", "ValueError"),
    ],
)
def test_odd_words_to_the_view_are_taken_or_refused_at_the_call(
    kernel: Kernel, what: str, expected: str | None
) -> None:
    name = kernel.value(f"""
        error = two(lambda: list(ddpnb.{what} or ())).exception()
        print(repr(error and type(error).__name__))
    """)

    assert expected == name


def test_a_loop_that_logs_without_end_shows_while_it_goes_on(kernel: Kernel) -> None:
    kernel.run("""
        def train():
            while not ddpnb.should_stop():
                ddpnb.log(a=1.0, b=2.0, c=3.0, d=4.0)
        run = two(train)
        until(run, lambda run: "d" in run.history)
        run.stop()
        run.result()
    """)


def test_asking_for_stacks_never_ends_a_rank_that_took_the_signal_away(kernel: Kernel) -> None:
    seen = kernel.value("""
        import signal
        from ddpnb.worker import STACK_SIGNAL
        def train():
            signal.signal(STACK_SIGNAL, signal.SIG_DFL)
            print("here", flush=True)
            while not ddpnb.should_stop():
                time.sleep(0.01)
            return "alive"
        run = two(train)
        until(run, here)
        stacks = dict(run.stacks())
        run.stop()
        print((stacks, run.result()))
    """)

    assert ({}, "alive") == seen


def test_asking_for_stacks_leaves_a_functions_own_handlers_alone(kernel: Kernel) -> None:
    seen = kernel.value("""
        import signal
        def train():
            called = []
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, lambda number, frame: called.append(number))
            print("here", flush=True)
            while not ddpnb.should_stop():
                time.sleep(0.01)
            return called
        run = two(train)
        until(run, here)
        stacks = run.stacks()
        run.stop()
        print((list(stacks), run.result()))
    """)

    assert ([0, 1], []) == seen


def test_a_cached_function_of_a_cell_travels(kernel: Kernel) -> None:
    value = kernel.value("""
        import functools
        @functools.lru_cache(maxsize=8)
        def table(n): return n * n
        print(two(lambda: table(3)).result())
    """)

    assert 9 == value


def test_handlers_that_the_function_registered_for_the_exit_are_called(kernel: Kernel) -> None:
    output = kernel.value("""
        def train():
            import atexit
            atexit.register(print, "uploaded")
        run = two(train)
        run.result()
        print(str.__repr__(run.output(1)))
    """)

    assert "uploaded\n" == output


def test_an_executor_that_the_function_left_open_finishes_its_work_and_ends(kernel: Kernel) -> None:
    output = kernel.value("""
        def train():
            from concurrent.futures import ThreadPoolExecutor
            global pool
            pool = ThreadPoolExecutor(2)
            pool.submit(lambda: (time.sleep(0.2), print("saved", flush=True)))
            return "value"
        run = two(train)
        print((run.result(30), str(run.output(1))))
    """)

    assert ("value", "saved\n") == output


def test_a_child_that_the_function_forked_may_exit(kernel: Kernel) -> None:
    codes = kernel.value("""
        def train():
            child = os.fork()
            if not child:
                sys.exit(3)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(two(train).results())
    """)

    assert {0: 3, 1: 3} == codes


def test_errors_that_hold_what_cannot_travel_keep_their_type(kernel: Kernel) -> None:
    reply = kernel.run("""
        def train():
            raise ValueError("bad batch", threading.Lock())
        try:
            two(train).result()
        except ValueError as error:
            print(isinstance(error, ddpnb.WorkerError), "bad batch" in str(error))
    """)

    assert "True True" == reply.text


def test_memory_errors_are_caught_as_such_and_syntax_errors_show_their_report() -> None:
    memory = worker_error("rank 1 raised MemoryError", rank=1, exitcode=None, cause=MemoryError("too much"))
    syntax = worker_error("rank 1 raised SyntaxError", rank=1, exitcode=None, cause=SyntaxError("bad"))

    assert isinstance(memory, MemoryError)
    assert isinstance(memory, WorkerError)
    assert "rank 1 raised MemoryError" == str(memory)
    assert not isinstance(syntax, SyntaxError)
    assert "rank 1 raised SyntaxError" == str(syntax)


def test_waiting_for_ever_may_be_said_as_infinity() -> None:
    run = ddpnb.launch(len, [], nproc_per_node=0, view=False)

    assert 0 == run.result(math.inf)


def test_a_variable_that_no_environment_can_hold_is_refused() -> None:
    for name, value in (("A=B", "x"), ("", "x"), ("A", "x\0y")):
        with pytest.raises(ValueError, match="cannot be an environment variable"):
            ddpnb.launch(len, [], env={name: value})
