"""Who trains as one process does: the weights after two epochs beside those of one process with the joint batches.

    python -m tests.benchmarks.exactness

Run it from the repository's root. Two gloo ranks, float64, 4 micro-batches to a window, an epoch whose last window has
only two. Each library is used as its own documentation has it, on the same samples in the same order; one that is not
installed is left out. A distance of 1e-12 is rounding, anything near 1e-3 is another training.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddpnb
from tests.benchmarks.bench import Report, main

WORLD_SIZE, BATCH, ACCUMULATE, EPOCHS, DIM = 2, 2, 4, 2, 6
LENGTH = WORLD_SIZE * BATCH * 6  # a window of four micro-batches on each rank, and one of two

State = dict[str, torch.Tensor]


def samples() -> TensorDataset:
    """Inputs (LENGTH, DIM), targets (LENGTH, 1), and how many tokens each sample counts for, (LENGTH,)."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(LENGTH, DIM, generator=generator, dtype=torch.float64)
    tokens = torch.randint(1, 9, (LENGTH,), generator=generator).double()
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin(), tokens)


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same on every rank and in every library."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
    """Mean over the batch's samples, or over its tokens."""
    errors = (model(inputs) - targets).square().squeeze(1)
    return errors.mean() if tokens is None else (errors * tokens).sum() / tokens.sum()


def one_process(by_tokens: bool) -> State:
    """Plain torch, windows of the joint batch."""
    model, optimizer = model_and_optimizer()
    inputs, targets, tokens = samples().tensors
    for _ in range(EPOCHS):
        for window in torch.arange(LENGTH).split(WORLD_SIZE * BATCH * ACCUMULATE):
            optimizer.zero_grad()
            loss_of(model, inputs[window], targets[window], tokens[window] if by_tokens else None).backward()
            optimizer.step()
    return model.state_dict()


def own_batches() -> Iterator[tuple[torch.Tensor, ...]]:
    """This rank's micro-batches of an epoch, in order."""
    for joint in torch.arange(LENGTH).split(WORLD_SIZE * BATCH):
        yield samples()[joint[ddpnb.rank() * BATCH : (ddpnb.rank() + 1) * BATCH].tolist()]


def with_ddpnb(by_tokens: bool) -> State:
    """`ddpnb.Loop`."""
    model, _ = model_and_optimizer()
    model = ddpnb.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = ddpnb.Loop(model, optimizer, list(own_batches()), epochs=EPOCHS, accumulate=ACCUMULATE, checks=False)
    for inputs, targets, tokens in loop:
        loss = loss_of(model, inputs, targets, tokens if by_tokens else None)
        loop.update(loss, weight=tokens.sum() if by_tokens else None)
    return ddpnb.state_dict(model)


def textbook(by_tokens: bool) -> State:
    """The loop of many tutorials: loss / K, and a step after every K-th batch."""
    bare, optimizer = model_and_optimizer()
    model = nn.parallel.DistributedDataParallel(bare)
    for _ in range(EPOCHS):
        for number, (inputs, targets, tokens) in enumerate(own_batches()):
            loss = loss_of(model, inputs, targets, tokens if by_tokens else None) / ACCUMULATE
            loss.backward()
            if (number + 1) % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
    return bare.state_dict()


def with_accelerate(by_tokens: bool) -> State:
    """`accelerator.accumulate(model)`."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    bare, optimizer = model_and_optimizer()
    # Its own way to shard: batches of a rank alternate with those of the others.
    model, optimizer, loader = accelerator.prepare(bare, optimizer, DataLoader(samples(), BATCH))
    for _ in range(EPOCHS):
        for inputs, targets, tokens in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, inputs, targets, tokens if by_tokens else None))
                optimizer.step()
                optimizer.zero_grad()
    return {name: value.clone() for name, value in accelerator.unwrap_model(model).state_dict().items()}


def with_lightning(by_tokens: bool) -> State:
    """`Trainer(accumulate_grad_batches=…)`."""
    import logging

    import pytorch_lightning as lightning

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.own = model_and_optimizer()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            inputs, targets, tokens = batch
            return loss_of(self.net, inputs, targets, tokens if by_tokens else None)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.own

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy="ddp",
        precision="64-true",
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATE,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(list(own_batches()), batch_size=None))
    return {name: value.detach().cpu() for name, value in module.net.state_dict().items()}


LIBRARIES: dict[str, tuple[str | None, Callable[[bool], State]]] = {
    "ddpnb.Loop": (None, with_ddpnb),
    "textbook loop with DDP": (None, textbook),
    "accelerate": ("accelerate", with_accelerate),
    "Lightning": ("pytorch_lightning", with_lightning),
}
"""{name: (what has to be installed, how it trains)}."""


def windows(report: Report, _: Namespace) -> None:
    """The partial window, weighted by samples and by tokens."""
    report.section("weights after two epochs, beside one process")
    lines, own = [], []
    for name, (needed, train) in LIBRARIES.items():
        if needed is not None and find_spec(needed) is None:
            report.note(f"{name} is not installed")
            continue
        distances = []
        for by_tokens in (False, True):
            run = ddpnb.launch(train, by_tokens, nproc_per_node=WORLD_SIZE, view=False, threads_per_worker=1)
            found, wanted = run.result(), one_process(by_tokens)
            distances.append(max(float((found[key] - wanted[key]).abs().max()) for key in wanted))
        lines.append((name, *(f"{distance:.1e}" for distance in distances)))
        own = own or distances
    report.table("Largest distance of a weight", ("", "partial window", "and tokens"), lines)
    report.judge("ddpnb within 1e-12 in each", f"{max(own):.1e}", max(own) <= 1e-12)


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(__doc__, {"windows": windows}))
