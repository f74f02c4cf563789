"""What a checkpoint costs the training, when it is durable, and how soon a run goes on from it.

    python -m tests.benchmarks.checkpoint                # the table, about 3 minutes
    python -m tests.benchmarks.checkpoint --quick

Run it from the repository's root. Everything happens in a real ipykernel on 2 gloo ranks, with 100 MiB of model and
optimizer in 50 tensors each, on the disk of the temporary folder. Beside it, in the same run and of the same state:
`torch.save`, the same with fsync, and `torch.distributed.checkpoint`, synchronous and asynchronous.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks.bench import COLUMNS, BenchKernel, Report, Sample, answer, duration, main

if TYPE_CHECKING:
    # What a cell has by that name.
    import ddpnb

NUM_LAYERS = 50
WIDTH = 512  # 50 layers of 512 x 512 float32 are 50 MiB, and their momentum 50 more


def make_training() -> tuple[Any, Any, Any]:
    """Model, optimizer and loader on this rank."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)])
    model = ddpnb.wrap(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    return model, optimizer, ddpnb.loader(TensorDataset(torch.randn(4096, WIDTH)), 16)


def time_saves(num_saves: int) -> dict[str, list[float]]:
    """Seconds by what they were spent on."""
    import os
    from time import perf_counter

    from ddpnb.train.keeping import Keeper

    taken: dict[str, list[float]] = {"save": [], "wait": [], "durable": [], "step": [], "beside": []}
    began: dict[int, float] = {}
    spent = {"save": 0.0, "wait": 0.0}
    keep, wait, say = Keeper.keep, Keeper.wait, Keeper._say_saved

    def timed_keep(self: Any, position: Any, *args: Any, **kwargs: Any) -> None:
        began[position.step] = at = perf_counter()
        keep(self, position, *args, **kwargs)
        spent["save"] = perf_counter() - at

    def timed_wait(self: Any) -> None:
        at = perf_counter()
        wait(self)
        spent["wait"] = perf_counter() - at

    def timed_say(self: Any, path: Any, manifest: Any) -> None:
        taken["durable"].append(perf_counter() - began[manifest.step])
        say(self, path, manifest)

    Keeper.keep, Keeper.wait, Keeper._say_saved = timed_keep, timed_wait, timed_say  # type: ignore[method-assign]
    model, optimizer, loader = make_training()
    every = 12
    loop = ddpnb.Loop(model, optimizer, loader, epochs=1000, checkpoint_every=every, keep=2)
    last = perf_counter()
    for (inputs,) in loop:
        loop.update(model(inputs).square().mean())
        now = perf_counter()
        after = loop.step % every
        if loop.step > every and after == 1:  # the step beside which it copies
            taken["save"].append(spent["save"])
            taken["wait"].append(spent["wait"])
            taken["beside"].append(now - last)
        elif after == 0:  # the last before the next: whatever was written is written
            taken["step"].append(now - last)
        last = now
        if len(taken["save"]) == num_saves:
            loop.stop()
    os.sync()
    return taken


def time_resume() -> list[float]:
    """Seconds that making a Loop takes which goes on from a checkpoint, beyond one that does not."""
    from time import perf_counter

    from ddpnb.train import keeping

    model, optimizer, loader = make_training()
    began = perf_counter()
    loop = ddpnb.Loop(model, optimizer, loader, epochs=1000, checks=False)
    taken = perf_counter() - began
    assert loop.step > 0, "nothing was resumed"
    keeping._claimed.clear()
    return [taken]


def time_others(folder: str, repeats: int) -> dict[str, list[float]]:
    """Seconds for which others hold up the training, and those until it is written."""
    import os
    from time import perf_counter

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer, loader = make_training()
    for (inputs,) in loader:
        model(inputs).square().mean().backward()
        optimizer.step()
        break
    taken: dict[str, list[float]] = {}

    def note(name: str, began: float) -> None:
        taken.setdefault(name, []).append(perf_counter() - began)

    for number in range(repeats):
        for name in ("torch.save", "torch.save + fsync"):
            dist.barrier()
            began = perf_counter()
            if ddpnb.rank() == 0:
                with open(f"{folder}/{name}", "wb") as file:
                    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, file)
                    if "fsync" in name:
                        file.flush()
                        os.fsync(file.fileno())
            dist.barrier()
            note(name, began)
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dist.barrier()
        began = perf_counter()
        dcp.save(state, checkpoint_id=f"{folder}/sync-{number}")
        note("dcp.save", began)
        dist.barrier()
        began = perf_counter()
        future = dcp.async_save(state, checkpoint_id=f"{folder}/async-{number}")
        note("dcp.async_save, the call", began)
        future.result()
        note("dcp.async_save, until done", began)
    return taken


def saves(report: Report, options: Namespace) -> None:
    """100 MiB on 2 ranks."""
    report.section("a checkpoint of 100 MiB on 2 ranks")
    num_saves, repeats = (6, 2) if options.quick else (30, 8)
    prepare = f"%load_ext ddpnb\nNUM_LAYERS, WIDTH = {NUM_LAYERS}, {WIDTH}"
    with (
        tempfile.TemporaryDirectory() as folder,
        BenchKernel(make_training, time_saves, time_resume, time_others, prepare=prepare) as kernel,
    ):
        Path(folder, "others").mkdir()
        two = f"nproc_per_node=2, view=False, run_dir={folder + '/runs'!r}"
        ranks = answer(
            kernel.do(f"print(json.dumps(list(ddpnb.launch(time_saves, {num_saves}, {two}).results().values())))", 600)
        )
        resumes = []
        for _ in range(repeats):
            found = kernel.ask(f"print(json.dumps(ddpnb.launch(time_resume, {two}, resume=True).results()[0]))")
            resumes += found
        others = answer(
            kernel.do(
                f"print(json.dumps(ddpnb.launch(time_others, {folder + '/others'!r}, {repeats}, nproc_per_node=2, "
                "view=False).result()))",
                600,
            )
        )
    writing = ranks[0]  # rank 0 copies and writes the weights; the other only its random numbers
    held_up = Sample(save + wait for save, wait in zip(writing["save"], writing["wait"], strict=True))
    rows = {
        "the save call": Sample(writing["save"]),
        "waiting before the optimizer's step": Sample(writing["wait"]),
        "both": held_up,
        "until it is durable": Sample(writing["durable"]),
        "a step by itself": Sample(writing["step"]),
        "a step beside the copying": Sample(writing["beside"]),
        "resume: a Loop that loads": Sample(resumes),
        **{name: Sample(values) for name, values in others.items()},
    }
    report.table("Seconds on rank 0", ("", *COLUMNS), [(name, *each.columns(duration)) for name, each in rows.items()])
    report.judge("the training is held up ≤ 2 ms, median", duration(held_up.median), held_up.median <= 0.002)
    durable = rows["until it is durable"].median
    report.judge("durable ≤ 1 s, median", duration(durable), durable <= 1.0)
    resume = statistics.median(resumes)
    report.judge("resumed ≤ 0.2 s, median", duration(resume), resume <= 0.2)


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(__doc__, {"saves": saves}))
