"""How fast ddpnb launches, blames, stops and cleans up, beside plain torch, accelerate and Lightning Fabric.

    python -m tests.benchmarks.launch                       # all tables, about 15 minutes
    python -m tests.benchmarks.launch --quick --only steps  # a look at one section

Run it from the repository's root. Everything happens in real ipykernels, on 2 gloo ranks unless said otherwise; time is
`time.monotonic()`, one clock for the kernel and its workers. accelerate and lightning-fabric are measured where they
are installed. On a busy machine the ratios within one run tell more than the times.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.bench import (
    COLUMNS,
    BenchKernel,
    Report,
    Sample,
    duration,
    main,
    make_step,
    sources,
)
from tests.conftest import wait_until

START_METHODS = ("forkserver", "spawn", "fork")

# ---- launch → first optimizer step → result in the cell


def first_step(weigh: bool) -> dict[str, float]:
    """What every way launches: DDP of a small net and one optimizer step. Says when, and the memory if asked."""
    import time

    import torch
    from torch import nn

    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(64, 32)).square().mean().backward()
    optimizer.step()
    stepped, pss = time.monotonic(), 0.0
    if weigh:
        torch.distributed.barrier()  # pages that the peer shares count half: it must be there as well
        with open("/proc/self/smaps_rollup") as file:
            pss = next(int(line.split()[1]) / 1024 for line in file if line.startswith("Pss:"))
        torch.distributed.barrier()
    return {"stepped": stepped, "pss": pss}


def enter(rank: int, port: int, answers: Any, weigh: bool) -> None:
    """The same under plain torch, which makes no process group and returns nothing."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    value = first_step(weigh)
    if rank == 0:
        answers.put(value)
    dist.destroy_process_group()


def enter_elastic(answers: Any, weigh: bool) -> None:
    """The same under accelerate, which sets torchrun's variables."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = first_step(weigh)
    if dist.get_rank() == 0:
        answers.put(value)
    dist.destroy_process_group()


def enter_fabric(fabric: Any, weigh: bool) -> dict[str, float]:
    """The same under Lightning Fabric, which makes the group and returns rank 0's value."""
    return first_step(weigh)


