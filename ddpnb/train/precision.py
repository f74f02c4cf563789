"""Computing a forward in half precision.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..context import device

Precision = Literal["fp32", "bf16", "fp16"]

_MARK = "_ddpnb_dtype"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(precision: str) -> None:
    """Raise ValueError for a word that is none of the three."""
    if precision not in get_args(Precision):
        raise ValueError(f"precision is 'fp32', 'bf16' or 'fp16', not {precision!r}")


def half_dtype(precision: str) -> torch.dtype | None:
    """The dtype that a forward is computed in; None for "fp32", which leaves it to the model."""
    return _DTYPES.get(precision)


class Autocast(nn.Module):
    """Runs a module's forward under autocast; outputs come back in float32.

    Stands for `with torch.autocast(device_type, dtype): outputs = module(inputs).float()`, and cannot leave autocast
    switched on whatever the forward raises.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.module = module
        self._ddpnb_dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own."""
        first = next(self.module.parameters(), None)
        here = device() if first is None else first.device
        with torch.autocast(here.type, self._ddpnb_dtype):
            outputs = self.module(*args, **kwargs)
        return tree_map(_in_float32, outputs)


def computes_in(model: nn.Module) -> torch.dtype | None:
    """The dtype that `wrap` has the model's forward computed in; None: the weights' own."""
    return next((getattr(each, _MARK) for each in model.modules() if hasattr(each, _MARK)), None)


def is_marked(model: nn.Module) -> bool:
    """Whether `wrap` has seen the model."""
    return any(hasattr(each, _MARK) for each in model.modules())


def mark(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Remember for `computes_in` what a model computes in that has no `Autocast` around it."""
    setattr(model, _MARK, dtype)


def _in_float32(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in _DTYPES.values()
    return value.float() if is_half else value
