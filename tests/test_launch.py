"""A function goes out to workers and its values come back, whatever the kernel did before."""

from __future__ import annotations

import pytest

from .conftest import Kernel

# ---- values


def test_every_rank_returns_a_value(kernel: Kernel) -> None:
    values = kernel.value("run = two(lambda: 10 + ddpnb.rank()); print((run.result(), run.results()))")

    assert (10, {0: 10, 1: 11}) == values


def test_arguments_captures_and_closures_go_along(kernel: Kernel) -> None:
    kernel.run("""
        offset = 100

        def make(factor):
            def train(x, *more, scale=1, **named):
                return (offset + factor * x * scale, more, named)
            return train
    """)

    value = kernel.value("print(two(make(3), 1, 2, scale=10, name='a').result())")

    assert (130, (2,), {"name": "a"}) == value


def test_the_process_group_is_there_and_torchruns_variables_are_set(kernel: Kernel) -> None:
    kernel.run("""
        def train():
            total = torch.tensor([dist.get_rank() + 1.0])
            dist.all_reduce(total)
            names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
            return total.item(), dist.get_backend(), [os.environ[name] for name in names]
    """)

    values = kernel.value("print(two(train).results())")

    assert (3.0, "gloo", ["0", "0", "2", "2", "0", "127.0.0.1"]) == values[0]
    assert (3.0, "gloo", ["1", "1", "2", "2", "0", "127.0.0.1"]) == values[1]


def test_ddp_averages_the_gradients_of_all_ranks(kernel: Kernel) -> None:
    kernel.run("""
        def train():
            torch.manual_seed(0)
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
            model(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
            return model.module.weight.grad.tolist()
    """)

    values = kernel.value("print(two(train).results())")

    assert {0: [[1.5, 1.5]], 1: [[1.5, 1.5]]} == values


def test_destroying_the_group_in_the_function_is_fine(kernel: Kernel) -> None:
    value = kernel.value("print(two(lambda: dist.destroy_process_group()).results())")

    assert {0: None, 1: None} == value


def test_one_rank_and_four_ranks_work_too(kernel: Kernel) -> None:
    values = kernel.value("""
        def train():
            dist.barrier()
            return dist.get_world_size()
        print([ddpnb.launch(train, nproc_per_node=ranks, view=False).results() for ranks in (1, 4)])
    """)

    assert [{0: 1}, {0: 4, 1: 4, 2: 4, 3: 4}] == values


def test_two_runs_go_on_at_the_same_time(kernel: Kernel) -> None:
    values = kernel.value("""
        def train(add):
            total = torch.tensor(float(add))
            for _ in range(50):
                dist.all_reduce(total.clone())
            return add
        runs = [two(train, add) for add in range(3)]
        print([run.result() for run in runs])
    """)

    assert [0, 1, 2] == values


def test_a_dataset_class_from_a_cell_works_with_dataloader_workers(kernel: Kernel) -> None:
    values = kernel.value("""
        class Squares(torch.utils.data.Dataset):
            def __len__(self): return 8
            def __getitem__(self, index): return index * index

        def train():
            loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=2)
            return [batch.tolist() for batch in loader]

        print(two(train).result())
    """)

    assert [[0, 1, 4, 9], [16, 25, 36, 49]] == values


def test_a_large_result_arrives_intact(kernel: Kernel) -> None:
    intact = kernel.value("""
        def train():
            return torch.arange(12_500_000, dtype=torch.float32), bytes(50_000_000)

        tensor, data = two(train).results()[1]
        print((tensor.equal(torch.arange(12_500_000, dtype=torch.float32)), data == bytes(50_000_000)))
    """)

    assert (True, True) == intact


def test_a_large_captured_tensor_arrives_intact_and_is_each_ranks_own(kernel: Kernel) -> None:
    values = kernel.value("""
        table = torch.arange(16 * 2**20, dtype=torch.float32)  # 64 MB
        view = table[:10]

        def train():
            intact = table.equal(torch.arange(16 * 2**20, dtype=torch.float32))
            dist.barrier()
            table[0] = ddpnb.rank() + 5.0
            dist.barrier()
            return intact, table[0].item(), view[0].item()

        print((two(train).results(), table[0].item()))
    """)

    assert ({0: (True, 5.0, 5.0), 1: (True, 6.0, 6.0)}, 0.0) == values


# ---- whatever the kernel did before


