"""Who is looking: a notebook page, a kernel without one, a terminal, nobody.

Runs in: kernel
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from ..world import ipython_kernel


def in_notebook_kernel() -> bool:
    """This process is an IPython kernel, with or without a page in front of it."""
    return ipython_kernel() is not None


def is_frontend_there() -> bool:
    """A page that can show a widget may be in front of this kernel.

    JupyterLab's server names the session in JPY_SESSION_NAME, and its page sends a cell's id with every request; the
    other three are known by their marks. A kernel that nbclient or nbval drives has none of these.
    """
    if not in_notebook_kernel():
        return False
    named = any(mark in os.environ for mark in ("JPY_SESSION_NAME", "VSCODE_PID", "KAGGLE_KERNEL_RUN_TYPE"))
    return named or "google.colab" in sys.modules or "cellId" in _request_metadata()


def _request_metadata() -> Mapping[str, object]:
    """What came with the request of the cell that runs now."""
    parent = ipython_kernel().get_parent() or {}
    metadata: Mapping[str, object] = parent.get("metadata") or {}
    return metadata
