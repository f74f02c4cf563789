"""A real ipykernel to run cells in, and a watch over what a test leaves behind."""

from __future__ import annotations

import ast
import os
import queue
import re
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed
from jupyter_client.manager import KernelManager

from ddpnb.train.membership import join

DEADLINE = 60.0
"""Seconds against hangs; no timing is judged by it."""

PRELUDE = """
%load_ext ddpnb
import ddpnb, os, sys, threading, time, torch
import torch.distributed as dist

two = ddpnb.Launcher(nproc_per_node=2, view=False)

def until(run, claim):
    # Wait for a message after which claim(run) holds.
    changed = threading.Event()
    run.watchers.append(lambda _: changed.set())
    deadline = time.monotonic() + 30
    while not claim(run):
        assert changed.wait(30) and not run.done() and time.monotonic() < deadline, run.output()
        changed.clear()

def here(run):
    # Whether every rank has printed "here".
    return all("here" in text for text in run.output().values())
"""
"""What every kernel knows: names that the cells of the tests use."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Reply:
    """What a cell gave."""

    stdout: str = ""
    stderr: str = ""
    error: str | None = None
    """Name of the exception's type; None where the cell ended well."""
    message: str = ""
    """The exception's text."""
    traceback: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)  # mime bundles, in order
    updates: list[dict[str, Any]] = field(default_factory=list)  # of update_display_data
    comms: int = 0
    """Widget messages that arrived while the cell ran."""
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """What it printed, without the last line's end."""
        assert self.error is None, self.traceback
        return self.stdout.rstrip("\n")


class Kernel:
    """A real ipykernel, as a notebook has one."""

    def __init__(self, **environment: str) -> None:
        env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"} | environment
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=env)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=DEADLINE)
        self.pid = int(self.run("import os; print(os.getpid())").text)

    def start(self, code: str) -> str:
        """Send a cell and do not wait; returns its message id."""
        message_id: str = self.client.execute(textwrap.dedent(code), stop_on_error=False)
        return message_id

    def wait(self, message_id: str, timeout: float = DEADLINE, on_stdout: Callable[[str], None] | None = None) -> Reply:
        """Wait for a cell's end. `on_stdout` is called with all that it has printed so far, whenever it prints."""
        reply, began = Reply(), time.monotonic()
        deadline = began + timeout
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"the cell did not end within {timeout} s; so far: {reply}") from None
            kind, content = message["msg_type"], message["content"]
            if kind.startswith("comm_"):
                reply.comms += 1
            if message["parent_header"].get("msg_id") != message_id:
                continue
            match kind:
                case "stream" if content["name"] == "stdout":
                    reply.stdout += content["text"]
                    if on_stdout is not None:
                        on_stdout(reply.stdout)
                case "stream":
                    reply.stderr += content["text"]
                case "display_data" | "execute_result":
                    reply.displays.append(content["data"])
                case "update_display_data":
                    reply.updates.append(content["data"])
                case "error":
                    reply.error, reply.message = content["ename"], content["evalue"]
                    reply.traceback = _ANSI.sub("", "\n".join(content["traceback"]))
                case "status" if content["execution_state"] == "idle":
                    reply.seconds = time.monotonic() - began
                    return reply

    def run(self, code: str, timeout: float = DEADLINE) -> Reply:
        """Run a cell to its end."""
        return self.wait(self.start(code), timeout)

    def value(self, code: str) -> Any:
        """Run a cell that prints the repr of a plain value; returns the value."""
        return ast.literal_eval(self.run(code).text)

    def interrupt(self) -> None:
        """Press the square button."""
        self.manager.interrupt_kernel()

    def descendants(self) -> list[psutil.Process]:
        """All processes that the kernel started, and theirs."""
        return psutil.Process(self.pid).children(recursive=True)

    def workers(self) -> list[psutil.Process]:
        """This kernel's ddpnb workers, and all that they started."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.name().startswith(f"ddpnb{self.pid}."):
                    found += [process, *process.children(recursive=True)]
            except psutil.Error:
                continue
        return found

    def close(self) -> None:
        """Shut down and wait until it and all its children are gone."""
        family = self.descendants() if psutil.pid_exists(self.pid) else []
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive, f"left behind: {alive}"


def have_ended(processes: list[psutil.Process]) -> bool:
    """Whether none of them lives; a zombie that nobody reaps does not."""

    def lives(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return not any(map(lives, processes))


def wait_until(claim: Callable[[], bool], timeout: float = 10.0, what: str = "it") -> float:
    """Seconds until `claim()` holds; for what sends no message, such as the end of a process that is not our child."""
    began = time.monotonic()
    while not claim():
        assert time.monotonic() - began < timeout, f"{what} did not happen within {timeout} s"
        time.sleep(0.005)
    return time.monotonic() - began


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module")
def group_of_one() -> Iterator[None]:
    """What the first `wrap` of a process by itself makes, and keeps to its end, does not outlive the module."""
    join()
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def fresh_kernel() -> Iterator[Kernel]:
    """A kernel for one test, which may ruin it; torch and ddpnb are imported, the worker server is being started."""
    kernel = Kernel()
    assert kernel.run(PRELUDE).error is None
    yield kernel
    kernel.close()


@pytest.fixture(scope="module")
def shared_kernel() -> Iterator[Kernel]:
    """A kernel for the tests of a module."""
    kernel = Kernel()
    assert kernel.run(PRELUDE).error is None
    yield kernel
    kernel.close()


@pytest.fixture
def kernel(shared_kernel: Kernel) -> Iterator[Kernel]:
    """The module's kernel; after each test no worker may be left."""
    yield shared_kernel
    wait_until(lambda: not shared_kernel.workers(), what="the end of all workers")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]).returncode:
        pytest.skip("may not mount a disk")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
