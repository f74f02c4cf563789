"""The likely cause of a failure, and what helps, for the kinds that everybody meets once.

A table of what PyTorch and the system say, word for word, and of what it means to whoever reads it in a cell. The first
row that fits is taken. Pure: state -> words.

Runs in: kernel
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from .messages import Exited, Lost, Raised
from .stacks import standing
from .state import Failure, RankState, RunState

_OUTPUT_LINES = 20
"""Last lines of a dead rank in which its last words are looked for."""


@dataclass(frozen=True, slots=True)
class Cure:
    """What a failure most likely came from."""

    cause: str
    """In a sentence."""
    cure: str
    """What helps, in a sentence or two."""


@dataclass(frozen=True, slots=True)
class _Known:
    said: re.Pattern[str]
    cure: Cure


def _known(said: str, cause: str, cure: str) -> _Known:
    return _Known(re.compile(said), Cure(cause, cure))


_LESS_MEMORY = "A smaller batch, fewer workers or fewer DataLoader workers need less."

_KNOWN = (
    _known(
        r"CUDA out of memory",
        "The GPU's memory ran out.",
        "A smaller batch needs less, and Loop(…, accumulate=2) keeps the joint one as it was; so do "
        "wrap(model, precision='bf16') and wrap(model, strategy='fsdp').",
    ),
    _known(
        r"\bMemoryError\b|DefaultCPUAllocator: can't allocate memory|Cannot allocate memory",
        "This machine's memory ran out, or more was asked for than it has.",
        _LESS_MEMORY,
    ),
    _known(
        r"Expected to have finished reduction in the prior iteration|the loss does not depend on",
        "Some parameters had no part in the loss, and DDP waits for the gradient of each.",
        "Use them, freeze them (requires_grad_(False) before wrap), or wrap(model, find_unused_parameters=True).",
    ),
    _known(
        r"appears not to match (sizes|strides) of the same param|DDP expects same model across all ranks",
        "The model is not the same on all ranks.",
        "Build it from the same arguments everywhere: nothing in it may depend on the rank or on a rank's own data.",
    ),
    _known(
        r"ProcessGroup\w+::\w+: invalid tensor (size|type)",
        "The tensors that this call was given differ in shape or dtype from each other.",
        "A list has one tensor for each rank, all like the one that is sent; ddpnb.gather() takes values that differ.",
    ),
    _known(
        r"op\.preamble\.length <= op\.nbytes",
        "Ranks met in a collective with tensors of different shape or dtype, or in two different collectives.",
        "Make the same calls on all ranks, in the same order, with the same shape and dtype; ddpnb.gather() takes "
        "values that differ. launch(…, env={'TORCH_DISTRIBUTED_DEBUG': 'DETAIL'}) names the first call that differs.",
    ),
    _known(
        r"Cannot re-initialize CUDA in forked subprocess",
        "CUDA was in use before this process was forked, and a fork cannot use it.",
        "Launch without start_method='fork'. In a data set, which DataLoader workers are forked for, stay on the CPU: "
        "ddpnb.Loop moves each batch to the device.",
    ),
    _known(
        r"Torch not compiled with CUDA enabled|No CUDA GPUs are available|Found no NVIDIA driver",
        "The function asks for a GPU, and there is none for it.",
        "ddpnb.device() is what this rank computes on, with a GPU and without.",
    ),
    _known(
        r"EADDRINUSE|Address already in use",
        "The port is taken by another program, or another run.",
        "Port 0 takes one that is free. A process group needs none of yours: launch makes it, on a port of its own.",
    ),
    _known(
        r"DataLoader worker .*killed by signal: Bus error",
        "Shared memory (/dev/shm) ran out, in which DataLoader workers hand over batches.",
        "Smaller batches or num_workers=0 need less; in a container, docker run --shm-size=8g gives more.",
    ),
    _known(
        r"DataLoader worker \(pid.*(killed by signal|exited unexpectedly)",
        "A process of the DataLoader was ended: memory ran out, or code that the data set calls crashed.",
        "num_workers=0 shows where it happens; fewer DataLoader workers need less memory.",
    ),
    _known(
        r"Timed out waiting \d+ms|Watchdog caught collective operation timeout",
        "{absent} in time.",
        "Every rank must make the same collective calls. One that is only slow needs launch(…, timeout=1800).",
    ),
    _known(
        r"Can't pickle|[Cc]annot pickle|cannot be pickled|PicklingError",
        "Something is to go to another process, and cannot be pickled: a lambda, a generator, an open file or a lock.",
        "Give a function with a name, or what the thing is made from, and make it over there.",
    ),
)


def likely_cause(state: RunState, failure: Failure) -> Cure | None:
    """What a failure most likely came from; None where that is not known."""
    if isinstance(failure.witness, Exited) and failure.witness.exitcode == -signal.SIGKILL:
        is_known = bool(failure.witness.oom_kills)
        by_whom = "Memory ran out, and the system ended it." if is_known else "Somebody killed it, or memory ran out."
        return Cure(by_whom, _LESS_MEMORY)
    left = [rank for rank in state.ranks if rank.returned]
    if failure.is_echo and left:
        return _left_early(failure, left)
    said = _said(state, failure)
    found = next((known.cure for known in _KNOWN if known.said.search(said)), None)
    if found is None:
        return None
    return Cure(found.cause.replace("{absent}", _absent(state, failure)), found.cure)


def _said(state: RunState, failure: Failure) -> str:
    match failure.witness:
        case Raised() as raised:
            # All exceptions of a chain, but no line of code: it may catch, or speak of, what has not happened.
            lines = f"{raised.type_name}\n{raised.text}\n{raised.traceback}".splitlines()
            return "\n".join(line for line in lines if not line.startswith(" "))
        case Exited() as exited:
            return "\n".join(_last_words(state.rank(exited.rank).output.lines(_OUTPUT_LINES), exited.exitcode))
        case Lost() as lost:
            return lost.text


def _last_words(lines: list[str], exitcode: int) -> list[str]:
    """What a rank said of its own end; nothing where nobody said why, and its last lines may be of anything."""
    if exitcode == -signal.SIGABRT:  # C++ code ends a process so, and prints for what error
        return lines
    return lines[-1:] if exitcode == 1 else []  # a traceback's last line


def _left_early(failure: Failure, left: list[RankState]) -> Cure:
    gone = [str(rank.rank) for rank in left]
    who = f"Rank {gone[0]} has" if len(gone) == 1 else f"Ranks {', '.join(gone)} have"
    return Cure(
        f"{who} already returned from the function, while rank {failure.rank} waited for all ranks in a collective.",
        "Every rank must make the same collective calls: is one under `if rank == 0`, or in a loop of unequal length?",
    )


def _absent(state: RunState, failure: Failure) -> str:
    """Who did not wait as well, and where they stood instead."""
    others = [(rank, standing(state, rank)) for rank in state.ranks if rank.rank != failure.rank]
    absent = [
        f"rank {rank.rank}, which stood in {stands.where}," if stands.place else f"rank {rank.rank}"
        for rank, stands in others
        if stands.kind in ("busy", "loader", "halted") and not rank.raised
    ]
    if not absent and all(rank.raised and rank.raised.is_echo for rank, _ in others):
        return "The ranks waited for each other, each in a collective to which the others did not come"
    words = " and ".join(absent) or "another rank"
    return f"{words[0].upper()}{words[1:]} did not come to the collective"
