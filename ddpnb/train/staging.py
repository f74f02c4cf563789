"""Copies of a training's state in memory that is kept from one checkpoint to the next.

What only the optimizer changes need not be copied at once: a thread does it beside the next forward and backward, and
the training waits for it before the optimizer moves. A forward changes buffers and random numbers: those are copied
where they are taken.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .snapshot import Tree, as_part, part_of, plain


class Stage:
    """Holds one checkpoint's tensors at a time."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}  # {path in the trees: memory on the CPU}
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []  # (to, from)
        self._is_copied = threading.Event()
        self._is_copied.set()
        self._began: torch.Event | None = None
        self._copied: torch.Event | None = None

    def take(self, name: str, value: Any, is_late: Callable[[str], bool] = lambda _: False) -> Tree:
        """A tree of `value` whose tensors are copies.

        Args:
            name: of the tree; paths in it begin so.
            value: nested dicts, lists and tuples of tensors and plain values.
            is_late: whether the tensor at a path is left to `copy`.
        """
        return plain(value, name, lambda tensor, path: self._leaf(tensor, path, is_late(path)))

    def begin(self) -> None:
        """Everything is taken; from now on `wait` waits for `copy`."""
        self._is_copied.clear()
        cuda = next((own for _, own in self._late if own.is_cuda), None)
        self._began = None if cuda is None else torch.Event(cuda.device)
        if self._began is not None:
            self._began.record()

    def copy(self) -> None:
        """Copy what was left, in another thread than the training's."""
        try:
            if self._began is None:
                for kept, own in self._late:
                    kept.copy_(own)
            else:
                self._copy_from_gpu(self._began)
        finally:
            self._late = []
            self._is_copied.set()
        if self._copied is not None:
            self._copied.synchronize()

    def wait(self) -> None:
        """Before the optimizer moves: wait until nothing is read from the training's own tensors any more."""
        self._is_copied.wait()
        if self._copied is not None:
            self._copied.wait()  # the device waits, this thread does not

    def _copy_from_gpu(self, began: torch.Event) -> None:
        device = self._late[0][1].device
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            began.wait()
            for kept, own in self._late:
                kept.copy_(own, non_blocking=True)
            self._copied = torch.Event(device)
            self._copied.record()

    def _leaf(self, tensor: torch.Tensor, path: str, is_late: bool) -> Tree:
        own, place = part_of(tensor)
        kept = self._kept.get(path)
        if kept is None or kept.shape != own.shape or kept.dtype != own.dtype or kept.stride() != own.stride():
            kept = self._kept[path] = torch.empty_like(own, device="cpu", pin_memory=own.is_cuda)
        if is_late:
            self._late.append((kept, own))
        else:
            kept.copy_(own)
        return as_part(kept, place)
