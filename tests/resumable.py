"""A training that can be interrupted in every way, and the sha256 of all that it ends with."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import ddpnb

NUM_STEPS = 12
EPOCHS = 3
_LENGTH = 88  # of which a joint batch of 24 makes 4 steps, the last of them with 16


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points with a class each, and noise that is drawn anew whenever one is looked at."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(_LENGTH, 6, generator=generator)
        self.targets = torch.randint(0, 3, (_LENGTH,), generator=generator)

    def __len__(self) -> int:
        return _LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index] + 0.1 * torch.randn(6), self.targets[index]


class Interrupted(Exception):
    """What a rank raises that was told to."""


def _raise_on_the_last_rank(_: ddpnb.Loop) -> None:
    if ddpnb.rank() == ddpnb.world_size() - 1:
        raise Interrupted


def _kill(is_mine: bool) -> None:
    if is_mine:
        os.kill(os.getpid(), signal.SIGKILL)


KINDS: dict[str, Callable[[ddpnb.Loop], None]] = {
    "stop": lambda loop: loop.stop(),
    "exception on one rank": _raise_on_the_last_rank,
    "SIGKILL of one rank": lambda _: _kill(ddpnb.rank() == 0),
    "SIGKILL of all ranks": lambda _: _kill(True),
}
"""What happens in the body of the loop, while the checkpoint of the step before may still be written."""


def train(kind: str | None = None, at_step: int = 0, **options: Any) -> tuple[int, int, str]:
    """Train; the step it began with, the last, and the digest.

    Args:
        kind: how it is to be interrupted; None: not at all.
        at_step: after so many steps.
        options: of the Loop, beside those that matter here.
    """
    ddpnb.seed_everything(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    model = ddpnb.wrap(net, options.pop("strategy", "ddp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    loader = ddpnb.loader(Points(), 24 // ddpnb.world_size() // options.get("accumulate", 1), shuffle=True, seed=3)
    loop = ddpnb.Loop(model, optimizer, loader, **{"epochs": EPOCHS, "scheduler": scheduler, **options})
    first = loop.step
    for inputs, targets in loop:
        if kind is not None and loop.step == at_step:
            KINDS[kind](loop)
        loop.update(F.cross_entropy(model(inputs), targets))
    return first, loop.step, digest(ddpnb.state_dict(model), optimizer.state_dict(), scheduler.state_dict())


def digest(*states: Any) -> str:
    """The sha256 of every bit of nested states."""
    hashing = hashlib.sha256()

    def take(value: Any) -> None:
        match value:
            case torch.Tensor():
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                hashing.update(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            case dict():
                for key in value:
                    hashing.update(str(key).encode())
                    take(value[key])
            case list() | tuple():
                for each in value:
                    take(each)
            case _:
                hashing.update(repr(value).encode())

    take(states)
    return hashing.hexdigest()


def launcher(world_size: int, run_dir: Path | None = None, **options: Any) -> ddpnb.Launcher:
    """For runs of `train`."""
    return ddpnb.Launcher(
        nproc_per_node=world_size, run_dir=run_dir, view=False, threads_per_worker=1, timeout=60, **options
    )


def interrupted_and_resumed(world_size: int, kind: str, at_step: int, run_dir: Path) -> tuple[int, int, str]:
    """What `train` gives after it was interrupted and resumed; every step is saved."""
    launcher(world_size, run_dir)(train, kind, at_step, checkpoint_every=1).wait(100)
    result: tuple[int, int, str] = launcher(world_size, run_dir, resume=True)(train).result(100)
    return result
