"""A real JupyterLab in headless Chromium, for tests that must see what a user sees."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import Page, sync_playwright

from tests.conftest import wait_until

CHROMIUM = shutil.which("chromium")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_SESSION_IS_READY = """async () => {
    const widget = window.jupyterapp?.shell.currentWidget;
    if (!widget?.sessionContext) return false;
    await widget.sessionContext.ready;
    return widget.sessionContext.session?.kernel?.status === 'idle';
}"""


class Lab:
    """A running JupyterLab and a browser."""

    def __init__(self, folder: Path, url: str, token: str, context: Any) -> None:
        self.folder = folder
        self._url = url
        self._token = token
        self._context = context

    def open(self, name: str) -> Page:
        """Open a notebook of the folder and wait for its kernel."""
        page: Page = self._context.new_page()
        page.goto(f"{self._url}/lab/tree/{name}?reset&token={self._token}")
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
        page.wait_for_function(_SESSION_IS_READY, timeout=60_000)
        return page

    def write(self, name: str, *sources: str) -> Path:
        """Write a notebook of these code cells."""
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(source) for source in sources],
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        )
        path = self.folder / name
        nbformat.write(notebook, path)
        return path


def command(page: Page, name: str, arguments: dict[str, Any] | None = None) -> None:
    """Execute a command of JupyterLab's; its promise is not awaited, some never resolve."""
    page.evaluate(f"() => {{ window.jupyterapp.commands.execute({name!r}, {json.dumps(arguments or {})}) }}")


def save(page: Page, path: Path) -> Any:
    """Save the notebook and read what was written."""
    before = path.stat().st_mtime_ns
    command(page, "docmanager:save")
    wait_until(lambda: path.stat().st_mtime_ns != before, what="saving")
    page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty")
    return nbformat.read(path, as_version=4)


@contextmanager
def running_lab(work: Path) -> Iterator[Lab]:
    """Start JupyterLab and Chromium; nothing of the user's configuration is read, nothing is left."""
    folder = work / "notebooks"
    settings = work / "settings" / "@jupyterlab" / "apputils-extension"
    folder.mkdir()
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    url = f"http://127.0.0.1:{port}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"} | {
        "JUPYTER_CONFIG_DIR": str(work / "config"),
        "JUPYTER_RUNTIME_DIR": str(work / "runtime"),
        "JUPYTER_DATA_DIR": str(work / "data"),
        "JUPYTERLAB_SETTINGS_DIR": str(work / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(work / "workspaces"),
    }
    arguments = [
        "--no-browser",
        "--ip=127.0.0.1",
        f"--port={port}",
        f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={folder}",
        "--ServerApp.port_retries=0",
        "--allow-root",  # CI runs as root
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--expose-app-in-browser",
    ]
    with open(work / "lab.log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *arguments], env=environment, cwd=folder, stdout=log, stderr=log
        )
    try:
        wait_until(lambda: _answers(f"{url}/api/status?token={token}"), 60, "JupyterLab's first answer")
        with sync_playwright() as playwright:
            context = playwright.chromium.launch_persistent_context(
                user_data_dir=str(work / "chromium"),
                executable_path=CHROMIUM,
                headless=True,
                viewport={"width": 1100, "height": 1000},
                args=list(_FLAGS),
            )
            try:
                yield Lab(folder, url, token, context)
            finally:
                context.close()
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