def test_ten_launches_after_the_kernel_used_its_thread_pool_and_autograd(kernel: Kernel) -> None:
    kernel.run("""
        torch.set_num_threads(2)
        a = torch.randn(1500, 1500, requires_grad=True)
        (a @ a).sum().backward()

        template = '''
        def train():
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
            model(torch.randn(8, 64)).sum().backward()
            return {number}
        '''
    """)

    values = kernel.value("""
        import textwrap
        values = []
        for number in range(10):
            exec(textwrap.dedent(template.format(number=number)))
            values.append(two(train).result())
        print(values)
    """)

    assert list(range(10)) == values


def test_a_redefined_class_is_the_new_one_in_the_workers(kernel: Kernel) -> None:
    kernel.run("class Net:\n    size = 1\ndef train(): return Net.size")
    first = kernel.value("print(two(train).result())")
    kernel.run("class Net:\n    size = 2")

    second = kernel.value("print(two(train).result())")

    assert (1, 2) == (first, second)


def test_a_path_in_the_names_of_the_notebook_is_not_run_in_the_workers(kernel: Kernel) -> None:
    value = kernel.value("""
        __file__ = "/no/such/notebook.ipynb"  # as VS Code sets it
        try:
            print((two(lambda: 1).result(), __file__))
        finally:
            del __file__
    """)

    assert (1, "/no/such/notebook.ipynb") == value


def test_a_module_beside_the_notebook_can_be_used_by_the_function(kernel: Kernel) -> None:
    value = kernel.value("""
        import tempfile
        with tempfile.TemporaryDirectory() as folder:
            open(os.path.join(folder, "beside.py"), "w").write("answer = 42")
            sys.path.insert(0, folder)
            import beside
            def train():
                import beside
                return beside.answer
            print(two(train).results())
            sys.path.remove(folder)
    """)

    assert {0: 42, 1: 42} == value


# ---- output


def test_all_that_ranks_print_is_kept_by_rank(kernel: Kernel) -> None:
    kernel.run("""
        import ctypes, subprocess, warnings

        def train():
            print("python", ddpnb.rank())
            print("error stream", file=sys.stderr)
            os.write(1, b"descriptor\\n")
            libc = ctypes.CDLL(None)
            libc.puts(b"from C")
            libc.printf(b"no newline, not flushed")
            warnings.warn("careful")
            subprocess.run(["echo", "a child"])
    """)

    output = kernel.value("run = two(train); run.result(); print(dict.__repr__(run.output()))")

    for rank in (0, 1):
        for words in (
            f"python {rank}\n",
            "error stream\n",
            "descriptor\n",
            "from C\n",
            "no newline, not flushed",
            "UserWarning: careful",
            "a child\n",
        ):
            assert words in output[rank]


def test_output_of_one_rank_is_text_and_an_unknown_rank_is_refused(kernel: Kernel) -> None:
    shown = kernel.value("run = two(lambda: print(ddpnb.rank())); run.result(); print(str.__repr__(run.output(1)))")

    assert "1\n" == shown

    reply = kernel.run("run.output(2)")

    assert "IndexError" == reply.error
    assert "there is no rank 2; ranks are 0 … 1" in reply.message


def test_nothing_of_a_flood_is_lost_that_fits(kernel: Kernel) -> None:
    intact = kernel.value("""
        def train():
            for line in range(20_000):
                print(line)

        run = two(train)
        run.result()
        print([run.output(rank) == "".join(f"{line}\\n" for line in range(20_000)) for rank in (0, 1)])
    """)

    assert [True, True] == intact


def test_an_endless_print_is_bounded_and_can_be_stopped_and_holds_up_nobody(kernel: Kernel) -> None:
    seen = kernel.value("""
        def train():
            while ddpnb.rank() == 0:
                print("x" * 100)
            while True:
                ddpnb.log(loss=1.0)
                time.sleep(0.01)

        run = two(train)
        until(run, lambda run: run.state.ranks[0].output.num_dropped and "loss" in run.history)
        run.stop()
        run.wait()
        print((run.state.status, len(run.output(0)) < 1_500_000, run.output(0).startswith("[")))
    """)

    assert ("stopped", True, True) == seen


def test_a_function_may_close_or_replace_its_output(kernel: Kernel) -> None:
    values = kernel.value("""
        def train():
            sys.stdout.close()
            sys.stdout = None
            return 1
        print(two(train).results())
    """)

    assert {0: 1, 1: 1} == values


