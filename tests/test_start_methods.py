"""forkserver, spawn and fork: each launches, fails and ends alike; the server keeps its rules."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .conftest import PRELUDE, Kernel, have_ended, wait_until

ALL = """
def everything(culprit):
    # Trains a step, logs, prints, loads with a worker, and then fails on one rank.
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    model(torch.randn(8, 64)).sum().backward()
    loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=1)
    ddpnb.log(loss=sum(batch.sum() for batch in loader))
    print("rank", ddpnb.rank())
    dist.barrier()
    if ddpnb.rank() == culprit:
        time.sleep(0.3)  # the other gets to its barrier
        raise ValueError("bad batch")
    if culprit is not None:
        dist.barrier()
    return ddpnb.rank()

class Squares(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return index * index
"""


@pytest.fixture(scope="module")
def shared_kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    assert kernel.run(PRELUDE + ALL).error is None
    yield kernel
    kernel.close()


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_each_start_method_works_after_the_kernel_used_its_thread_pool(kernel: Kernel, start_method: str) -> None:
    kernel.run("""
        torch.set_num_threads(2)
        a = torch.randn(1500, 1500, requires_grad=True)
        (a @ a).sum().backward()
    """)

    seen = kernel.value(f"""
        launcher = ddpnb.Launcher(nproc_per_node=2, view=False, start_method={start_method!r})
        run = launcher(everything, None)
        print((run.results(), run.history["loss", 1].tolist(), dict(run.output())))
    """)

    assert {0: 0, 1: 1} == seen[0]
    assert [140.0] == seen[1]
    assert "rank 0\n" in seen[2][0]
    assert "rank 1\n" in seen[2][1]


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_each_start_method_blames_the_right_rank(kernel: Kernel, start_method: str) -> None:
    kernel.run(f"launcher = ddpnb.Launcher(nproc_per_node=2, view=False, start_method={start_method!r})")

    reply = kernel.run("launcher(everything, 1).result()")

    assert "ValueError" == reply.error
    assert reply.message.startswith("rank 1 raised ValueError in Cell In[")
    assert "rank 0: stood in barrier(), Cell In[" in reply.message


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_other_start_methods_stop_and_leave_nobody(kernel: Kernel, start_method: str) -> None:
    status = kernel.value(f"""
        def train():
            print("here")
            time.sleep(60)
        run = ddpnb.launch(train, nproc_per_node=2, view=False, start_method={start_method!r}, backend=None)
        until(run, here)
        run.stop()
        print((run.wait(20), run.state.status))
    """)

    assert (True, "stopped") == status
    assert [] == kernel.workers()


def test_a_forked_worker_prints_to_its_run_and_not_into_the_cell(kernel: Kernel) -> None:
    reply = kernel.run("""
        run = ddpnb.launch(lambda: print("from a worker"), nproc_per_node=2, view=False, start_method="fork")
        run.result()
    """)

    assert "" == reply.stdout
    assert "from a worker\n" == kernel.value("print(str.__repr__(run.output(1)))")


def test_fork_is_refused_once_cuda_is_initialised(kernel: Kernel) -> None:
    reply = kernel.run("""
        real, torch.cuda.is_initialized = torch.cuda.is_initialized, lambda: True
        try:
            ddpnb.launch(print, nproc_per_node=2, view=False, start_method="fork")
        finally:
            torch.cuda.is_initialized = real
    """)

    assert "ValueError" == reply.error
    assert "start_method='fork' cannot be used: CUDA is initialised in this kernel" in reply.message


# ---- the server


def test_the_server_has_one_thread_and_has_taken_its_name(kernel: Kernel) -> None:
    kernel.run("two(len, []).result()")
    pid = kernel.value("from ddpnb import server\nprint(server.pid())")

    assert 1 == len(os.listdir(f"/proc/{pid}/task"))
    assert "ddpnb-server" == Path(f"/proc/{pid}/comm").read_text().strip()
    assert os.getpgid(pid) == pid


def test_changed_start_up_variables_make_a_new_server_and_the_old_one_ends(kernel: Kernel) -> None:
    kernel.run("two(len, []).result()")
    old = psutil.Process(kernel.value("from ddpnb import server\nprint(server.pid())"))

    seen = kernel.value("""
        os.environ["OMP_WAIT_POLICY"] = "passive"
        run = two(os.getenv, "OMP_WAIT_POLICY")
        print((run.result(), run.state.notes))
        del os.environ["OMP_WAIT_POLICY"]
    """)

    assert ("passive", ("the worker server was started anew, since OMP_WAIT_POLICY changed",)) == seen
    assert old.pid != kernel.value("print(server.pid())")
    wait_until(lambda: have_ended([old]), what="the end of the old server")


def test_a_server_that_dies_is_replaced_and_no_rank_is_blamed(kernel: Kernel) -> None:
    server = kernel.value("two(len, []).result()\nfrom ddpnb import server\nprint(server.pid())")
    psutil.Process(server).kill()
    wait_until(lambda: have_ended([psutil.Process(server)]), what="the server's death")

    assert {0: 0, 1: 0} == kernel.value("print(two(len, []).results())")


def test_a_module_beside_the_notebook_does_not_become_the_servers(kernel: Kernel) -> None:
    value = kernel.value("""
        import pathlib, tempfile
        from ddpnb import server
        folder, home = tempfile.mkdtemp(), os.getcwd()
        pathlib.Path(folder, "random.py").write_text("raise SystemExit('not this one')")
        os.chdir(folder)
        try:
            os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "0"  # a new server
            print(two(lambda: 1).results())
        finally:
            del os.environ["TORCH_SHOW_CPP_STACKTRACES"]
            os.chdir(home)
            import shutil; shutil.rmtree(folder)
    """)

    assert {0: 1, 1: 1} == value


def test_a_server_that_another_library_started_works_too(fresh_kernel: Kernel) -> None:
    seen = fresh_kernel.value("""
        from multiprocessing import forkserver
        from ddpnb import server
        forkserver._forkserver._stop()
        server._ours = None
        forkserver.ensure_running()

        run = two(lambda: ddpnb.rank())
        print((run.results(), run.state.notes, server.is_ours()))
    """)

    assert {0: 0, 1: 1} == seen[0]
    assert ("another library has started this process's fork server without torch: workers start slower",) == seen[1]
    assert seen[2] is False


def test_importing_scikit_learn_keeps_the_server(kernel: Kernel) -> None:
    kernel.run("two(len, []).result()")
    old = kernel.value("from ddpnb import server\nprint(server.pid())")

    notes = kernel.value("import sklearn\nrun = two(len, [])\nrun.result()\nprint(run.state.notes)")

    assert () == notes
    assert old == kernel.value("print(server.pid())")


def test_a_server_that_cannot_load_ddpnb_is_not_waited_for_for_ever(fresh_kernel: Kernel) -> None:
    seen = fresh_kernel.value("""
        from multiprocessing import forkserver
        from ddpnb import launcher, server
        forkserver._forkserver._stop()
        launcher._SERVER_PATIENCE = 0.2
        real, forkserver.set_forkserver_preload = forkserver.set_forkserver_preload, lambda _: real(["not_there"])

        run = two(lambda: ddpnb.rank())
        print((run.results(), run.state.notes))
    """)

    assert {0: 0, 1: 1} == seen[0]
    assert ("the worker server could not load ddpnb: workers import for themselves, which takes seconds",) == seen[1]
