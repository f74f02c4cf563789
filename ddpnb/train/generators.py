"""The states of the global random number generators, as plain tensors and numbers.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def take() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, and that of the GPU this process computes on."""
    version, numbers, python_gauss = random.getstate()
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "numbers": torch.from_numpy(np.array(numbers)), "gauss": python_gauss},
        "numpy": {
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def put_back(states: Mapping[str, Any]) -> None:
    """Set the generators to what `take` gave; a GPU's only where there is one."""
    python, numpy = states["python"], states["numpy"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def of_loader(loader: Any) -> list[torch.Generator]:
    """The generators that a plain DataLoader and its samplers were given, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(each, "generator", None) for each in holders]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())
