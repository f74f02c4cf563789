"""`doctor()`: what about this kernel and machine could trouble a launch, each finding with its cure.

Runs in: kernel
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from . import runtime, server
from .names import WORKER
from .plan import Options, make_plan, num_cores, num_gpus

Level = Literal["ok", "note", "problem"]

_MARKS: dict[Level, str] = {"ok": "✓", "note": "·", "problem": "✗"}
_PACKAGES = ("ddpnb", "torch", "ipykernel", "ipywidgets", "jupyterlab", "matplotlib")
_SMALL_SHM = 1 << 30
_FILES_PER_RANK = 12  # pipes, page, sockets of a rank, as the kernel and rank 0 hold them
_GPU_LIBRARIES = ("cupy", "jax", "tensorflow", "numba.cuda", "pycuda")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    what: str
    cure: str | None = None
    """What to do; None where nothing needs doing."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings; shows itself as text."""

    findings: tuple[Finding, ...]

    @property
    def is_well(self) -> bool:
        """Whether no problem was found."""
        return all(finding.level != "problem" for finding in self.findings)

    def __repr__(self) -> str:
        lines = []
        for finding in self.findings:
            lines.append(f"{_MARKS[finding.level]} {finding.what}")
            if finding.cure:
                lines.append(f"    → {finding.cure}")
        return "\n".join(lines)


def doctor(
    nproc_per_node: int | Literal["auto"] = "auto", threads_per_worker: int | None = None, *, reap: bool = False
) -> Diagnosis:
    """Look at everything that could trouble a launch with these options.

    Args:
        nproc_per_node: as in `launch`.
        threads_per_worker: as in `launch`.
        reap: end workers of dead kernels, and remove what they left; without it they are only named.
    """
    workers = make_plan(Options(nproc_per_node=nproc_per_node, threads_per_worker=threads_per_worker), doctor)
    findings = (
        _versions(),
        _cores(workers.local_world_size, workers.threads),
        *_cuda(),
        _shared_memory(),
        _open_files(workers.local_world_size),
        _server(),
        *_leftovers(reap),
    )
    return Diagnosis(findings)


def _versions() -> Finding:
    found = [f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    text = ", ".join(found)
    if "ipykernel 7.0." in text:
        return Finding("problem", text, "ipykernel 7.0 loses output of threads: pip install 'ipykernel!=7.0.*'")
    if sys.platform != "linux":
        return Finding("note", f"{text}, {sys.platform}", "Linux is what ddpnb is tested on; tell us how it went here")
    return Finding("ok", text)


def _cores(workers: int, threads: int) -> Finding:
    cores = num_cores()
    what = f"{cores} cores, {num_gpus()} GPUs: {workers} workers × {threads} threads"
    if workers * threads > cores:
        fits = max(1, cores // workers)
        cure = "leave threads_per_worker out" if fits * workers <= cores else f"fewer workers: at most {cores} compute"
        return Finding(
            "note", f"{what} are more than the cores: they wait for each other", f"{cure}, or expect it slow"
        )
    return Finding("ok", what)


def _cuda() -> Iterator[Finding]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        yield Finding("ok", "CUDA is not initialised in this kernel: every start method can be used")
        return
    held = torch.cuda.memory_reserved() / 2**20
    names = _gpu_variables(torch)
    by = f", by the variables {', '.join(names)}" if names else ""
    others = [name for name in _GPU_LIBRARIES if name in sys.modules]
    also = f"; {', '.join(others)} may use it too" if others else ""
    yield Finding(
        "note",
        f"CUDA is initialised in this kernel{by}{also}; it holds {held:.0f} MiB of GPU memory that rank 0 shares",
        "start_method='fork' is refused; forkserver works. To free the memory: del the variables, "
        "torch.cuda.empty_cache(); to be rid of it, restart the kernel",
    )


def _gpu_variables(torch: Any) -> list[str]:
    """Variables of the notebook that live on a GPU."""

    def is_on_gpu(value: object) -> bool:
        if isinstance(value, torch.nn.Module):
            return any(parameter.is_cuda for parameter in value.parameters())
        return isinstance(value, torch.Tensor) and value.is_cuda

    return [name for name, value in vars(sys.modules["__main__"]).copy().items() if is_on_gpu(value)]


def _shared_memory() -> Finding:
    try:
        size = os.statvfs("/dev/shm")
    except OSError:
        return Finding("ok", "no /dev/shm on this system")
    total, free = size.f_blocks * size.f_frsize, size.f_bavail * size.f_frsize
    what = f"/dev/shm: {free / 2**20:,.0f} of {total / 2**20:,.0f} MiB free"
    if free < _SMALL_SHM:
        return Finding(
            "note",
            f"{what}; DataLoader workers hand their batches over through it",
            "if one dies of a bus error: docker run --shm-size=8g, or num_workers=0",
        )
    return Finding("ok", what)


def _open_files(workers: int) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = psutil.Process().num_fds() if hasattr(psutil.Process, "num_fds") else 0
    what = f"open files: {now} of {soft} used"
    if now + workers * _FILES_PER_RANK > soft:
        return Finding(
            "problem",
            f"{what}; {workers} workers need about {workers * _FILES_PER_RANK} more",
            f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({hard}, {hard}))",
        )
    return Finding("ok", what)


def _server() -> Finding:
    if not server.is_ours():
        return Finding(
            "note",
            "another library has started this process's fork server: workers import torch themselves, slower",
            "restart the kernel and let %load_ext ddpnb be its first cell",
        )
    pid = server.pid()
    if pid is None:
        return Finding("ok", "the worker server is not started yet; %load_ext ddpnb or ddpnb.prestart() does it early")
    return Finding("ok", f"the worker server is {'ready' if server.is_ready() else 'starting'} (pid {pid})")


def _leftovers(reap: bool) -> Iterator[Finding]:
    left = leftover_workers()
    if left:
        pids = ", ".join(str(process.pid) for process in left)
        if reap:
            for process in left:
                _end(process)
            yield Finding("note", f"{len(left)} workers of dead kernels were ended (pids {pids})")
        else:
            yield Finding(
                "problem", f"{len(left)} workers of dead kernels live (pids {pids})", "ddpnb.doctor(reap=True)"
            )
    else:
        yield Finding("ok", "no workers of dead kernels")
    swept = runtime.sweep()
    if swept:
        yield Finding("note", f"{len(swept)} folders of dead kernels were removed")


def leftover_workers() -> list[psutil.Process]:
    """This user's ddpnb workers whose kernel is gone."""
    found = []
    for process in psutil.process_iter():
        try:
            name = WORKER.fullmatch(process.name())
            if name and process.uids().real == os.getuid() and not _has_kernel(process, int(name[1])):
                found.append(process)
        except psutil.Error:
            continue  # it ended while we looked
    return found


def _has_kernel(worker: psutil.Process, kernel_pid: int) -> bool:
    try:
        # A pid may have been given to another process since: that one is younger than the worker.
        return psutil.Process(kernel_pid).create_time() <= worker.create_time()
    except psutil.NoSuchProcess:
        return False


def _end(process: psutil.Process) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it ended by itself
