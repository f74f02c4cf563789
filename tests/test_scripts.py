"""ddpnb without a notebook: plain scripts, with and without a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import ddpnb

def train(steps):
    for step in ddpnb.progress(range(steps), "step"):
        ddpnb.log(loss=1 / (step + 1))
    print("the last line of", ddpnb.rank())
    return steps

run = ddpnb.launch(train, 20, nproc_per_node=2)
"""
WAITING = SCRIPT + 'print("value", run.result())\n'


def test_a_script_without_a_main_guard_sees_output_end_and_value(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WAITING)

    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)

    assert "value 20\n" == done.stdout
    *said, end = done.stderr.splitlines()
    assert ["[rank 0] the last line of 0", "[rank 1] the last line of 1"] == sorted(said)
    assert end.startswith("train: finished · step 20/20 · ")


def test_a_terminal_ends_with_the_last_state_on_a_line_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WAITING)
    terminal, inner = pty.openpty()

    process = subprocess.Popen([sys.executable, script], stdin=inner, stdout=inner, stderr=inner)
    os.close(inner)
    shown = b""
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # how Linux says that the last writer has closed a terminal
            break
        if not data:
            break
        shown += data
    os.close(terminal)
    process.wait()

    lines = shown.decode().replace("\r\n", "\n").splitlines()
    assert "value 20" == lines[-1]
    assert "train: finished · step 20/20" in lines[-2]
    assert any("[rank 1] the last line of 1" in line for line in lines)


def test_a_script_that_ends_without_waiting_is_told(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("return steps", "import time; time.sleep(60)"))

    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)

    assert "ddpnb: the program ended while train was running; run.result() waits for it" in done.stderr
    assert 0 == done.returncode
