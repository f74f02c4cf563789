"""What doctor() finds, and that it ends what dead kernels left."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import ddpnb
from ddpnb import diagnosis as diagnosis_module
from ddpnb.diagnosis import Finding, leftover_workers


class TensorOnGpu(torch.Tensor):
    """Says that it is on a GPU, on a machine without one."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def levels(word: str, found: tuple[Finding, ...]) -> list[str]:
    return [finding.level for finding in found if word in finding.what]


def test_a_plain_kernel_is_well_and_says_what_it_has() -> None:
    diagnosis = ddpnb.doctor()

    assert diagnosis.is_well
    assert f"torch {torch.__version__}" in repr(diagnosis)
    assert "CUDA is not initialised" in repr(diagnosis)


def test_more_threads_than_cores_are_noted_with_a_cure() -> None:
    diagnosis = ddpnb.doctor(nproc_per_node=64, threads_per_worker=8)

    assert levels("64 workers × 8 threads", diagnosis.findings) == ["note"]


def test_too_few_open_files_are_a_problem() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        diagnosis = ddpnb.doctor(nproc_per_node=64)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert levels("open files", diagnosis.findings) == ["problem"]
    assert not diagnosis.is_well


def test_a_gpu_in_use_is_noted_with_the_variables_that_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 512 * 2**20)
    monkeypatch.setattr(sys.modules["__main__"], "weights", TensorOnGpu(torch.zeros(1)), raising=False)

    (finding,) = diagnosis_module._cuda()

    assert finding.level == "note"
    assert "by the variables weights" in finding.what
    assert "512 MiB" in finding.what


@contextmanager
def a_worker_of_a_dead_kernel() -> Iterator[int]:
    """A process that looks as a worker does whose kernel is gone; its pid, which is its group's too."""
    gone = os.fork()
    if not gone:
        os._exit(0)
    os.waitpid(gone, 0)
    ready, says_ready = os.pipe()
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(15, f"ddpnb{gone}.0".encode(), 0, 0, 0)
        os.write(says_ready, b"x")
        while True:
            signal.pause()
    os.read(ready, 1)
    os.close(ready)
    os.close(says_ready)
    try:
        yield pid
    finally:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass  # the test saw its end


@pytest.mark.skipif(sys.platform != "linux", reason="names processes")
def test_workers_of_dead_kernels_are_named_and_ended_on_request() -> None:
    with a_worker_of_a_dead_kernel() as pid:
        named = ddpnb.doctor()
        alive_after_naming = [process.pid for process in leftover_workers()]
        ddpnb.doctor(reap=True)
        _, status = os.waitpid(pid, 0)

    assert levels(f"(pids {pid})", named.findings) == ["problem"]
    assert [pid] == alive_after_naming
    assert -signal.SIGKILL == os.waitstatus_to_exitcode(status)
