"""What ranks tell each other before they reduce or gather, and what is gathered, as bytes.

A collective over shapes that differ hangs, or adds up what does not belong together. So each rank says in a *frame*
what it is about to do, and the ranks first exchange digests of their frames, 40 bytes each. Where all are the same,
that was all. Else the frames themselves are exchanged: `gather` reads the values from them, a reduction raises, with
the same text on all ranks. A rank whose value cannot be reduced says so in its frame: an exception on it alone would
leave the others waiting.

Nothing is pickled: what is gathered travels as JSON and the raw bytes of tensors.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..context import device, stopwatch

_LENGTH = struct.Struct("=q")
_REFUSALS = {kind.__name__: kind for kind in (TypeError, ValueError, OverflowError)}


def frame(call: str, describe: Callable[[list[Tensor]], Any]) -> Tensor:
    """What this rank tells the others, as bytes: the length of a JSON head, the head, and the parts of the body.

    Args:
        call: name of the function that the user called.
        describe: makes the head's value, and appends the body's parts (uint8, 1-D) to the list it is given.
    """
    parts: list[Tensor] = []
    try:
        value = describe(parts)
        head = json.dumps({"call": call, "value": value, "sizes": [len(part) for part in parts]}).encode()
    except Exception as error:  # told to all ranks, which raise it alike: here alone it would leave the others waiting
        head, parts = json.dumps({"call": call, "refusal": _refusal(error)}).encode(), []
    start = torch.frombuffer(bytearray(_LENGTH.pack(len(head)) + head), dtype=torch.uint8)
    return torch.cat([start, *parts])


def _refusal(error: Exception) -> tuple[str, str]:
    """Name of the exception type that all ranks raise, and its text."""
    if isinstance(error, RecursionError):
        return "ValueError", "value is nested too deeply: does it contain itself?"
    kind = next((kind for kind in _REFUSALS.values() if isinstance(error, kind)), ValueError)
    return kind.__name__, str(error)


def unframed(frame: Tensor) -> tuple[dict[str, Any], Sequence[Tensor]]:
    """The head, and the parts of the body."""
    (length,) = _LENGTH.unpack(frame[: _LENGTH.size].numpy().tobytes())
    start = _LENGTH.size + length
    head = json.loads(frame[_LENGTH.size : start].numpy().tobytes())
    return head, frame[start:].split(head.get("sizes", []))


def exchanged(own: Tensor, num_ranks: int) -> list[Tensor]:
    """Every rank's frame, by rank. Where a digest shows that all are the same, they are not sent."""
    if num_ranks == 1:
        return [own]
    place = carrier()
    opening = [*struct.unpack("=4q", hashlib.sha256(own.numpy().data).digest()), len(own)]
    openings = _all_gathered(torch.tensor(opening, device=place), num_ranks).tolist()
    if all(opening == other for other in openings):
        return [own] * num_ranks
    sizes = [size for *_, size in openings]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=place)
    padded[: len(own)] = own
    frames = _all_gathered(padded, num_ranks).cpu()
    return [each[:size] for each, size in zip(frames, sizes, strict=True)]


def _all_gathered(tensor: Tensor, num_ranks: int) -> Tensor:
    """(length,) of each rank -> (num_ranks, length)."""
    row = tensor.new_empty(num_ranks * len(tensor))
    began = monotonic()
    dist.all_gather_single(row, tensor)
    stopwatch().waited(began)
    return row.view(num_ranks, len(tensor))


def carrier() -> torch.device:
    """Where a tensor must lie during a collective: NCCL takes it on this rank's GPU, gloo in main memory."""
    return device() if dist.get_backend() == "nccl" else torch.device("cpu")


def check(heads: Sequence[Mapping[str, Any]]) -> None:
    """Raise, on all ranks alike, unless all are in the same call and hold what belongs together."""
    for rank, head in enumerate(heads):
        if "refusal" in head:
            kind, reason = head["refusal"]
            raise _REFUSALS[kind](f"{head['call']}(): on rank {rank} {reason}")
    calls = [f"{head['call']}()" for head in heads]
    if len(set(calls)) > 1:
        raise ValueError(
            f"the ranks are in different calls: {_by_rank(calls)}. Make each call on all ranks, in one order."
        )
    if calls[0] == "gather()":
        return
    outlines: list[dict[str, str]] = [head["value"] for head in heads]
    for path in dict.fromkeys(itertools.chain(*outlines)):
        found = [outline.get(path, "missing") for outline in outlines]
        if len(set(found)) > 1:
            raise ValueError(
                f"{calls[0]} needs the same structure on all ranks: {path} is {_by_rank(found)}. "
                "gather() takes values that differ."
            )