def test_a_failure_is_told_even_where_the_error_stream_was_closed(kernel: Kernel) -> None:
    seen = kernel.value("""
        def train():
            sys.stderr.close()
            raise ValueError("bad batch")
        run = two(train)
        print((type(run.exception()).__name__, run.output(0).splitlines()[-1]))
    """)

    assert ("ValueError", "ValueError: bad batch") == seen


# ---- the run


def test_a_run_is_a_future(kernel: Kernel) -> None:
    seen = kernel.value("""
        def train():
            while not ddpnb.should_stop():
                print("here")
                time.sleep(0.01)
            return 1

        run, called = two(train), threading.Event()
        until(run, here)
        run.add_done_callback(lambda run: called.set())
        before = (run.done(), run.running(), run.wait(0.01), run.cancelled())
        run.stop()
        after = (run.wait(), run.done(), run.running(), run.exception(), run.result(), called.wait(5))
        late = []
        run.add_done_callback(late.append)
        print((before, after, late == [run]))
    """)

    assert ((False, True, False, False), (True, True, False, None, 1, True), True) == seen


def test_a_timeout_of_the_wait_is_no_worker_error_and_the_run_goes_on(kernel: Kernel) -> None:
    seen = kernel.value("""
        run = two(time.sleep, 0.5)
        try:
            run.result(timeout=0.01)
        except TimeoutError as error:
            print((isinstance(error, ddpnb.WorkerError), str(error), run.result()))
    """)

    assert (False, "sleep is still running after 0.01 s; wait longer, or run.stop()", None) == seen


def test_a_run_can_be_awaited(kernel: Kernel) -> None:
    assert 7 == kernel.value("print(await two(lambda: 7))")

    reply = kernel.run("await two(lambda: {}['missing'])")

    assert "KeyError" == reply.error


def test_a_done_callback_may_ask_for_the_result(kernel: Kernel) -> None:
    value = kernel.value("""
        results, told = [], threading.Event()
        def tell(run):
            results.append(run.result())
            told.set()
        run = two(lambda: 3)
        run.add_done_callback(tell)
        print((told.wait(20), results))
    """)

    assert (True, [3]) == value


def test_stacks_name_the_line_where_each_rank_stands(kernel: Kernel) -> None:
    stacks = kernel.value("""
        import ctypes

        def train():
            print("here", flush=True)
            if ddpnb.rank() == 0:
                dist.barrier()
            ctypes.PyDLL(None).sleep(60)  # holds the GIL

        run = two(train)
        until(run, here)
        stacks = run.stacks()
        while "print" in stacks[0] + stacks[1]:  # it has been said, but the line is not over
            stacks = run.stacks()
        print(dict(stacks))
        run.kill()
    """)

    assert "line 6, in train\n    dist.barrier()" in stacks[0]
    assert "line 7, in train\n    ctypes.PyDLL(None).sleep(60)" in stacks[1]


def test_a_worker_that_stands_still_does_not_delay_the_stacks_of_others(kernel: Kernel) -> None:
    seen = kernel.value("""
        import signal
        def train():
            print("here", flush=True)
            time.sleep(60)

        run = two(train)
        until(run, here)
        os.kill(run.state.ranks[0].pid, signal.SIGSTOP)
        stacks = run.stacks()
        run.stop()
        print((list(stacks), "in train" in stacks[1], run.wait(10)))
    """)

    assert ([1], True, True) == seen


def test_run_is_one_stable_line_of_text(kernel: Kernel) -> None:
    during, after = kernel.value("""
        run = ddpnb.launch(time.sleep, 0.2, nproc_per_node=2, view=False, name="nap")
        during = repr(run)
        run.wait()
        print((during, repr(run)))
    """)

    assert "nap" in during
    assert during == after


# ---- options


def test_threads_per_worker_are_the_cores_divided_or_what_was_asked_for(kernel: Kernel) -> None:
    values = kernel.value("""
        def train():
            return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]
        cores = len(os.sched_getaffinity(0))
        default = two(train).result()
        chosen = ddpnb.launch(train, nproc_per_node=2, view=False, threads_per_worker=3).result()
        print((default[0] == max(1, cores // 2), chosen))
    """)

    assert (True, (3, "3")) == values


def test_env_reaches_the_workers_and_not_the_kernel(kernel: Kernel) -> None:
    value = kernel.value("""
        run = ddpnb.launch(os.getenv, "COLOUR", nproc_per_node=2, view=False, env={"COLOUR": "red"})
        print((run.results(), os.getenv("COLOUR")))
    """)

    assert ({0: "red", 1: "red"}, None) == value


