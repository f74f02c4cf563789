"""What the ranks hold, made one: `mean()`, `total()`, `gather()`.

Before a collective the ranks agree that they are about to do the same (`frames`).

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..context import world_size
from .frames import below, carrier, check, dense, dtype_name, exchanged, frame, packed, unframed, unpacked
from .membership import join


def mean(value: Any) -> Any:
    """Mean over the ranks of a number, a tensor, or dicts, lists and tuples of them. Call it on all ranks.

        loss = ddpnb.mean(loss)
        scores = ddpnb.mean({"loss": loss, "accuracy": accuracy})

    stands, for one tensor, for

        loss = loss.detach().clone()
        dist.all_reduce(loss)
        loss /= dist.get_world_size()

    Each rank counts the same, however many samples it saw: where these differ, divide a `total` by a `total`. All that
    has one dtype travels in one collective.

    Args:
        value: the same keys, lengths, shapes and dtypes on every rank; the order of keys and the devices may differ.
            It is not modified. nan and inf pass through.

    Returns:
        The same structure, the same bits on every rank. A number becomes a float. A tensor keeps shape, device and
        dtype, and has no gradient; one of integers or bools becomes one of `torch.get_default_dtype()`. fp16 and bf16
        are summed in fp32.

    Raises:
        ValueError: the structures differ; on all ranks, with the first place where they do.
        TypeError: a rank's value holds something else; on all ranks.
        OverflowError: a rank's int needs more than 64 bits; on all ranks.
    """
    return _reduced("mean", value)


def total(value: Any) -> Any:
    """Sum over the ranks of a number, a tensor, or dicts, lists and tuples of them. Call it on all ranks.

        correct, seen = ddpnb.total((correct, seen))
        accuracy = correct / seen                      # exact, also where ranks saw different numbers of samples

    stands, for one tensor, for

        correct = correct.detach().clone()
        dist.all_reduce(correct)

    Args:
        value: as for `mean`.

    Returns:
        The same structure, the same bits on every rank. Numbers add up as in Python: to an int that is exact, or to a
        float where a rank has one; a bool counts as 0 or 1. A tensor keeps shape, device and dtype, and has no
        gradient; one of bools becomes int64, a count, as in `torch.sum`. fp16 and bf16 are summed in fp32.

    Raises:
        ValueError: the structures differ; on all ranks, with the first place where they do.
        TypeError: a rank's value holds something else; on all ranks.
        OverflowError: a rank's int needs more than 64 bits, or the sum of a tensor of small integers does not fit into
            its dtype; on all ranks. (A sum beyond int64 wraps, as in torch.)
    """
    return _reduced("total", value)


def gather(value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank. Call it on all ranks.

        predictions = torch.cat(ddpnb.gather(predictions))        # (batch of rank 0 + batch of rank 1 + …, classes)
        names = ddpnb.gather({"rank": ddpnb.rank(), "host": socket.gethostname()})

    stands, for a tensor that has the same shape on all ranks, for

        parts = [torch.empty_like(predictions) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, predictions)

    and else for `dist.all_gather_object`, but reads no pickle: what a peer sends can hold values only, no code.

    Args:
        value: numbers, tensors, strings, None, and dicts, lists and tuples of them. Everything may differ between
            ranks: structure, shapes, dtypes. Every rank receives as many times the largest as there are ranks.

    Returns:
        A list of `world_size` values, copies also of this rank's own. Tensors have no gradient; those of a CPU are on
        the CPU, those of a GPU on this rank's own device. Numbers of NumPy become Python's, named tuples plain ones.

    Raises:
        TypeError: a rank's value holds something else; on all ranks.
        ValueError: the ranks are in different calls, or a value contains itself; on all ranks.
    """
    own = frame("gather", lambda parts: packed(value, parts))
    heads, parts = zip(*map(unframed, exchanged(own, _num_ranks())), strict=True)
    check(heads)
    return [unpacked(head["value"], part) for head, part in zip(heads, parts, strict=True)]


def _reduced(call: Literal["mean", "total"], value: Any) -> Any:
    num_ranks = _num_ranks()
    leaves: dict[str, int | float | Tensor] = {}  # {path: number or tensor}, in an order that all ranks have
    own = frame(call, lambda _: _outline(value, leaves))
    check([unframed(each)[0] for each in exchanged(own, num_ranks)])
    sums = _summed([_addends(leaf) for leaf in leaves.values()], num_ranks)
    results = {
        path: _finished(call, path, leaf, own, num_ranks)
        for (path, leaf), own in zip(leaves.items(), sums, strict=True)
    }
    return _rebuilt(value, "value", results)


def _num_ranks() -> int:
    """How many ranks take part. A process that is alone needs no group, and none is made for it."""
    return join().world_size if dist.is_initialized() or world_size() > 1 else 1


# ---- taking a value apart