def _by_rank(words: Sequence[str]) -> str:
    """Who has what: `a number on rank 1; missing on ranks 0, 2`."""
    ranks: dict[str, list[str]] = {}  # {word: who has it}
    for rank, word in enumerate(words):
        ranks.setdefault(word, []).append(str(rank))
    return "; ".join(f"{word} on rank{'s' * (len(own) > 1)} {', '.join(own)}" for word, own in ranks.items())


# ---- values


def encoded(value: Any, path: str, put: Callable[[Tensor], Any]) -> Any:
    """The value as JSON, in which a container or tensor is an object of one key.

    Args:
        value: numbers, tensors, strings, None, and dicts, lists and tuples of them.
        path: what it is called.
        put: takes each tensor, a dense one; returns the JSON by which `decoded` finds it again.
    """
    plain = value.item() if isinstance(value, np.generic) else value
    match plain:
        case None | bool() | int() | float() | str():
            return plain
        case dict():
            return {"dict": [[key, encoded(item, below(path, key), put)] for key, item in plain.items()]}
        case list() | tuple():
            items = [encoded(item, below(path, index), put) for index, item in enumerate(plain)]
            return {"list" if isinstance(plain, list) else "tuple": items}
        case Tensor():
            return {"tensor": put(dense(plain, path))}
    raise TypeError(
        f"{path} is of type {type(value).__name__}: what can go elsewhere are numbers, tensors, strings, None, and "
        "dicts, lists and tuples of them"
    )


def decoded(spec: Any, get: Callable[[Any], Tensor]) -> Any:
    """The value again; `get` finds a tensor by what `put` returned for it."""
    match spec:
        case {"dict": pairs}:
            return {key: decoded(item, get) for key, item in pairs}
        case {"list": items}:
            return [decoded(item, get) for item in items]
        case {"tuple": items}:
            return tuple(decoded(item, get) for item in items)
        case {"tensor": place}:
            return get(place)
        case _:
            return spec


def packed(value: Any, parts: list[Tensor]) -> Any:
    """The value as `encoded` has it; appends the tensors' bytes to `parts`."""

    def put(tensor: Tensor) -> Any:
        parts.append(_raw(tensor))
        return [dtype_name(tensor.dtype), list(tensor.shape), tensor.device.type]

    return encoded(value, "value", put)


def unpacked(spec: Any, parts: Sequence[Tensor]) -> Any:
    """The value again, from the tensors' bytes in the order in which they were appended."""
    rest = iter(parts)

    def get(place: tuple[str, list[int], str]) -> Tensor:
        dtype, shape, kind = place
        # In memory of its own: a part starts anywhere among the bytes, an element at a multiple of its size.
        tensor = next(rest).clone().view(getattr(torch, dtype)).reshape(shape)
        return tensor if kind == "cpu" else tensor.to(device())

    return decoded(spec, get)


def _raw(tensor: Tensor) -> Tensor:
    """Its elements as bytes in main memory, in row-major order."""
    return tensor.cpu().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)


def below(path: str, key: object) -> str:
    """The path of what a container has at a key."""
    if not isinstance(key, (str, int)):
        raise TypeError(f"{path} has a key of type {type(key).__name__}: keys are str or int")
    return f"{path}[{key!r}]"


def dense(tensor: Tensor, path: str) -> Tensor:
    """The tensor without its graph; one without a plain row of elements is refused."""
    if hasattr(tensor, "full_tensor"):
        raise TypeError(f"{path} is a DTensor, of which each rank has a part: pass its full_tensor()")
    if tensor.is_nested or tensor.is_quantized or tensor.layout != torch.strided or tensor.is_meta:
        kind = "has no data (device meta)" if tensor.is_meta else "is sparse, nested or quantized"
        raise TypeError(f"{path} is a tensor that {kind}: pass a dense one")
    return tensor.detach()


def dtype_name(dtype: torch.dtype) -> str:
    """As `torch.` has it."""
    return str(dtype).removeprefix("torch.")
