"""What watching costs: one log(), the steps per second of a training loop, and the kernel's share of a core.

    python -m tests.benchmarks.stream                    # all tables, about 5 minutes
    python -m tests.benchmarks.stream --quick --only flood

Run it from the repository's root. Everything happens in real ipykernels with the live view drawing (its widget
messages are counted as they arrive), on 2 gloo ranks unless said otherwise.

Pairs of DDP runs cannot show one per cent on a small machine: the same loop against itself scatters by 20 %. So the
cost is shown in three ways: (a) adds up what the step and the kernel pay, (b) compares blocks of steps without an
all-reduce, shuffled within the same processes, (c) does so with DDP, beside the loop against itself, and is not judged.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.benchmarks.bench import (
    COLUMNS,
    CORES,
    BenchKernel,
    Report,
    Sample,
    answer,
    duration,
    main,
    make_step,
    percent,
    ratio_of_sums,
)

if TYPE_CHECKING:
    # What a cell has by that name.
    import ddpnb

STEP = 0.005
"""Seconds of the step that all costs are compared with."""

RUNNING = "while not all(rank.phase == 'running' for rank in run.state.ranks): time.sleep(0.005)\n"

# Counts what the kernel takes in, and how long it draws; from outside, so that any form of the view will do.
COUNTING = """
import ddpnb.channel, ddpnb.notebook.live
taken = {"messages": 0, "bytes": 0}
drawn = []
def decode(frame, decode=ddpnb.channel.decode):
    taken["messages"] += 1
    taken["bytes"] += 8 + len(frame)
    return decode(frame)
ddpnb.channel.decode = decode
def draw(card, draw=ddpnb.notebook.live.Card.draw):
    began = time.thread_time()
    draw(card)
    drawn.append(time.thread_time() - began)
ddpnb.notebook.live.Card.draw = draw
"""

_WATCH = """
import threading
def of_threads():
    clocks = [(each.name, time.pthread_getcpuclockid(each.ident)) for each in threading.enumerate()]
    return {{name: time.clock_gettime(clock) for name, clock in clocks if name.startswith("ddpnb-")}}
drawn.clear(); taken.update(messages=0, bytes=0)
before, cpu, began = of_threads(), time.process_time(), time.monotonic()
time.sleep({seconds})
wall, cpu = time.monotonic() - began, time.process_time() - cpu
threads = {{name.split("-")[1]: spent - before.get(name, 0.0) for name, spent in of_threads().items()}}
print(json.dumps(dict(wall=wall, cpu=cpu, threads=threads, drawn=drawn, **taken)))
"""


@dataclass(frozen=True)
class Watched:
    """The kernel during some seconds in which its cell only sleeps."""

    share: float
    """CPU time ÷ wall time: its share of one core."""
    threads: dict[str, float]
    """{"run": the thread that hears the workers, "view": the one that draws}: their shares."""
    messages: float
    """Messages from workers, per second."""
    num_bytes: float
    """Bytes of them, per second."""
    widgets: float
    """Widget messages that arrived here, per second."""
    draws: Sample
    """CPU seconds of each drawing."""


def watch(kernel: BenchKernel, seconds: float) -> Watched:
    """Measure the kernel for so long, with whatever runs."""
    reply = kernel.do(_WATCH.format(seconds=seconds), timeout=seconds + 60)
    found = answer(reply)
    wall = found["wall"]
    return Watched(
        share=found["cpu"] / wall,
        threads={name: spent / wall for name, spent in found["threads"].items()},
        messages=found["messages"] / wall,
        num_bytes=found["bytes"] / wall,
        widgets=reply.comms / wall,
        draws=Sample(found["drawn"]),
    )


def show_watched(report: Report, title: str, rows: dict[str, Watched]) -> None:
    """One line per situation."""
    report.table(
        title,
        (
            "",
            "share of a core",
            "hearing",
            "drawing",
            "messages/s",
            "kB/s",
            "widget messages/s",
            "draws",
            "CPU per draw",
        ),
        (
            (
                name,
                percent(each.share),
                percent(each.threads.get("run", 0.0)),
                percent(each.threads.get("view", 0.0)),
                f"{each.messages:.1f}",
                f"{each.num_bytes / 1000:.1f}",
                f"{each.widgets:.2f}",
                str(len(each.draws)),
                duration(each.draws.median) if each.draws else "–",
            )
            for name, each in rows.items()
        ),
    )


# ---- (a) what one log() costs, and the kernel


def time_logs(rounds: int) -> dict[str, list[float]]:
    """Seconds of one log(): in a loop, and between 5 ms DDP steps beside an empty measurement; (rounds,) each."""
    from time import perf_counter

    import torch

    log, tensor, number = ddpnb.log, torch.tensor(0.5), 0.5
    taken: dict[str, list[float]] = {name: [] for name in ("float hot", "tensor hot", "empty", "float", "tensor")}
    for _ in range(rounds):
        for name, value in (("float hot", number), ("tensor hot", tensor)):
            began = perf_counter()
            for _ in range(100):
                log(loss=value)
            taken[name].append((perf_counter() - began) / 100)
    step = make_step(True)
    for _ in range(rounds):
        step()
        began = perf_counter()
        taken["empty"].append(perf_counter() - began)
        step()
        began = perf_counter()
        log(loss=number)
        taken["float"].append(perf_counter() - began)
        loss = step()
        began = perf_counter()
        log(loss=loss)
        taken["tensor"].append(perf_counter() - began)
    return taken


def train_on() -> dict[str, float]:
    """DDP steps of 5 ms, each logged, until told; seconds of a step, and CPU seconds per step of ddpnb's thread."""
    import threading
    import time

    (thread,) = (each for each in threading.enumerate() if each.name == "ddpnb-session")
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    step, steps = make_step(True), 0
    cpu, began = time.clock_gettime(clock), time.monotonic()
    while not ddpnb.should_stop():
        ddpnb.log(loss=step())
        steps += 1
    return {"step": (time.monotonic() - began) / steps, "thread": (time.clock_gettime(clock) - cpu) / steps}