def free_port() -> int:
    """A port that was free a moment ago."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@dataclass(frozen=True)
class Way:
    """One way to launch `first_step`."""

    name: str
    launch: str
    """Code that launches once with `weigh` and sets `value` to what rank 0 said."""
    prepare: str = ""
    """What its fresh kernel does first."""
    is_quick: bool = False
    """A relaunch takes a fraction of a second: many are made."""
    is_first_only: bool = False
    needs: str = "torch"
    """A package that must be installed."""


_DDPNB = "value = ddpnb.launch(first_step, weigh, nproc_per_node=2, start_method={method!r}, view={view}).result()"
_PLAIN = """
answers = mp.get_context({method!r}).SimpleQueue()
{launch}
value = answers.get()
"""
_FORK = _PLAIN.format(
    method="fork",
    launch="mp.start_processes(enter, args=(free_port(), answers, weigh), nprocs=2, start_method='fork')",
)
_SPAWN = _PLAIN.format(method="spawn", launch="mp.spawn(workload.enter, args=(free_port(), answers, weigh), nprocs=2)")
_ACCELERATE = _PLAIN.format(
    method="fork",
    launch="notebook_launcher(enter_elastic, (answers, weigh), num_processes=2, use_port=str(free_port()))",
)
_FABRIC = """
value = Fabric(accelerator="cpu", devices=2, strategy="ddp_notebook").launch(enter_fabric, weigh)
"""
_PRESTARTED = "%load_ext ddpnb\nimport time; time.sleep(10)"
_DYNAMO = "import torch._dynamo"

DDPNB = Way("ddpnb forkserver, 10 s after prestart", _DDPNB.format(method="forkserver", view=False), _PRESTARTED, True)
DDPNB_VIEW = Way("  the same with its live view", _DDPNB.format(method="forkserver", view=True), _PRESTARTED, True)
RULER = Way("plain fork, kernel holds torch._dynamo", _FORK, f"{_DYNAMO}, torch.multiprocessing as mp", True)

WAYS = (
    DDPNB,
    DDPNB_VIEW,
    RULER,
    Way("ddpnb fork, kernel holds torch._dynamo", _DDPNB.format(method="fork", view=False), _DYNAMO, True),
    Way("ddpnb forkserver, cold", _DDPNB.format(method="forkserver", view=False), is_first_only=True),
    Way("ddpnb fork", _DDPNB.format(method="fork", view=False)),
    Way("ddpnb spawn", _DDPNB.format(method="spawn", view=False)),
    Way("plain fork (start_processes)", _FORK, "import torch.multiprocessing as mp"),
    Way("plain mp.spawn of a module", _SPAWN, "import torch.multiprocessing as mp, workload"),
    Way(
        "accelerate notebook_launcher",
        _ACCELERATE,
        "import torch.multiprocessing as mp\nfrom accelerate import notebook_launcher",
        needs="accelerate",
    ),
    Way("Lightning Fabric ddp_notebook", _FABRIC, "from lightning_fabric import Fabric", needs="lightning_fabric"),
)

_TIMED = """
weigh = {weigh}
began = time.monotonic()
{launch}
back = time.monotonic()
print()
print(json.dumps([value["stepped"] - began, back - began, value["pss"]]))
"""


@dataclass
class Timings:
    """What was measured of one way, in seconds and MB."""

    first_step: list[float]
    first_cell: list[float]
    step: list[float]
    cell: list[float]
    pss: list[float]

    @classmethod
    def none(cls) -> Timings:
        """Nothing yet."""
        return cls([], [], [], [], [])


def steps(report: Report, options: Namespace) -> None:
    """(a) Launch → first optimizer step → result in the cell, first and repeated, and memory."""
    report.section("launch → first optimizer step → result in the cell")
    ways = [way for way in WAYS if importlib.util.find_spec(way.needs)]
    missing = [way.name for way in WAYS if way not in ways]
    if missing:
        report.note(f"not installed, not measured: {', '.join(missing)}")
    timings: dict[str, Timings] = defaultdict(Timings.none)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "workload.py").write_text(f"from __future__ import annotations\n{sources(first_step, enter)}")
        rounds = 1 if options.quick else 3
        for _ in range(rounds):
            share = options.repeats // rounds
            _measure_quick([way for way in ways if way.is_quick], share, folder, timings)
            for way in ways:
                if not way.is_quick:
                    _measure_slow(way, min(share, 2), folder, timings)
    _print_steps(report, timings)
    _print_phases(report, options)
    _print_import(report)


def _open(way: Way, folder: str) -> BenchKernel:
    functions = (first_step, enter, enter_elastic, enter_fabric, free_port)
    path = f"import sys; sys.path.insert(0, {folder!r})\n"
    return BenchKernel(*functions, prepare=path + way.prepare)


def _launch(kernel: BenchKernel, way: Way, weigh: bool = False) -> tuple[float, float, float]:
    step, cell, pss = kernel.ask(_TIMED.format(weigh=weigh, launch=way.launch))
    return step, cell, pss


def _measure_quick(ways: list[Way], repeats: int, folder: str, timings: dict[str, Timings]) -> None:
    """All in turn, launch by launch, so that what disturbs one disturbs the others too."""
    kernels: dict[str, BenchKernel] = {}
    try:
        for way in ways:
            kernels[way.name] = _open(way, folder)
            _note_first(timings[way.name], _launch(kernels[way.name], way))
        for _ in range(repeats):
            for way in ways:
                _note(timings[way.name], _launch(kernels[way.name], way))
        for way in ways:
            timings[way.name].pss.append(_launch(kernels[way.name], way, weigh=True)[2])
    finally:
        for kernel in kernels.values():
            kernel.close()


def _measure_slow(way: Way, repeats: int, folder: str, timings: dict[str, Timings]) -> None:
    own = timings[way.name]
    with _open(way, folder) as kernel:
        _note_first(own, _launch(kernel, way))
        if not way.is_first_only:
            for _ in range(repeats):
                _note(own, _launch(kernel, way))
            own.pss.append(_launch(kernel, way, weigh=True)[2])


def _note_first(own: Timings, measured: tuple[float, float, float]) -> None:
    own.first_step.append(measured[0])
    own.first_cell.append(measured[1])


def _note(own: Timings, measured: tuple[float, float, float]) -> None:
    own.step.append(measured[0])
    own.cell.append(measured[1])


def _print_steps(report: Report, timings: dict[str, Timings]) -> None:
    ruler = Sample(timings[RULER.name].step), Sample(timings[RULER.name].cell)
    for title, which, base in (("first optimizer step", "step", ruler[0]), ("result in the cell", "cell", ruler[1])):
        rows = []
        for name, own in timings.items():
            sample = Sample(getattr(own, which))
            if sample:
                rows.append((name, *sample.columns(duration), f"{sample.median / base.median:.2f}"))
        report.table(f"Relaunch → {title}", ("way", *COLUMNS, "÷ fork with dynamo"), rows)
    report.table(
        "First launch in a fresh kernel → first optimizer step, and → result in the cell",
        ("way", "n", "step", "range", "cell", "range"),
        (
            (name, str(len(own.first_step)), *_middle(own.first_step), *_middle(own.first_cell))
            for name, own in timings.items()
        ),
    )
    report.table(
        "Memory of one worker (PSS) after its step",
        ("way", "MB"),
        ((name, f"{statistics.median(own.pss):.0f}") for name, own in timings.items() if own.pss),
    )
    own = timings[DDPNB.name]
    step, cell, first = Sample(own.step), Sample(own.cell), Sample(own.first_step)
    ratio = step.median / ruler[0].median
    report.judge("relaunch → first optimizer step, median ≤ 80 ms", duration(step.median), step.median <= 0.08)
    report.judge("relaunch → first optimizer step, 90 % ≤ 100 ms", duration(step.most), step.most <= 0.1)
    report.judge("on a busy machine: ÷ plain fork with torch._dynamo ≤ 1.0", f"{ratio:.2f}", ratio <= 1.0)
    report.judge("relaunch → result in the cell, median ≤ 120 ms", duration(cell.median), cell.median <= 0.12)
    report.judge("first launch 10 s after prestart ≤ 200 ms", duration(first.median), first.median <= 0.2)


def _middle(values: list[float]) -> tuple[str, str]:
    return duration(statistics.median(values)), f"{duration(min(values))} – {duration(max(values))}"


_PHASES = """
import ddpnb.launcher, ddpnb.state
heard = []
def fold(state, message, fold=ddpnb.state.fold):
    kind = type(message).__name__
    heard.append([getattr(message, "phase", kind), getattr(message, "rank", None), message.time])
    return fold(state, message)
