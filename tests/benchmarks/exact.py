"""What `Loop(exact=True)` costs an optimizer step, beside the same Loop without it.

    python -m tests.benchmarks.exact                     # the table, about 2 minutes
    python -m tests.benchmarks.exact --quick

Run it from the repository's root. One and two gloo ranks of one thread each; the two kinds of epoch alternate within
the same processes, so that what disturbs the machine disturbs both alike. The price is that of small batches: a shard
has a twelfth of the global batch, and each reads all weights and writes all gradients. Nothing is judged.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from time import perf_counter
from typing import Literal

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import ddpnb
from tests.benchmarks.bench import Report, duration, main

Kind = Literal["layers", "convolutions"]

STEPS = 12
"""Optimizer steps in an epoch; the first two are not counted."""
SHAPES: dict[Kind, tuple[int, ...]] = {"layers": (256,), "convolutions": (3, 32, 32)}


def net(kind: Kind) -> nn.Module:
    """Linear layers with 400,000 weights, or convolutions with BatchNorm, which compute more for each of them."""
    torch.manual_seed(0)
    if kind == "layers":
        return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    blocks: list[nn.Module] = []
    for before, after, stride in ((3, 32, 1), (32, 64, 2), (64, 128, 2)):
        blocks += [nn.Conv2d(before, after, 3, stride, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def seconds_per_step(kind: Kind, joint: int, repeats: int) -> list[list[float]]:
    """Seconds of an optimizer step with a global batch of so many samples, (2, repeats): fast, exact."""
    inputs, targets = torch.randn(joint * STEPS, *SHAPES[kind]), torch.randint(10, (joint * STEPS,))
    data = TensorDataset(inputs, targets)
    taken: list[list[float]] = [[], []]
    for _ in range(repeats):
        for exact in (False, True):
            model = ddpnb.wrap(net(kind))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            loader = ddpnb.loader(data, joint // ddpnb.world_size())
            loop = ddpnb.Loop(model, optimizer, loader, epochs=1, exact=exact, checks=False)
            began = 0.0
            for features, classes in loop:
                if loop.step == 2 and not began:
                    began = perf_counter()
                loop.update(cross_entropy(model(features), classes))
            taken[exact].append((perf_counter() - began) / (STEPS - 2))
    return taken


def steps(report: Report, options: Namespace) -> None:
    """The table."""
    report.section("an optimizer step, fast and exact")
    lines = []
    cases: list[tuple[Kind, int]] = [("layers", 96), ("layers", 384), ("layers", 1536), ("convolutions", 96)]
    for kind, joint in cases:
        for world_size in (1, 2):
            launcher = ddpnb.Launcher(nproc_per_node=world_size, view=False, threads_per_worker=1)
            fast, exact = map(statistics.median, launcher(seconds_per_step, kind, joint, options.repeats // 4).result())
            lines.append((kind, str(joint), str(world_size), duration(fast), duration(exact), f"{exact / fast:.2f}"))
    report.table("Median of an epoch's mean", ("model", "global batch", "ranks", "fast", "exact", "ratio"), lines)


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(__doc__, {"steps": steps}))
