"""Gradients that travel in fewer bytes: torch's communication hooks, by name.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

CommHook = Literal["fp16", "bf16", "powersgd"]

_HALF = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


def check_comm_hook(name: str | None) -> None:
    """Raise ValueError for a hook that is not known, or that the backend here cannot do."""
    if name is not None and name not in (*_HALF, "powersgd"):
        raise ValueError(f"comm_hook is 'fp16', 'bf16' or 'powersgd', not {name!r}")
    if name == "bf16" and dist.get_backend() == "gloo":
        raise ValueError("comm_hook='bf16' needs nccl: gloo cannot add bfloat16; use 'fp16' or 'powersgd'")


def register_comm_hook(model: DistributedDataParallel, name: CommHook | None) -> None:
    """Have the model's gradients travel so; None: as they are.

    "powersgd" sends gradients as they are for 10 steps first, and rank-1 factors with error feedback from then on.
    Source: Vogels et al., PowerSGD, 2019; torch's `powerSGD_hook`.
    """
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=10)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name is not None:
        model.register_comm_hook(None, _HALF[name])