ddpnb.launcher.fold = fold
"""

_PHASED = """
heard.clear()
began = time.monotonic()
run = ddpnb.launch(first_step, False, nproc_per_node=2, view=False)
moments = [["launch() returned", None, time.monotonic()]]
values = run.results()
moments.append(["result in the cell", None, time.monotonic()])
moments += [["first step", rank, value["stepped"]] for rank, value in values.items()]
run.wait()
print(json.dumps([[what, rank, moment - began] for what, rank, moment in heard + moments]))
"""


def _print_phases(report: Report, options: Namespace) -> None:
    """Where a relaunch's time goes, by the senders' clocks."""
    moments: dict[tuple[str, int | None], list[float]] = defaultdict(list)
    with _open(DDPNB, "") as kernel:
        kernel.do(_PHASES)
        for number in range(options.repeats + 1):
            for what, rank, moment in kernel.ask(_PHASED):
                if number:  # the first is no relaunch
                    moments[what, rank].append(moment)
    middle = sorted((statistics.median(values), key) for key, values in moments.items())
    report.table(
        "ddpnb forkserver, a relaunch's moments (medians since launch() was called)",
        ("moment", "rank", "at"),
        ((what, "" if rank is None else str(rank), duration(at)) for at, (what, rank) in middle),
    )


def _print_import(report: Report) -> None:
    code = (
        "import sys, time; began = time.perf_counter(); import ddpnb; taken = time.perf_counter() - began; "
        "print(taken, [name for name in ('torch', 'matplotlib') if name in sys.modules])"
    )
    answers = [subprocess.check_output([sys.executable, "-c", code], text=True).split(" ", 1) for _ in range(10)]
    taken, imported = Sample(float(taken) for taken, _ in answers), answers[0][1].strip()
    report.table("import ddpnb in a bare interpreter", ("", *COLUMNS), [("time added", *taken.columns(duration))])
    report.judge("import ddpnb adds ≤ 100 ms (best of 10)", duration(min(taken)), min(taken) <= 0.1)
    report.judge("import ddpnb imports no torch", f"of torch and matplotlib: {imported}", "torch" not in imported)


# ---- failures


def fail(how: str, rank: int, note: str) -> None:
    """Fail on one rank while the others wait for it in a barrier; `note` is the file that takes the moment."""
    import ctypes
    import os
    import signal
    import time
    from pathlib import Path

    import torch.distributed as dist

    if int(os.environ["RANK"]) != rank:
        if how == "raise before its own rendezvous":
            dist.init_process_group("gloo")
        dist.barrier()
    time.sleep(0.05)
    Path(note).write_text(repr(time.monotonic()))
    if how == "SIGSEGV":
        ctypes.string_at(0)
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("on purpose")


class Fuse:
    """An argument that cannot be unpacked on one rank, so that it fails before the rendezvous."""

    def __init__(self, rank: int, note: str) -> None:
        self.rank = rank
        self.note = note

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        if os.environ.get("RANK") == str(self.rank):
            with open(self.note, "w") as file:
                file.write(repr(time.monotonic()))
            raise ValueError("on purpose")


_FAIL = """
run = ddpnb.launch({call}, nproc_per_node={ranks}, view=False)
blamed = None
try:
    run.result()
