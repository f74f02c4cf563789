"""When this rank's own gradients were ready, and when their reduction over the ranks was over.

Between the two a rank waits for the others. DDP has it in the middle of `loss.backward()`, whose wall time is therefore
the same on all ranks. A communication hook would see it, but it would change how DDP reduces, and there can be only
one. The engine's own callbacks see it whatever the hook: they run in the order in which they were queued, once the
local backward is through. DDP queues the one that waits for its buckets when the last bucket is full; a parameter's
hook comes before that, and queues ours. What ours queues comes after it.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

from time import monotonic

import torch
from torch import nn

from ..context import stopwatch

_queue = torch.autograd.Variable._execution_engine.queue_callback


class Reduction:
    """Tells the session's stopwatch of each backward of a model that is reduced over the ranks, and ends a step there.

    In static_graph's first backward, which DDP reduces by another callback, no waiting is seen; nor in a backward that
    does not reach `trigger`.

    Args:
        trigger: a parameter that gets a gradient in every backward.
    """

    def __init__(self, trigger: nn.Parameter) -> None:
        self.is_awaited = False
        """A forward has run whose backward will be reduced and has not come yet."""
        self._ready = 0.0
        self._hook = trigger.register_post_accumulate_grad_hook(self._begin)

    def close(self) -> None:
        """Let go of the trigger, which may outlive the model around it."""
        self._hook.remove()

    def _begin(self, _: torch.Tensor) -> None:
        if self.is_awaited:
            self.is_awaited = False
            _queue(self._note_ready)

    def _note_ready(self) -> None:
        self._ready = monotonic()
        _queue(self._note_reduced)

    def _note_reduced(self) -> None:
        stopwatch().end_step(self._ready)
