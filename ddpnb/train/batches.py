"""Batches, whatever they are made of: tensors in tuples, lists and dicts.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_is_leaf, tree_leaves, tree_map


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`; copied without waiting where its memory is pinned."""

    if isinstance(batch, torch.Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if batch.__class__ is tuple or batch.__class__ is list:  # as most are: without the machinery for all others
        return batch.__class__([to_device(each, device) for each in batch])
    if tree_is_leaf(batch):
        return batch
    return tree_map(lambda leaf: to_device(leaf, device), batch)


def num_samples(batch: Any) -> int | None:
    """The length of the first tensor's first dimension; None where there is no tensor that has one."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return len(leaf)
    return None


def cut(batch: Any) -> Any:
    """The batch without its samples: every tensor of length 0, every list of things that are no tensors empty."""
    return tree_map(lambda value: value[:0] if isinstance(value, torch.Tensor) and value.dim() else value, batch)