except ddpnb.WorkerError as error:
    arrived, blamed = time.monotonic(), error.rank
else:
    arrived = time.monotonic()
print(json.dumps([blamed, arrived - float(open({note!r}).read())]))
"""

FAILURES = {
    "exception, peers in a barrier": ("fail, 'raise', {rank}, {note!r}",),
    "exception before rendezvous": (
        "fail, 'raise before its own rendezvous', {rank}, {note!r}, backend=None",
        "(lambda fuse: None), Fuse({rank}, {note!r})",
    ),
    "SIGSEGV": ("fail, 'SIGSEGV', {rank}, {note!r}",),
    "SIGKILL": ("fail, 'SIGKILL', {rank}, {note!r}",),
}


def failures(report: Report, options: Namespace) -> None:
    """(b) Who is blamed, and how soon."""
    report.section("failures → error in the cell")
    rows = []
    verdicts = []
    with tempfile.TemporaryDirectory() as folder, BenchKernel(fail, Fuse, prepare=_PRESTARTED) as kernel:
        note = str(Path(folder, "moment"))
        for ranks in (2, 4):
            for name, calls in FAILURES.items():
                right, delays = 0, []
                for number in range(options.repeats):
                    rank = number // len(calls) % ranks
                    call = calls[number % len(calls)].format(rank=rank, note=note)
                    blamed, delay = kernel.ask(_FAIL.format(call=call, ranks=ranks, note=note))
                    right += blamed == rank
                    delays.append(delay)
                sample = Sample(delays)
                rows.append((name, str(ranks), f"{right} of {len(delays)}", *sample.columns(duration)[1:]))
                verdicts.append((right == len(delays), sample.median))
    report.table("Failure → error in the cell", ("failure", "ranks", "right blames", *COLUMNS[1:]), rows)
    blames = [row[2] for row in rows]
    slowest = max(median for _, median in verdicts)
    report.judge("every failure laid to the right rank", ", ".join(blames), all(right for right, _ in verdicts))
    report.judge("failure → error in the cell, median ≤ 0.3 s each", f"slowest {duration(slowest)}", slowest <= 0.3)


# ---- endings


def sit_in_rendezvous() -> None:
    """Both ranks wait for a third that never comes."""
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=ddpnb.rank(), world_size=3)  # type: ignore[name-defined] # noqa: F821


def sit_in_collective() -> None:
    """Each rank waits for something else."""
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 0:
        dist.barrier()
    else:
        dist.recv(torch.zeros(1), src=0)


def sleep_on() -> None:
    """One long call that lets go of the GIL."""
    import time

    time.sleep(1000)


def swallow() -> None:
    """User code that catches what it can."""
    import time

    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue


def hold_the_gil() -> None:
    """One long call that holds the GIL: no thread of Python's can do anything meanwhile."""
    import ctypes

    libc = ctypes.PyDLL(None)
    while True:
        libc.sleep(1000)