def _outline(value: Any, leaves: dict[str, int | float | Tensor]) -> dict[str, str]:
    """{path: what is there}, the same for all ranks whose values can be reduced together; fills in the leaves."""
    outline = {}
    for path, item in _walk(value, "value"):
        match item:
            case dict():
                outline[path] = "a dict"
            case list() | tuple():
                outline[path] = f"a {'list' if isinstance(item, list) else 'tuple'} of length {len(item)}"
            case Tensor():
                leaves[path] = dense(item, path)
                outline[path] = f"a tensor of {dtype_name(item.dtype)} and shape {tuple(item.shape)}"
            case _:
                leaves[path] = _number(item, path)
                outline[path] = "a number"
    return outline


def _walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The value and all that it holds, each with its path; the order of keys does not matter."""
    yield path, value
    if isinstance(value, dict):
        for key in sorted(value, key=repr):
            yield from _walk(value[key], below(path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _walk(item, below(path, index))


def _number(value: Any, path: str) -> int | float:
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, float):
        return number
    if not isinstance(number, int):
        raise TypeError(
            f"{path} is of type {type(value).__name__}: "
            "what can be reduced are numbers, tensors, and dicts, lists and tuples of them"
        )
    if not -(1 << 63) <= number < 1 << 63:
        raise OverflowError(f"{path} is an int that needs more than 64 bits: pass float(…)")
    return int(number)


# ---- summing


def _addends(leaf: int | float | Tensor) -> Tensor:
    """What is summed in place of a leaf, 1-D, in one of three dtypes: float32, float64, int64.

    A number goes as four of float64: an int's upper and lower 32 bits, whose sums over two million ranks are exact; a
    float; and 1 where it was a float.
    """
    if not isinstance(leaf, Tensor):
        parts = (0.0, 0.0, leaf, 1.0) if isinstance(leaf, float) else (leaf >> 32, leaf & 0xFFFFFFFF, 0.0, 0.0)
        return torch.tensor(parts, dtype=torch.float64)
    if leaf.is_complex():
        wide = leaf if leaf.dtype == torch.complex128 else leaf.to(torch.complex64)
        return torch.view_as_real(wide.resolve_conj()).reshape(-1)
    if leaf.is_floating_point():
        return leaf.reshape(-1).to(torch.float64 if leaf.dtype == torch.float64 else torch.float32)
    return leaf.reshape(-1).to(torch.int64)


def _summed(parts: Sequence[Tensor], num_ranks: int) -> list[Tensor]:
    """Sums over all ranks, in new memory: one collective for each dtype."""
    if num_ranks == 1:
        return [part.clone() for part in parts]
    home = carrier()
    sums = list(parts)
    for dtype in dict.fromkeys(part.dtype for part in parts):
        places = [place for place, part in enumerate(parts) if part.dtype == dtype]
        row = torch.cat([parts[place].to(home) for place in places])
        dist.all_reduce(row)
        for place, own in zip(places, row.split([len(parts[place]) for place in places]), strict=True):
            sums[place] = own.clone()  # or the smallest result would keep the whole row alive
    return sums


def _finished(
    call: Literal["mean", "total"], path: str, leaf: int | float | Tensor, sums: Tensor, num_ranks: int
) -> int | float | Tensor:
    """The result in place of a leaf."""
    if not isinstance(leaf, Tensor):
        upper, lower, floats, num_floats = sums.tolist()
        number = (int(upper) << 32) + int(lower) + (floats if num_floats else 0)
        return number / num_ranks if call == "mean" else number
    dtype = leaf.dtype
    if leaf.is_complex():
        sums = torch.view_as_complex(sums.reshape(-1, 2))
    elif not leaf.is_floating_point() and call == "mean":
        sums, dtype = sums.double(), torch.get_default_dtype()
    elif dtype == torch.bool:
        dtype = torch.int64
    if call == "mean":
        sums = sums / num_ranks
    _refuse_overflow(path, sums, dtype)
    return sums.reshape(leaf.shape).to(leaf.device, dtype)


def _refuse_overflow(path: str, sums: Tensor, dtype: torch.dtype) -> None:
    """Raise where sums of small integers would wrap; all ranks have the same sums, and do the same."""
    if sums.dtype != torch.int64 or dtype.itemsize == 8 or not len(sums):
        return
    least, most = (int(bound) for bound in sums.aminmax())
    if least < torch.iinfo(dtype).min or most > torch.iinfo(dtype).max:
        raise OverflowError(
            f"total(): {path} sums up to values from {least} to {most}, which {dtype_name(dtype)} does not hold: "
            "pass it as int64, with .long()"
        )


def _rebuilt(value: Any, path: str, results: Mapping[str, int | float | Tensor]) -> Any:
    """The value's structure, with the results at the paths of its leaves."""
    match value:
        case dict():
            return {key: _rebuilt(item, below(path, key), results) for key, item in value.items()}
        case list() | tuple():
            items = [_rebuilt(item, below(path, index), results) for index, item in enumerate(value)]
            if isinstance(value, list):
                return items
            return type(value)._make(items) if hasattr(value, "_make") else tuple(items)
        case _:
            return results[path]
