"""The panel's tests under several versions of ipykernel: `python -m tests.ipykernels 6.31 7.3`.

Which thread hears a click, and when, is another in each of them. For each version a virtual environment with nothing
but that ipykernel in it is laid over the one that runs this, in a temporary folder.

Runs in: a shell, from the root of the repository; needs a package index
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from sysconfig import get_path

TESTS = ("tests/test_panel.py", "tests/test_panel_in_lab.py")


def overlay(folder: Path, version: str) -> Path:
    """Make an environment with this ipykernel over the present one; its Python."""
    venv.create(folder)
    python = folder / "bin" / "python"
    [site] = (folder / "lib").glob("python*/site-packages")
    (site / "under.pth").write_text(get_path("purelib"))  # after the overlay's own packages
    install = ["-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--ignore-installed"]
    subprocess.run([sys.executable, *install, f"ipykernel=={version}.*"], check=True)
    return python


def run(version: str) -> int:
    """Run the tests with one version; pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        python = overlay(Path(folder) / "venv", version)
        share = Path(sys.prefix) / "share" / "jupyter"
        places = {"JUPYTER_PATH": str(share), "JUPYTERLAB_DIR": str(share / "lab"), "PYTHONPATH": os.getcwd()}
        found = "import ipykernel; print('ipykernel', ipykernel.__version__, flush=True)"
        subprocess.run([python, "-c", found], check=True)
        return subprocess.run([python, "-m", "pytest", "-q", *TESTS], env=os.environ | places).returncode


if __name__ == "__main__":
    codes = {version: run(version) for version in sys.argv[1:]}
    print(codes)
    sys.exit(any(codes.values()))