class Numbers:
    """A data set, as a cell has one."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        time.sleep(0.001)
        return index


def load_on() -> None:
    """Train with two DataLoader children."""
    from torch.utils.data import DataLoader

    for _ in DataLoader(Numbers(), batch_size=4, num_workers=2):  # type: ignore[arg-type,var-annotated]
        pass


def ask_on() -> int:
    """A function that asks, and ends by itself."""
    import time

    steps = 0
    while not ddpnb.should_stop():  # type: ignore[name-defined] # noqa: F821
        steps += 1
        time.sleep(0.005)
    return steps


_RUNNING = "while not all(rank.phase == 'running' for rank in run.state.ranks): time.sleep(0.005)\n"
_SIT = f"""
run = ddpnb.launch({{function}}, nproc_per_node=2, view=False, start_method={{method!r}}, backend={{backend!r}})
{_RUNNING}
time.sleep(0.2)
print("all are in it", flush=True)
run.result()
"""

SEATS: dict[str, tuple[Callable[[], Any], int]] = {
    "rendezvous": (sit_in_rendezvous, 2),
    "collective": (sit_in_collective, 2),
    "time.sleep": (sleep_on, 2),
    "except Exception loop": (swallow, 2),
    "C call that holds the GIL": (hold_the_gil, 2),
    "DataLoader children": (load_on, 6),
    "a function that asks": (ask_on, 2),
}
"""{what the ranks are busy with: (function, number of processes)}."""


def endings(report: Report, options: Namespace) -> None:
    """(c) Interrupts, and a kernel that is killed."""
    report.section("endings")
    _interrupts(report, 2 if options.quick else 10)
    _kernel_deaths(report, 1 if options.quick else 5)


def _interrupts(report: Report, repeats: int) -> None:
    functions = [function for function, _ in SEATS.values()]
    rows, slowest, alone = [], 0.0, True
    with BenchKernel(Numbers, *functions, prepare=_PRESTARTED) as kernel:
        for name, (function, num_processes) in SEATS.items():
            back, alive, errors = [], [], set()
            for _ in range(repeats):
                cell, nobody, error = _interrupt(kernel, function, num_processes)
                back.append(cell)
                alive.append(max(cell, nobody))
                errors.add(error)
            ended = Sample(alive)
            slowest = max(slowest, ended.median)
            alone &= errors == {"KeyboardInterrupt"}
            rows.append(
                (
                    name,
                    str(len(ended)),
                    duration(statistics.median(back)),
                    duration(max(back)),
                    duration(ended.median),
                    duration(max(ended)),
                    ", ".join(map(str, errors)),
                )
            )
    report.table(
        "Interrupt → cell back; → cell back and nobody alive",
        ("ranks are in", "n", "cell, median", "max", "nobody, median", "max", "the cell got"),
        rows,
    )
    report.judge("interrupt → cell back, nobody alive: median ≤ 1 s each", f"slowest {duration(slowest)}", slowest <= 1)
    report.judge("the cell gets KeyboardInterrupt", "always" if alone else "not always", alone)


def _interrupt(kernel: BenchKernel, function: Callable[[], Any], num_processes: int) -> tuple[float, float, str | None]:
    """Seconds from the interrupt to the cell's end and to the last process's, and the error's type."""
    backend = None if function is sit_in_rendezvous else "auto"
    family: set[psutil.Process] = set()
    pressed = 0.0

    def press(_: str) -> None:
        nonlocal family, pressed
        family = _whole_family(kernel, num_processes)
        pressed = time.monotonic()
        kernel.interrupt()

    reply = kernel.wait(
        kernel.start(_SIT.format(function=function.__name__, method="forkserver", backend=backend)), on_stdout=press
    )
    back = time.monotonic()
    wait_until(lambda: _all_gone(family), what="the end of all workers")
    return back - pressed, time.monotonic() - pressed, reply.error


def _kernel_deaths(report: Report, repeats: int) -> None:
    rows, slowest = [], 0.0
    for method in START_METHODS:
        workers, helpers = [], []
        for _ in range(repeats):
            of_workers, of_helpers = _kill_kernel(method)
            workers.append(of_workers)
            helpers.append(of_helpers)
        sample = Sample(workers)
        slowest = max(slowest, sample.median)
        rows.append((method, *sample.columns(duration), duration(max(helpers))))
    report.table(
        "SIGKILL of the kernel → 2 workers and 4 DataLoader children gone",
        ("start method", *COLUMNS, "server, tracker gone (max)"),
        rows,
    )
    report.judge("kernel killed → all gone: median ≤ 0.5 s each", f"slowest {duration(slowest)}", slowest <= 0.5)


