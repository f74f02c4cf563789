"""What a `Loop` costs a training step, beside the same loop written by hand.

    python -m tests.benchmarks.loop                      # the table, about 5 minutes
    python -m tests.benchmarks.loop --quick

Run it from the repository's root. Everything happens in a real ipykernel on 2 gloo ranks. The loop by hand takes its
batches from the same loader, weighs its losses exactly, measures the norm of the gradients and logs its loss.

Blocks of ten steps of each kind are shuffled within the same processes, so that what disturbs the machine disturbs all
alike; the loop against itself shows how far that goes. Without the all-reduce, which scatters by more than what is
looked for, they are judged; with DDP they are reported.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from tests.benchmarks.bench import BenchKernel, Report, answer, duration, main, median_interval

if TYPE_CHECKING:
    # What a cell has by that name.
    import ddpnb

STEPS = 10
"""Steps in a block."""


def time_loops(rows: int, strategy: Any) -> list[list[float]]:
    """Seconds of blocks of ten steps, (rows, 4): by hand, by hand again, Loop, Loop without checks."""
    import random
    from time import perf_counter

    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.utils.data import TensorDataset

    generator = torch.Generator().manual_seed(0)
    batch = 48
    data = TensorDataset(torch.randn(2 * 8 * batch, 256, generator=generator), torch.randint(10, (2 * 8 * batch,)))

    def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        layers = [nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
        model = ddpnb.wrap(nn.Sequential(*layers), strategy)
        return model, torch.optim.SGD(model.parameters(), lr=0.01), ddpnb.loader(data, batch)

    def by_hand() -> Any:
        model, optimizer, loader = parts()
        parameters = list(model.parameters())
        world_size = ddpnb.world_size()
        samples_of_all = world_size * batch  # all batches are full: no collective is needed to know it
        while True:
            for inputs, targets in loader:
                loss = cross_entropy(model(inputs), targets)
                (loss * (len(inputs) * world_size / samples_of_all)).backward()
                norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
                if torch.isfinite(norm):
                    optimizer.step()
                optimizer.zero_grad()
                ddpnb.log(loss=loss, grad_norm=norm)
                yield

    def by_loop(checks: bool) -> Any:
        model, optimizer, loader = parts()
        loop = ddpnb.Loop(model, optimizer, loader, epochs=1_000_000, checks=checks)
        for inputs, targets in loop:
            loop.update(cross_entropy(model(inputs), targets))
            yield

    kinds = [by_hand(), by_hand(), by_loop(True), by_loop(False)]
    for kind in kinds:
        for _ in range(2 * STEPS):
            next(kind)
    shuffled = random.Random(0)
    taken = []
    for _ in range(rows):
        row = [0.0] * len(kinds)
        for number in shuffled.sample(range(len(kinds)), len(kinds)):  # the same order on all ranks
            began = perf_counter()
            for _ in range(STEPS):
                next(kinds[number])
            row[number] = perf_counter() - began
        taken.append(row)
    return taken


def steps(report: Report, options: Namespace) -> None:
    """A step of a Loop − a step by hand."""
    report.section("a step of a Loop, and of a loop by hand")
    rows = 40 if options.quick else 400
    measured: dict[str, Any] = {}
    with BenchKernel(time_loops, prepare=f"%load_ext ddpnb\nSTEPS = {STEPS}") as kernel:
        for strategy in ("none", "ddp"):
            reply = kernel.do(
                f"run = ddpnb.launch(time_loops, {rows}, {strategy!r}, nproc_per_node=2, view=True)\n"
                "print(json.dumps(list(run.results().values())))",
                timeout=600,
            )
            measured[strategy] = answer(reply)
    lines, beyond = [], {}
    names = ("by hand, against itself", "Loop", "Loop, checks=False", "its checks")
    for strategy, ranks in measured.items():
        # Ranks run side by side: one row holds both, so that what disturbs both counts once.
        joint = [
            [statistics.mean(rank[row][kind] for rank in ranks) / STEPS for kind in range(4)] for row in range(rows)
        ]
        by_hand = [(first + second) / 2 for first, second, *_ in joint]
        beyond[strategy] = {
            names[0]: [row[1] - row[0] for row in joint],
            names[1]: [row[2] - hand for row, hand in zip(joint, by_hand, strict=True)],
            names[2]: [row[3] - hand for row, hand in zip(joint, by_hand, strict=True)],
            names[3]: [row[2] - row[3] for row in joint],
        }
        what = "DDP" if strategy == "ddp" else "without all-reduce"
        for name, values in beyond[strategy].items():
            shown = (f"{bound * 1e6:+.0f} µs" for bound in median_interval(values))
            lines.append((f"{what}, {name}", str(rows), duration(statistics.median(by_hand)), *shown))
    report.table("Beyond a step by hand", ("", "rows", "by hand", "median", "95 % from", "to"), lines)
    loop, least, most = median_interval(beyond["none"]["Loop"])
    shown = f"{loop * 1e6:+.0f} µs [{least * 1e6:+.0f} – {most * 1e6:+.0f}]"
    report.judge("Loop ≤ 100 µs a step beyond a loop by hand", shown, most <= 100e-6)
    checks, least, most = median_interval(beyond["none"]["its checks"])
    shown = f"{checks * 1e6:+.0f} µs [{least * 1e6:+.0f} – {most * 1e6:+.0f}]"
    report.judge("its checks ≤ 25 µs a step: the interval reaches it", shown, least <= 25e-6)


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(__doc__, {"steps": steps}))
