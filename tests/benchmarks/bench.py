"""What both benchmarks share: a kernel whose cells answer, a training step, samples, and tables with verdicts.

Functions that a cell launches are written as functions of these modules and sent to the kernel as source
(`BenchKernel.define`), so that ddpnb packs them by value, as it does with a cell's.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import random
import statistics
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from types import TracebackType
from typing import Any

import psutil

from tests.conftest import DEADLINE, Kernel, Reply

CORES = len(os.sched_getaffinity(0))

_IMPORTS = """\
from __future__ import annotations
import json, os, random, time
import ddpnb, torch
from torch import nn
"""


# ---- kernels


class BenchKernel(Kernel):
    """A fresh kernel with a page in front of it, as far as ddpnb can tell; `with` ends it."""

    def __init__(self, *functions: Callable[..., Any], prepare: str = "") -> None:
        super().__init__(JPY_SESSION_NAME="benchmark")
        try:
            self.do(_IMPORTS)
            self.define(*functions)
            self.do(prepare)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> BenchKernel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def define(self, *functions: Callable[..., Any]) -> None:
        """Write functions, or classes, of ours into a cell."""
        self.do("from __future__ import annotations\n" + sources(*functions))

    def do(self, code: str, timeout: float = DEADLINE) -> Reply:
        """Run a cell that must end well."""
        reply = self.run(code, timeout)
        if reply.error is not None:
            raise RuntimeError(f"a cell failed:\n{textwrap.dedent(code)}\n{reply.traceback}\n{reply.stderr}")
        return reply

    def ask(self, code: str, timeout: float = DEADLINE) -> Any:
        """Run a cell that prints JSON in its last line; that value."""
        return answer(self.do(code, timeout))

    def family(self) -> set[psutil.Process]:
        """This kernel's workers and all that they started."""
        return set(self.workers())


def sources(*functions: Callable[..., Any]) -> str:
    """The text of functions or classes."""
    return "\n\n".join(inspect.getsource(function) for function in functions)


def answer(reply: Reply) -> Any:
    """What the cell printed in its last line, from JSON."""
    return json.loads(reply.text.splitlines()[-1])


def make_step(distributed: bool, milliseconds: float = 5.0) -> Callable[[], Any]:
    """A training step of about that length; runs in a worker. Between two calls the caches have seen other things.

    Args:
        distributed: with DDP's all-reduce in it.
        milliseconds: the length, reached by the size of the batch.
    """
    import time

    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    model: nn.Module = nn.Sequential(*layers)
    if distributed:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = [torch.randn(64, 256), torch.randint(10, (64,))]

    def step() -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(6):
        began = time.perf_counter()
        for _ in range(20):
            step()
        taken = (time.perf_counter() - began) / 20
        size = int(len(batch[0]) * min(2.0, max(0.5, milliseconds / 1000 / taken)))
        if distributed:  # both ranks the same, whoever of them was disturbed
            agreed = torch.tensor(float(size))
            torch.distributed.all_reduce(agreed)
            size = int(agreed / torch.distributed.get_world_size())
        size = max(4, size)
        batch[:] = [torch.randn(size, 256), torch.randint(10, (size,))]
    return step


# ---- samples


class Sample(tuple[float, ...]):
    """Measured values of one quantity."""

    __slots__ = ()

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self)

    @property
    def most(self) -> float:
        """The value that 90 % do not exceed."""
        return sorted(self)[math.ceil(0.9 * len(self)) - 1]

    def columns(self, show: Callable[[float], str]) -> tuple[str, str, str, str]:
        """Number of values, median, 90 % and range, as a table has them."""
        if not self:
            return "0", "–", "–", "–"
        return str(len(self)), show(self.median), show(self.most), f"{show(min(self))} – {show(max(self))}"


COLUMNS = ("n", "median", "90 %", "range")
"""Headings of `Sample.columns`."""


def ratio_of_sums(
    pairs: Sequence[tuple[float, float]], seed: int = 0, rounds: int = 4000
) -> tuple[float, float, float]:
    """Sum of the first ÷ sum of the second, and its bootstrap 95 % interval over the rows."""
    generator = random.Random(seed)

    def ratio(rows: Iterable[tuple[float, float]]) -> float:
        first, second = zip(*rows, strict=True)
        return sum(first) / sum(second)

    drawn = sorted(ratio(generator.choices(pairs, k=len(pairs))) for _ in range(rounds))
    return ratio(pairs), drawn[int(0.025 * rounds)], drawn[int(0.975 * rounds)]


def median_interval(values: Sequence[float], seed: int = 0, rounds: int = 2000) -> tuple[float, float, float]:
    """The median, and its bootstrap 95 % interval."""
    generator = random.Random(seed)
    drawn = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(rounds))
    return statistics.median(values), drawn[int(0.025 * rounds)], drawn[int(0.975 * rounds)]


def duration(seconds: float) -> str:
    """In the unit that reads best."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 0.0005:
        return f"{seconds * 1e3:.{0 if seconds >= 0.01 else 1}f} ms"
    return f"{seconds * 1e6:.1f} µs"


def percent(share: float) -> str:
    """A share as per cent."""
    return f"{share * 100:.2f} %"


# ---- tables


@dataclass
class Report:
    """Prints sections, tables and verdicts, and counts the verdicts."""

    met: int = 0
    missed: int = 0

    def section(self, title: str) -> None:
        """Begin a section; the load tells what else the machine was doing."""
        print(f"\n=== {title}   [load {os.getloadavg()[0]:.1f} on {CORES} cores]", flush=True)

    def table(self, title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print columns: the first to the left, numbers to the right."""
        lines = [tuple(header), *map(tuple, rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        print(f"\n{title}")
        for number, line in enumerate(lines):
            cells = [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
            print("  " + "   ".join(cells).rstrip())
            if number == 0:
                print("  " + "   ".join("-" * width for width in widths))
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """One line of explanation."""
        print(f"  {text}", flush=True)

    def judge(self, requirement: str, measured: str, met: bool) -> None:
        """One line for one requirement."""
        self.met += met
        self.missed += not met
        print(f"  {'met    ' if met else 'NOT MET'}  {requirement}: {measured}", flush=True)


def main(description: str, sections: dict[str, Callable[[Report, argparse.Namespace], None]]) -> int:
    """Run the sections that the command line names; 1 where one could not be measured."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=24, help="repetitions of what is quick (default: 24)")
    parser.add_argument("--quick", action="store_true", help="few repetitions: a look, not a verdict")
    parser.add_argument("--only", choices=sections, action="append", help="this section alone; may be given again")
    options = parser.parse_args()
    if options.quick:
        options.repeats = min(options.repeats, 4)

    report, began, has_failed = Report(), time.monotonic(), False
    print(f"Python {sys.version.split()[0]}, torch {version('torch')}, ipykernel {version('ipykernel')}, {CORES} cores")
    for name, section in sections.items():
        if options.only and name not in options.only:
            continue
        try:
            section(report, options)
        except Exception:
            has_failed = True
            print(f"  section {name!r} could not be measured:\n{traceback.format_exc()}", flush=True)
    taken = time.monotonic() - began
    print(f"\n{report.met} of {report.met + report.missed} requirements met; {taken / 60:.1f} minutes")
    return int(has_failed)
