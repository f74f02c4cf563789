"""Keeps buttons alive in a cell that waits, where ipykernel can do so.

Whether a click is heard while a cell runs is ipykernel's business. 7.0 to 7.3 hand it to a thread beside the cell, as
JupyterLab asks. 7.4 would, but sends it to the thread that wrote to the widget last, which is the one that waits; while
a cell waits for a run, that is set right here. 6.31 and front ends that ask for no such thread hear it after the cell.

Runs in: kernel
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any


@contextmanager
def answering(*widgets: Any) -> Iterator[None]:
    """Have the clicks on some widgets, and on what is in them or comes into them, handled where the page sends them.

    Source: ipykernel 7.4, comm/comm.py, `BaseComm._reply_subshell_for`, and kernelbase.py, `shell_channel_thread_main`.
    """
    boxes, comms = [], []

    def adopt(change: Any) -> None:
        for each in tree(change.owner):
            if hasattr(each, "children") and each not in boxes:
                each.observe(adopt, "children")
                boxes.append(each)
            if hasattr(each.comm, "_reply_subshell_for") and "_reply_subshell_for" not in vars(each.comm):
                each.comm._reply_subshell_for = _as_asked
                comms.append(each.comm)

    for widget in widgets:
        adopt(SimpleNamespace(owner=widget))
    try:
        yield
    finally:
        for box in boxes:
            box.unobserve(adopt, "children")
        for comm in comms:
            vars(comm).pop("_reply_subshell_for", None)


def _as_asked(data: object, asked: str | None) -> str | None:
    return asked


def tree(widget: Any) -> Iterator[Any]:
    """A widget and all that are in it."""
    yield widget
    for child in getattr(widget, "children", ()):
        yield from tree(child)


def close(widget: Any) -> None:
    """Take a widget and all that are in it from the page and from the kernel; ipywidgets itself keeps their layouts
    and styles, two for each, for ever.
    """
    for each in list(tree(widget)):
        parts: list[Any] = [each, getattr(each, "layout", None), getattr(each, "style", None)]
        for part in parts:
            if hasattr(part, "close"):
                part.close()