def test_name_and_launcher_keep_to_what_was_said(kernel: Kernel) -> None:
    value = kernel.value("""
        def train(backend, name):
            return backend, name, dist.is_initialized()
        launcher = ddpnb.Launcher(nproc_per_node=2, view=False, backend=None, name="both")
        run = launcher(train, "own", name="mine")
        print((run.result(), run.name, two(len, []).name))
    """)

    assert (("own", "mine", False), "both", "len") == value


def test_the_timeout_of_collectives_is_the_one_asked_for(kernel: Kernel) -> None:
    reply = kernel.run("""
        def train():
            if ddpnb.rank() == 0:
                dist.barrier()
            time.sleep(30)
        ddpnb.launch(train, nproc_per_node=2, view=False, timeout=1).result()
    """)

    assert "rank 0 raised" in reply.message
    assert "rank 1: stood in" in reply.message


def test_a_worker_cannot_launch_workers(kernel: Kernel) -> None:
    reply = kernel.run("two(lambda: ddpnb.launch(print, nproc_per_node=2)).result()")

    assert "RuntimeError" == reply.error
    assert "this is a ddpnb worker: it cannot launch workers of its own" in reply.message


# ---- in place: nproc_per_node=0


def test_in_place_the_value_itself_comes_back(kernel: Kernel) -> None:
    value = kernel.value("""
        thing = object()
        run = ddpnb.launch(lambda: (thing, os.getpid()), nproc_per_node=0, view=False)
        print((run.result()[0] is thing, run.result()[1] == os.getpid(), run.done(), run.results()[0][0] is thing))
    """)

    assert (True, True, True, True) == value


def test_in_place_an_exception_passes_through_as_it_is(kernel: Kernel) -> None:
    reply = kernel.run("""
        def train():
            raise KeyError("missing")
        ddpnb.launch(train, nproc_per_node=0, view=False)
    """)

    assert ("KeyError", "'missing'") == (reply.error, reply.message)
    assert "in train()" in reply.traceback


def test_in_place_an_interrupt_ends_the_function_itself(kernel: Kernel) -> None:
    reply = kernel.run("""
        import signal
        def train():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
        ddpnb.launch(train, nproc_per_node=0, view=False)
    """)

    assert "KeyboardInterrupt" == reply.error


def test_in_place_ddp_and_the_context_work_and_all_is_restored(kernel: Kernel) -> None:
    seen = kernel.value("""
        def train():
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
            model(torch.ones(1, 2)).sum().backward()
            for step in ddpnb.progress(range(3), "step"):
                ddpnb.log(loss=step)
            context = (ddpnb.rank(), ddpnb.local_rank(), ddpnb.world_size(), ddpnb.local_world_size(),
                       ddpnb.node_rank(), ddpnb.is_rank_zero(), str(ddpnb.device()), ddpnb.should_stop())
            return context, os.environ["WORLD_SIZE"]

        before, init = dict(os.environ), dist.init_process_group
        run = ddpnb.launch(train, nproc_per_node=0, view=False, env={"COLOUR": "red"})
        restored = (dict(os.environ) == before, dist.is_initialized(), dist.init_process_group is init)
        print((run.result(), run.history["loss"].tolist(), restored, run.state.status))
    """)

    assert ((0, 0, 1, 1, 0, True, "cpu", False), "1") == seen[0]
    assert [0.0, 1.0, 2.0] == seen[1]
    assert (True, False, True) == seen[2]
    assert "finished" == seen[3]


def test_in_place_leaves_no_thread_even_after_an_exception(kernel: Kernel) -> None:
    seen = kernel.value("""
        def names():
            return sorted(thread.name for thread in threading.enumerate())
        before = names()
        for function in (lambda: 1, lambda: 1 / 0):
            try:
                ddpnb.launch(function, nproc_per_node=0, view=False)
            except ZeroDivisionError:
                pass
        print((before == names(), dist.is_initialized(), ddpnb.world_size()))
    """)

    assert (True, False, 1) == seen


@pytest.mark.gpu
def test_a_cuda_tensor_comes_back_on_the_cpu(kernel: Kernel) -> None:
    values = kernel.value("""
        def train():
            return torch.full((3,), 1.0 + ddpnb.rank(), device=ddpnb.device())
        run = ddpnb.launch(train, nproc_per_node=1, view=False)
        print((run.result().tolist(), run.result().device.type, run.state.ranks[0].device))
    """)

    assert ([1.0, 1.0, 1.0], "cpu", "cuda:0") == values
