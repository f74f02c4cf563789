"""Bad input gets a clear error: a mistake in the call before any process starts, all else on the right rank."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest

import ddpnb

from .conftest import Kernel

lock = threading.Lock()


def train(epochs: int = 1, lr: float = 0.1) -> None:
    """Does nothing."""


def train_on(rank: int, world_size: int) -> None:
    """Wants to be told its rank."""


def train_with_timeout(timeout: float) -> None:
    """Has a parameter that is an option too."""


async def train_later() -> None:
    """Is a coroutine function."""


def uses_lock() -> None:
    """Captures what cannot be pickled."""
    with lock:
        pass


def processes_and_threads() -> tuple[list[psutil.Process], list[threading.Thread]]:
    return psutil.Process().children(recursive=True), threading.enumerate()


BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"nproc_per_node": -1}, ValueError, "nproc_per_node=-1 is below 0: it is the number of workers, 0 for none"),
    ({"nproc_per_node": 1.5}, TypeError, "nproc_per_node=1.5 is not an int"),
    ({"nproc_per_node": True}, TypeError, "nproc_per_node=True is not an int"),
    ({"nproc_per_node": "two"}, TypeError, "nproc_per_node='two' is not an int: it is the number of workers"),
    ({"nproc_per_node": None}, TypeError, "nproc_per_node=None is not an int"),
    ({"backend": "glo"}, ValueError, "backend='glo' is none of 'gloo', 'nccl', 'auto', None; did you mean 'gloo'?"),
    ({"backend": 3}, ValueError, "backend=3 is none of"),
    ({"start_method": "forkserve"}, ValueError, "did you mean 'forkserver'?"),
    ({"view": "yes"}, ValueError, "view='yes' is none of None, True, False"),
    ({"timeout": 0}, ValueError, "timeout=0 is not a positive, finite number of seconds"),
    ({"timeout": float("inf")}, ValueError, "timeout=inf is not a positive"),
    ({"timeout": "long"}, TypeError, "timeout='long' is not a number of seconds"),
    ({"stop_timeout": -1.0}, ValueError, "stop_timeout=-1.0 is not a positive"),
    ({"threads_per_worker": 0}, ValueError, "threads_per_worker=0 is below 1"),
    ({"env": {"A": 1}}, TypeError, "names and values of environment variables are str"),
    ({"name": 7}, TypeError, "name=7 is not a str"),
    ({"run_dir": 7}, TypeError, "run_dir=7 is not a path: it is a folder's path, or None"),
    ({"nnodes": 0}, ValueError, "nnodes=0 is below 1: it is the number of nodes"),
    ({"nnodes": "two"}, TypeError, "nnodes='two' is not an int"),
    ({"nnodes": 2}, ValueError, "nnodes=2 needs master_addr, an address of node 0 that every node reaches"),
    ({"node_rank": -1}, ValueError, "node_rank=-1 is below 0: it is this node's number, 0 … nnodes - 1"),
    ({"node_rank": 1}, ValueError, "node_rank=1 with nnodes=1: nodes are counted 0 … 0"),
    ({"nnodes": 2, "node_rank": 2, "master_addr": "10.0.0.1"}, ValueError, "nodes are counted 0 … 1"),
    ({"master_addr": 7}, TypeError, "master_addr=7 is not a str: it is an address of node 0"),
    ({"master_port": 29501}, ValueError, "master_port=29501 is a port of master_addr: pass that as well"),
    ({"master_addr": "10.0.0.1", "master_port": 0}, ValueError, "master_port=0 is below 1: it is the port of node 0"),
    ({"master_addr": "10.0.0.1", "master_port": 65536}, ValueError, "master_port=65536 is above 65535"),
    (
        {"nnodes": 2, "master_addr": "10.0.0.1", "nproc_per_node": 0},
        ValueError,
        "with nnodes > 1 each node has workers",
    ),
    ({"nproc_per_nod": 2}, TypeError, "did you mean 'nproc_per_node'?"),
]


@pytest.mark.parametrize(("options", "kind", "words"), BAD_OPTIONS, ids=[str(case[0]) for case in BAD_OPTIONS])
def test_a_bad_option_is_refused_before_any_process_starts(
    options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    before = processes_and_threads()

    with pytest.raises(kind, match=re.escape(words)):
        ddpnb.launch(train, **options)

    assert before == processes_and_threads()


BAD_CALLS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no function": (
        lambda: ddpnb.launch(3),  # type: ignore[arg-type]
        TypeError,
        "launch takes a function, but got an int. Did you call it? launch(train, 5), not launch(train(5))",
    ),
    "a called function": (
        lambda: ddpnb.launch(train()),  # type: ignore[arg-type,func-returns-value]
        TypeError,
        "launch takes a function, but got None. Did you call it?",
    ),
    "a called function that returns much": (
        lambda: ddpnb.launch({"weight": list(range(10_000))}),  # type: ignore[arg-type]
        TypeError,
        "launch takes a function, but got a dict. Did you call it?",
    ),
    "a coroutine function": (lambda: ddpnb.launch(train_later), TypeError, "train_later is a coroutine function"),
    "too many arguments": (lambda: ddpnb.launch(train, 1, 2, 3), TypeError, "too many positional arguments"),
    "an unknown argument": (lambda: ddpnb.launch(train, epoch=1), TypeError, "did you mean 'epochs'?"),
    "an option with a launcher's arguments": (
        lambda: ddpnb.Launcher()(train, timeout=3),
        TypeError,
        "'timeout' is an option, no parameter of train(): a Launcher takes its options when it is made, "
        "Launcher(timeout=…)",
    ),
    "no rank": (lambda: ddpnb.launch(train_on), TypeError, "launch(lambda: main(ddpnb.rank(), ddpnb.world_size(), …))"),
    "a parameter named as an option": (
        lambda: ddpnb.launch(train_with_timeout, timeout=3),
        ValueError,
        "'timeout' is an option of launch and a parameter of train_with_timeout() as well. Bind it first, "
        "launch(functools.partial(train_with_timeout, timeout=…))",
    ),
    "an argument that cannot travel": (
        lambda: ddpnb.launch(train, lock),
        ddpnb.UnpicklableError,
        "argument 'epochs' of train() (_thread.lock) cannot travel to the workers",
    ),
    "an argument that cannot travel deep inside": (
        lambda: ddpnb.launch(train, {"a": [1, {"b": lock}]}),
        ddpnb.UnpicklableError,
        "argument 'epochs' of train()['a'][1]['b'] (_thread.lock)",
    ),
}


@pytest.mark.parametrize("mistake", BAD_CALLS)
def test_a_bad_call_is_refused_before_any_process_starts(mistake: str) -> None:
    call, kind, words = BAD_CALLS[mistake]
    before = processes_and_threads()

    with pytest.raises(kind, match=re.escape(words)):
        call()

    assert before == processes_and_threads()


def test_a_bound_parameter_named_as_an_option_is_no_collision(kernel: Kernel) -> None:
    values = kernel.value("""
        import functools
        def train(timeout): return timeout
        bound = ddpnb.launch(functools.partial(train, 3), nproc_per_node=1, view=False).result()
        print((bound, ddpnb.Launcher(nproc_per_node=1, view=False)(train, timeout=4).result()))
    """)

    assert (3, 4) == values


def test_partials_are_named_by_their_function() -> None:
    with pytest.raises(ValueError, match=re.escape("a parameter of train_with_timeout() as well")):
        ddpnb.launch(functools.partial(train_with_timeout, timeout=3), timeout=5)


@pytest.mark.skipif(__import__("torch").cuda.is_available(), reason="there are GPUs here")
def test_nccl_without_gpus_is_refused() -> None:
    words = "nproc_per_node=2 with backend='nccl' needs a GPU for each worker, and no GPU is here"

    with pytest.raises(ValueError, match=re.escape(words)):
        ddpnb.launch(train, nproc_per_node=2, backend="nccl")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("lock = threading.Lock()\ndef train(): return lock", "global variable 'lock' used by train() (_thread.lock)"),
        (
            "def make(lock):\n    def train(): return lock\n    return train\ntrain = make(threading.Lock())",
            "variable 'lock' captured by train() (_thread.lock)",
        ),
        (
            "lock = threading.Lock()\ndef helper(): return lock\ndef train(): return helper()",
            "global variable 'lock' used by helper() (_thread.lock)",
        ),
        ("def train(x=threading.Lock()): pass", "default 0 of train() (_thread.lock)"),
        (
            "settings = {'locks': [threading.Lock()]}\ndef train(): return settings",
            "global variable 'settings' used by train()['locks'][0] (_thread.lock)",
        ),
    ],
)
def test_what_a_cells_function_captures_and_cannot_travel_is_named(kernel: Kernel, code: str, words: str) -> None:
    kernel.run(code)
    before = kernel.descendants()

    reply = kernel.run("two(train)")

    assert "UnpicklableError" == reply.error
    assert f"{words} cannot travel to the workers: " in reply.message
    assert before == kernel.descendants()


# ---- in the run


@pytest.mark.parametrize("code", [0, 3])
def test_sys_exit_is_an_error_that_says_what_to_write(kernel: Kernel, code: int) -> None:
    kernel.run(f"""
        def train():
            if ddpnb.rank() == 1:
                sys.exit({code})
            dist.barrier()
    """)

    reply = kernel.run("two(train).result()")

    assert "WorkerError" == reply.error
    assert reply.message.startswith("rank 1 raised SystemExit in Cell In[")
    assert f"the function called sys.exit({code}); a value is handed over with return" in reply.message


def test_a_result_that_cannot_be_pickled_is_named(kernel: Kernel) -> None:
    reply = kernel.run("two(lambda: {'model': [1, threading.Lock()]}).result()")

    assert "UnpicklableError" == reply.error
    assert "the returned value['model'][1] (_thread.lock) cannot be pickled" in reply.message


def test_a_result_of_a_class_from_the_cell_arrives(kernel: Kernel) -> None:
    value = kernel.value("""
        class Outcome:
            def __init__(self, loss): self.loss = loss
        print(two(lambda: Outcome(0.5)).result().loss)
    """)

    assert 0.5 == value


def test_an_exception_that_cannot_be_turned_into_text_is_told(kernel: Kernel) -> None:
    reply = kernel.run("""
        class Mute(Exception):
            def __str__(self): raise RuntimeError("no words")
        def train():
            raise Mute()
        two(train).result()
    """)

    assert "raised Mute in Cell In[" in reply.message
    assert "its __str__ raised RuntimeError" in reply.message


def test_an_exception_with_a_lock_in_it_keeps_its_type_and_its_words(kernel: Kernel) -> None:
    reply = kernel.run("""
        def train():
            error = ValueError("held")
            error.lock = threading.Lock()
            raise error
        two(train).result()
    """)

    assert "ValueError" == reply.error
    assert "raised ValueError in Cell In[" in reply.message


def test_a_result_that_cannot_be_unpickled_in_the_kernel_raises_there(kernel: Kernel) -> None:
    reply = kernel.run("""
        def explode(): raise ValueError("not here")
        class Trap:
            def __reduce__(self): return explode, ()
        run = two(lambda: Trap())
        run.result()
    """)

    assert "ValueError" == reply.error
    assert ("finished", True) == kernel.value("print((run.state.status, run.done()))")


def test_another_group_of_the_functions_own_gets_advice(kernel: Kernel) -> None:
    reply = kernel.run("""
        def train():
            dist.init_process_group("gloo", rank=0, world_size=1)
        two(train).result()
    """)

    assert reply.error is not None
    assert "launch with backend=None" in reply.message


def test_an_unfit_world_of_the_functions_own_group_ends_in_an_error(kernel: Kernel) -> None:
    reply = kernel.run("""
        def train():
            dist.init_process_group("gloo", rank=5, world_size=2)
        ddpnb.launch(train, nproc_per_node=2, view=False, backend=None, timeout=3).result()
    """)

    assert reply.error is not None
    assert " raised " in reply.message
