"""What acts on a run: the buttons of its card, the settings that it offers, and what can be done when it hangs.

Each widget changes rarely. All methods but `__init__` are called by the painter's thread.

Runs in: kernel
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from math import log10
from typing import Any, NamedTuple

import ipywidgets as widgets

from ..draw.words import cut, whole
from ..messages import Saved, Setting
from ..state import RunState
from .clicks import enqueue
from .painter import Steerable, painter

_KILL_AFTER = 2.0
"""Seconds after a stop in which further clicks do nothing: a double click stops, it does not kill."""
_SAVE_PATIENCE = 30.0
"""Seconds after which a function that does not save may be asked again."""

_STYLE = {"description_width": "110px"}


class Face(NamedTuple):
    """What a button says."""

    words: str
    tooltip: str
    is_off: bool = False


class Hands:
    """The buttons and settings of one run; `say` is called with what went wrong, or None."""

    def __init__(self, run: Steerable, say: Callable[[str | None], None], show_stacks: Callable[[str], None]) -> None:
        self._run = run
        self._say = say
        self._show_stacks = show_stacks
        self._stopped_at: float | None = None
        self._saving: tuple[Saved | None, float] | None = None  # the checkpoint before, and when one was asked for
        state = run.state
        self._pause = _button(_pause_face(state), self._press_pause)
        self._save = _button(self._save_face(state), self._press_save)
        self._stop = _button(self._stop_face(state), self._press_stop)
        stacks = _button(Face("Stacks", "where each rank stands now"), self._press_stacks)
        wait = _button(Face("Keep waiting", "it is known to be slow"), self._press_wait)
        kill = _button(Face("Kill", "end all ranks now, without saving"), self._press_kill)
        self.settings = Settings(run, say)
        self.widgets = [
            widgets.HBox([self._pause, self._save, self._stop], _dom_classes=["ddpnb-buttons", "ddpnb-live-only"]),
            widgets.HBox([stacks, wait, kill], _dom_classes=["ddpnb-hands", "ddpnb-live-only"]),
            self.settings.widget,
        ]
        """Children of the card."""

    def follow(self, state: RunState) -> None:
        """Say what each button would do now."""
        _put(self._pause, _pause_face(state))
        _put(self._save, self._save_face(state))
        _put(self._stop, self._stop_face(state))
        self.settings.follow(state)

    def _save_face(self, state: RunState) -> Face:
        if self._saving and (state.saved is not self._saving[0] or time.monotonic() > self._saving[1] + _SAVE_PATIENCE):
            self._saving = None
        if state.folder is None:
            return Face("Save", "no folder to save in: launch(…, run_dir='runs/digits') gives one", is_off=True)
        if self._saving:
            return Face("Saving …", "at the next step of its Loop", is_off=True)
        return Face("Save", "a checkpoint, at the next step", is_off=state.status == "stopping")

    def _stop_face(self, state: RunState) -> Face:
        if state.asked == "kill":
            return Face("Killing …", "all ranks end now", is_off=True)
        if state.asked is None and self._stopped_at is None:
            return Face("Stop", "finish the step, save where there is a folder, and end")
        if self._may_kill():
            return Face("Kill", "end all ranks now, without saving")
        return Face("Stopping …", "the ranks finish their step", is_off=True)

    def _may_kill(self) -> bool:
        if self._stopped_at is None:  # it was stopped from elsewhere
            self._stopped_at = time.monotonic()
        return time.monotonic() >= self._stopped_at + _KILL_AFTER

    def _press_pause(self) -> None:
        state = self._run.state
        if state.pausing or state.paused_since is not None:
            _put(self._pause, Face("Going on …", "with the next step", is_off=True))
            self._ask(self._run.unpause)
        else:
            _put(self._pause, Face("Pausing …", "at the next step", is_off=True))
            self._ask(self._run.pause)

    def _press_save(self) -> None:
        if self._saving is None:
            self._saving = (self._run.state.saved, time.monotonic())
            if not self._ask(self._run.save):
                self._saving = None
            self.follow(self._run.state)

    def _press_stop(self) -> None:
        if self._stopped_at is None and self._run.state.asked is None:
            self._stopped_at = time.monotonic()
            self._ask(self._run.stop)
            self.follow(self._run.state)
        elif self._may_kill():
            self._press_kill()

    def _press_kill(self) -> None:
        self._ask(self._run.kill)

    def _press_stacks(self) -> None:
        """Ask in a thread of its own: ranks have a second to answer, and other views are not to wait for that."""

        def ask() -> None:
            try:
                text = str(self._run.stacks())
            except Exception as error:
                text = str(error)
            painter.call(lambda: self._show_stacks(text))

        threading.Thread(target=ask, name="ddpnb-stacks", daemon=True).start()

    def _press_wait(self) -> None:
        self._ask(self._run.keep_waiting)

    def _ask(self, what: Callable[[], None]) -> bool:
        """Ask the run; whether it could be asked. What it answers is shown."""
        try:
            what()
        except Exception as error:
            self._say(str(error))
            self.follow(self._run.state)
            return False
        self._say(None)
        return True


def _pause_face(state: RunState) -> Face:
    is_off = state.status == "stopping"
    if state.paused_since is not None:
        return Face("Unpause", "go on with the next step", is_off)
    if state.pausing:
        return Face("Pausing …", "all ranks pause at the same step; a click takes it back", is_off)
    return Face("Pause", "stand still between two steps", is_off)


class Settings:
    """A widget for each value that can be changed while the run goes on."""

    def __init__(self, run: Steerable, say: Callable[[str | None], None]) -> None:
        self._run = run
        self._say = say
        self._boxes: dict[str, Any] = {}  # {name: its widget}
        self._known: dict[str, Setting] = {}  # {name: value that the run was last seen to have}
        self._shown: dict[str, Setting] = {}  # {name: value that its widget had then, or when it was asked for}
        self._patience = widgets.FloatText(
            value=run.hang_after or 0.0,
            description="hang after (s)",
            tooltip="seconds without a step after which a rank is taken for hung; 0: nobody watches",
            style=_STYLE,
        )
        self._patience.observe(enqueue(self._change_patience), names="value")
        self.widget = widgets.VBox([self._patience], _dom_classes=["ddpnb-tools", "for-settings", "ddpnb-live-only"])

    def follow(self, state: RunState) -> None:
        """Have a widget for each offered value, which shows it as it is now."""
        offered = {name: offer.value for name, offer in state.offered.items()}
        new = [name for name in offered if name not in self._boxes]
        for name in new:
            box = self._boxes[name] = _box(name, offered[name])
            box.observe(enqueue(self._change), names="value")
        if new:
            self.widget.children = (*self._boxes.values(), self._patience)
        for name, value in offered.items():
            # Until what was asked for has come about, the widget shows that.
            if self._known.get(name) != value:
                self._known[name] = self._boxes[name].value = value
                self._shown[name] = self._boxes[name].value  # within its range

    def _change(self) -> None:
        for name, box in self._boxes.items():
            if box.value != self._shown.get(name):
                self._shown[name] = box.value
                self._set(name, float(f"{box.value:.3g}") if isinstance(box, widgets.FloatLogSlider) else box.value)

    def _change_patience(self) -> None:
        try:
            self._run.hang_after = self._patience.value or None
        except ValueError as error:
            self._say(str(error))
        else:
            self._say(None)

    def _set(self, name: str, value: Setting) -> None:
        try:
            self._run.set(**{name: value})
        except Exception as error:
            self._say(str(error))
        else:
            self._say(None)


def _box(name: str, value: Setting) -> Any:
    """A widget that fits a value: a slider of magnitudes for a rate, else a field."""
    look = {"description": whole(cut(name, 30)), "style": _STYLE}
    if isinstance(value, bool):
        return widgets.Checkbox(value=value, indent=False, **look)
    if isinstance(value, int):
        return widgets.IntText(value=value, **look)
    if isinstance(value, str):
        return widgets.Text(value=value, continuous_update=False, **look)
    if value > 0 and re.search(r"(?:^|_)(lr|rate|decay)(?:$|_)", name.lower()):
        middle = round(log10(value))
        ends = {"min": middle - 3, "max": middle + 2}
        return widgets.FloatLogSlider(
            value=value, step=0.05, readout_format=".3g", continuous_update=False, **ends, **look
        )
    return widgets.FloatText(value=value, **look)


def _button(face: Face, press: Callable[[], None]) -> widgets.Button:
    button = widgets.Button(description=face.words, tooltip=face.tooltip, disabled=face.is_off)
    button.on_click(enqueue(press))
    return button


def _put(button: widgets.Button, face: Face) -> None:
    """Change what a button says in one message; in none where it says so already."""
    with button.hold_sync():
        button.description, button.tooltip, button.disabled = face.words, face.tooltip, face.is_off
