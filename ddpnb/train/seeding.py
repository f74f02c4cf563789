"""Random numbers that differ between ranks, and are the same in every run.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

import hashlib
import operator
import random
from typing import SupportsIndex

import numpy as np
import torch
import torch.distributed as dist

from ..context import rank

_END = 1 << 64
"""Seeds are below it: torch takes no more than 64 bits."""


def seed_everything(seed: SupportsIndex, *, same_on_all_ranks: bool = False) -> int:
    """Seed Python's `random`, NumPy's global generator and torch (CPU and GPUs), each rank with a stream of its own.

        ddpnb.seed_everything(0)
        model = ddpnb.wrap(Net())

    stands for

        digest = hashlib.sha256(f"{seed} {rank}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little")
        random.seed(seed); np.random.seed([seed % 2**32, seed >> 32]); torch.manual_seed(seed)

    With one seed for all, every rank would drop the same units and crop its images alike, and N ranks would draw the
    randomness of one. Weights need no common seed: when a model is wrapped, all ranks are sent those of rank 0. The
    same seed is right where ranks must draw alike and nothing is sent between them: strategy="none", data made by
    every rank for itself, a choice on which the control flow of all ranks depends.

    The pair is hashed: `seed + rank` would make rank 1 of seed 0 repeat rank 0 of seed 1.

    Args:
        seed: 0 … 2**64 - 1.
        same_on_all_ranks: take this very number on every rank, as a script without ranks does.

    Returns:
        The number that this rank's generators were seeded with.

    Raises:
        TypeError: the seed is no integer.
        ValueError: it is negative, or has more than 64 bits.
    """
    number = _checked(seed)
    if not same_on_all_ranks:
        number = _stream(number, _rank())
    random.seed(number)
    np.random.seed(number if number < 1 << 32 else [number % (1 << 32), number >> 32])
    torch.manual_seed(number)
    return number


def _checked(seed: SupportsIndex) -> int:
    try:
        number = operator.index(seed)
    except TypeError:
        number = None
    if number is None or isinstance(seed, bool):
        raise TypeError(f"seed={seed!r} is not an int: give one from 0 to 2**64 - 1, such as 0")
    if not 0 <= number < _END:
        raise ValueError(f"seed={number} is {'negative' if number < 0 else 'too large'}: give one from 0 to 2**64 - 1")
    return number


def _stream(seed: int, own_rank: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {own_rank}".encode()).digest()[:8], "little")


def _rank() -> int:
    """This process's rank, without making a group for it."""
    return dist.get_rank() if dist.is_initialized() else rank()
