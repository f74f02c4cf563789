"""Copies of a training's state in memory that is kept from one checkpoint to the next.

What only the optimizer changes need not be copied at once: a thread does it beside the next forward and backward, and
the training waits for it before the optimizer moves. A forward changes buffers and random numbers: those are copied
where they are taken.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from .snapshot import Tree, as_part, part_of, plain


class Later:
    """What will be a tree of copies, when `Stage.copy` has been through."""

    tree: Tree = None


class Stage:
    """Holds one checkpoint's tensors at a time.

    Args:
        device: where the training's own are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, torch.Tensor] = {}  # {path in the trees: memory on the CPU}
        self._left: list[tuple[Later, str, Any, Set[str]]] = []
        self._versions: dict[str, tuple[torch.Tensor, int]] = {}  # of what is left, by path
        self.torn: set[str] = set()
        """Paths of what was changed while it was copied, the last time."""
        self._is_copied = threading.Event()
        self._is_copied.set()
        self._began: torch.Event | None = None
        self._copied: torch.Event | None = None

    def clear(self) -> None:
        """Begin anew; what a checkpoint that could not be made has left is forgotten."""
        self._left, self._versions, self.torn = [], {}, set()

    def take(self, name: str, value: Any) -> Tree:
        """A tree of `value`, nested dicts, lists and tuples of tensors and plain values, whose tensors are copies.

        Args:
            name: of the tree; paths in it begin so.
            value: what is copied.
        """
        return plain(value, name, lambda tensor, path: self._copy(tensor, path, waits=True))

    def leave(self, name: str, value: Mapping[str, Any], changing: Set[str] = frozenset()) -> Later:
        """As `take`, but left to `copy`; only the values of `changing` are copied now."""
        copied = frozenset(f"{name}/{key}" for key in changing)
        for key in changing:
            self.take(f"{name}/{key}", value[key])
        self._versions |= {
            f"{name}/{key}": (tensor, tensor._version)
            for key, tensor in value.items()
            if key not in changing and isinstance(tensor, torch.Tensor)
        }
        later = Later()
        self._left.append((later, name, value, copied))
        return later

    def begin(self) -> None:
        """Everything is taken; from now on `wait` waits for `copy`."""
        self._is_copied.clear()
        if self._device.type == "cuda":
            self._began = torch.Event(self._device)
            self._began.record()

    def copy(self) -> None:
        """Copy what was left, in another thread than the training's."""
        try:
            with self._stream():
                for later, name, value, copied in self._left:
                    later.tree = plain(value, name, partial(self._copy_but, copied))
            self.torn = {path for path, (tensor, version) in self._versions.items() if tensor._version != version}
        finally:
            self._left, self._versions = [], {}
            self._is_copied.set()
        if self._copied is not None:
            self._copied.synchronize()

    def wait(self) -> None:
        """Before the optimizer moves: wait until nothing is read from the training's own tensors any more."""
        self._is_copied.wait()
        if self._copied is not None:
            self._copied.wait()  # the device waits, this thread does not

    @contextmanager
    def _stream(self) -> Iterator[None]:
        """On a GPU: copies go beside the training's own stream, from where that stood at the beginning."""
        if self._began is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
            self._began.wait()
            yield
            self._copied = torch.Event(self._device)
            self._copied.record()

    def _copy(self, tensor: torch.Tensor, path: str, *, waits: bool) -> Tree:
        tree, kept, own = self._room(tensor, path)
        kept.copy_(own, non_blocking=not waits)
        return tree

    def _copy_but(self, copied: Set[str], tensor: torch.Tensor, path: str) -> Tree:
        return self._room(tensor, path)[0] if path in copied else self._copy(tensor, path, waits=False)

    def _room(self, tensor: torch.Tensor, path: str) -> tuple[Tree, torch.Tensor, torch.Tensor]:
        """What stands in the tree for a tensor, the memory for its copy, and what is to be copied."""
        own, place = part_of(tensor)
        kept = self._kept.get(path)
        if kept is None or kept.shape != own.shape or kept.dtype != own.dtype or kept.stride() != own.stride():
            kept = self._kept[path] = torch.empty_like(own, device="cpu", pin_memory=own.is_cuda)
        return as_part(kept, place), kept, own