def _kill_kernel(method: str) -> tuple[float, float]:
    with BenchKernel(Numbers, load_on) as kernel:
        kernel.do(f"run = ddpnb.launch(load_on, nproc_per_node=2, view=False, start_method={method!r})\n{_RUNNING}")
        family = _whole_family(kernel, 6)
        helpers = set(kernel.descendants()) - family
        killed = time.monotonic()
        os.kill(kernel.pid, signal.SIGKILL)
        wait_until(lambda: _all_gone(family), what="the end of all workers")
        workers_gone = time.monotonic() - killed
        wait_until(lambda: _all_gone(helpers), what="the end of server and tracker")
        return workers_gone, time.monotonic() - killed


def _whole_family(kernel: BenchKernel, num_processes: int) -> set[psutil.Process]:
    wait_until(
        lambda: len(kernel.family()) >= num_processes, timeout=30, what=f"the start of {num_processes} processes"
    )
    return kernel.family()


def _all_gone(processes: Iterable[psutil.Process]) -> bool:
    return all(map(_is_gone, processes))


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# ---- stopping at the same step


def time_checks() -> list[float]:
    """Seconds of one should_stop(): in a loop; between steps of 5 ms; and of an empty measurement there."""
    from time import perf_counter

    should_stop, cold, empty, hot = ddpnb.should_stop, [], [], []  # type: ignore[name-defined] # noqa: F821
    for _ in range(200):
        began = perf_counter()
        for _ in range(100):
            should_stop()
        hot.append((perf_counter() - began) / 100)
    step = make_step(True)
    for _ in range(200):
        step()
        began = perf_counter()
        should_stop()
        middle = perf_counter()
        cold.append(middle - began)
        step()
        began = perf_counter()
        empty.append(perf_counter() - began)
    return [sorted(sample)[len(sample) // 2] for sample in (hot, cold, empty)]


def step_until_told(seed: int) -> int:
    """Steps of random length, asking before each; how many were made."""
    import random
    import time

    generator = random.Random(f"{seed} {ddpnb.rank()}")  # type: ignore[name-defined] # noqa: F821
    steps = 0
    while not ddpnb.should_stop():  # type: ignore[name-defined] # noqa: F821
        steps += 1
        pause = generator.random() * 0.002
        if generator.random() < 0.5:
            time.sleep(pause)
        else:
            until = time.monotonic() + pause
            while time.monotonic() < until:
                pass
    return steps


_STOPS = f"""
answers = []
for seed in range({{begin}}, {{end}}):
    run = ddpnb.launch(step_until_told, seed, nproc_per_node=2, view=False)
    {_RUNNING}
    time.sleep(random.random() * 0.05)
    run.stop()
    answers.append(list(run.results().values()))
print(json.dumps(answers))
"""


def stops(report: Report, options: Namespace) -> None:
    """(d) What a check costs, and whether all ranks stop at the same one."""
    report.section("stop agreement")
    num_stops = 20 if options.quick else 200
    with BenchKernel(make_step, time_checks, step_until_told, prepare=_PRESTARTED) as kernel:
        costs = kernel.ask(
            "run = ddpnb.launch(time_checks, nproc_per_node=2, view=False)\n"
            "print(json.dumps(list(run.results().values())))"
        )
        answers = [
            counts
            for begin in range(0, num_stops, 20)
            for counts in kernel.ask(_STOPS.format(begin=begin, end=begin + 20))
        ]
    hot, cold, empty = (statistics.median(values) for values in zip(*costs, strict=True))
    different = sum(len(set(counts)) > 1 for counts in answers)
    report.table(
        "One should_stop() (Page.check)",
        ("", "median"),
        (
            ("in a loop", duration(hot)),
            ("between 5 ms DDP steps", duration(cold)),
            ("an empty measurement there", duration(empty)),
        ),
    )
    made = Sample(float(min(counts)) for counts in answers)
    report.table(
        "Random stops on real processes",
        ("", "n", "different steps", "steps made"),
        [("2 ranks", str(len(answers)), str(different), f"{min(made):.0f} – {max(made):.0f}")],
    )
    net = cold - empty
    report.judge("ranks that stop on different steps: 0 of 200", f"{different} of {len(answers)}", different == 0)
    report.judge("one check ≤ 20 µs", f"hot {duration(hot)}, cold {duration(net)}", max(hot, net) <= 20e-6)


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(__doc__, {"steps": steps, "failures": failures, "endings": endings, "stops": stops}))