def costs(report: Report, options: Namespace) -> None:
    """(a) The cost of one log(), and of the kernel beside a training loop with the live view."""
    report.section("(a) cost of one log(), and of the kernel beside it")
    seconds = 4 if options.quick else 15
    with BenchKernel(make_step, time_logs, train_on, prepare=f"%load_ext ddpnb\n{COUNTING}") as kernel:
        idle = watch(kernel, seconds / 3)
        rounds = 100 if options.quick else 600
        ranks = kernel.ask(
            f"run = ddpnb.launch(time_logs, {rounds}, nproc_per_node=2, view=True)\n"
            "print(json.dumps(list(run.results().values())))"
        )
        kernel.do(f"run = ddpnb.launch(train_on, nproc_per_node=2, view=True)\n{RUNNING}time.sleep(2)")
        drawing = watch(kernel, seconds)
        steps = kernel.ask("run.stop()\nprint(json.dumps(list(run.results().values())))")

    taken = {name: Sample(value for rank in ranks for value in rank[name]) for name in ranks[0]}
    labels = {
        "float hot": "float, in a loop",
        "tensor hot": "CPU tensor, in a loop",
        "float": "float, between 5 ms DDP steps",
        "tensor": "CPU tensor, between 5 ms DDP steps",
        "empty": "an empty measurement there",
    }
    report.table("One log()", ("", *COLUMNS), ((labels[name], *taken[name].columns(duration)) for name in labels))
    show_watched(report, "The kernel", {"idle": idle, "2 ranks, live view": drawing})
    empty = taken["empty"].median
    cold_float, cold_tensor = taken["float"].median - empty, taken["tensor"].median - empty
    thread = statistics.mean(rank["thread"] for rank in steps)
    kernels = drawing.share * STEP / CORES
    total = cold_tensor + thread + kernels
    report.table(
        "What a step of 5 ms pays",
        ("", "time", "of 5 ms"),
        (
            ("one cold log() of a tensor, clock deducted", duration(cold_tensor), percent(cold_tensor / STEP)),
            ("ddpnb's thread in the worker", duration(thread), percent(thread / STEP)),
            (f"the kernel, on {CORES} cores", duration(kernels), percent(kernels / STEP)),
            ("all", duration(total), percent(total / STEP)),
        ),
    )
    report.note(f"the steps took {duration(statistics.mean(rank['step'] for rank in steps))}")
    hot = taken["float hot"].median
    report.judge("log() of a float, hot ≤ 2 µs", duration(hot), hot <= 2e-6)
    report.judge("log() of a float, cold ≤ 8 µs", duration(cold_float), cold_float <= 8e-6)
    report.judge("log() of a CPU tensor, cold ≤ 18 µs", duration(cold_tensor), cold_tensor <= 18e-6)
    share = percent(total / STEP)
    report.judge("(a) worker's cost + kernel's ÷ cores ≤ 1 % of a 5 ms step", share, total <= 0.01 * STEP)
    _judge_drawing(report, drawing)


def _judge_drawing(report: Report, watched: Watched) -> None:
    rate = watched.widgets
    report.judge("the live view draws, ≤ 2 widget messages a second", f"{rate:.2f}/s", 0 < rate <= 2)


# ---- (b), (c) blocks of steps with and without


def time_blocks(rows: int, distributed: bool) -> list[list[float]]:
    """Seconds of blocks of ten steps, (rows, 3): plain, plain again, logged; in a new order in each row."""
    import random
    from time import perf_counter

    step = make_step(distributed)
    generator = random.Random(0)
    taken = []
    for _ in range(rows):
        row = [0.0, 0.0, 0.0]
        for kind in generator.sample(range(3), 3):  # the same order on all ranks
            began = perf_counter()
            for _ in range(10):
                loss = step()
                if kind == 2:
                    ddpnb.log(loss=loss)
            row[kind] = perf_counter() - began
        taken.append(row)
    return taken


def throughput(report: Report, options: Namespace) -> None:
    """(b) and (c) Steps per second with ddpnb's logging and live view ÷ without."""
    report.section("(b), (c) steps per second, logged and viewed ÷ plain")
    rows = 30 if options.quick else 200
    measured: dict[bool, Any] = {}
    widgets: list[float] = []
    with BenchKernel(make_step, time_blocks, prepare="%load_ext ddpnb") as kernel:
        for distributed in (False, True):
            reply = kernel.do(
                f"run = ddpnb.launch(time_blocks, {rows}, {distributed}, nproc_per_node=2, view=True)\n"
                "print(json.dumps(list(run.results().values())))",
                timeout=600,
            )
            measured[distributed] = answer(reply)
            widgets.append(reply.comms / reply.seconds)
    lines, intervals = [], {}
    for distributed, ranks in measured.items():
        # Ranks run side by side: one row holds both, so that what disturbs both counts once.
        joint = [[sum(rank[row][kind] for rank in ranks) for kind in range(3)] for row in range(rows)]
        for name, kind in (("against itself", 1), ("logged", 2)):
            ratio, low, high = ratio_of_sums([(row[0], row[kind]) for row in joint])
            intervals[distributed, kind] = (ratio, low, high)
            what = "DDP" if distributed else "without all-reduce"
            step = statistics.median(row[kind] for row in joint) / len(ranks) / 10
            lines.append((f"{what}, {name}", str(rows), duration(step), f"{ratio:.4f}", f"[{low:.4f} – {high:.4f}]"))
    report.table("Steps per second ÷ plain, blocks of 10", ("", "rows", "step", "ratio", "95 %"), lines)
    report.note(f"widget messages: {', '.join(f'{rate:.2f}/s' for rate in widgets)}")
    ratio, low, high = intervals[False, 2]
    report.judge("(b) interval of the ratio reaches 0.99", f"{ratio:.4f} [{low:.4f} – {high:.4f}]", high >= 0.99)
    _, low, high = intervals[False, 1]
    if high - low > 0.06:
        report.note("the loop against itself scatters by more than ±3 %: this machine is too busy for (b) to tell")
    ratio, low, high = intervals[True, 2]
    report.note(f"(c) reported, not judged: with DDP {ratio:.4f} [{low:.4f} – {high:.4f}]")


# ---- eight ranks at a thousand values a second


def pour(num_logs: int, per_second: int) -> float:
    """Log numbers at that rate; seconds it took."""
    import time

    began = time.monotonic()
    for number in range(num_logs):
        pause = began + number / per_second - time.monotonic()
        if pause > 0:
            time.sleep(pause)
        ddpnb.log(value=float(number))
    return time.monotonic() - began


_CHECK = """
import numpy as np
taken_by_rank = list(run.results().values())
expected = np.arange({num_logs})
right = [
    np.array_equal(run.history["value", rank], expected) and np.array_equal(run.history.steps("value", rank), expected)
    for rank in range(8)
]
num_values = sum(len(run.history["value", rank]) for rank in range(8))
print(json.dumps([taken_by_rank, sum(right), num_values]))
"""


def flood(report: Report, options: Namespace) -> None:
    """8 ranks log 1,000 values a second each: all arrive, in order, at little cost."""
    report.section("8 ranks × 1,000 logs a second")
    seconds = 4 if options.quick else 10
    num_logs = seconds * 1000
    watched, arrived, in_order, paces = {}, [], [], []
    with BenchKernel(pour, prepare=f"%load_ext ddpnb\n{COUNTING}") as kernel:
        for view in (False, True):
            launch = f"run = ddpnb.launch(pour, {num_logs}, 1000, nproc_per_node=8, view={view})\n"
            kernel.do(f"{launch}{RUNNING}time.sleep(0.5)")
            watched[f"view={view}"] = watch(kernel, seconds - 1.5)
            taken, right, num_values = kernel.ask(_CHECK.format(num_logs=num_logs))
            paces.append(num_logs / max(taken))
            in_order.append(right)
            arrived.append(num_values)
    show_watched(report, f"The kernel while 8 ranks log for {seconds} s", watched)
    report.note(f"the slowest rank logged {', '.join(f'{pace:.0f}' for pace in paces)} values a second")
    values = ", ".join(f"{count:,}" for count in arrived)
    complete = all(count == 8 * num_logs for count in arrived) and in_order == [8, 8]
    report.judge(f"each of {8 * num_logs:,} values arrives, in order", values, complete)
    for name, each in watched.items():
        report.judge(f"the kernel's share of a core ≤ 5 %, {name}", percent(each.share), each.share <= 0.05)
    _judge_drawing(report, watched["view=True"])


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(__doc__, {"costs": costs, "throughput": throughput, "flood": flood}))
