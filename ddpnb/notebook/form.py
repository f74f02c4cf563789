"""A panel's own widgets: the controls, the line of code that does the same, what it means, and the buttons.

All methods but `__init__` are called by the painter's thread.

Runs in: kernel
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import ipywidgets as widgets

from ..draw.words import cut, whole
from .choices import Kept
from .controls import Control

_FOLDED = ("strategy", "backend", "start_method", "run_dir")
"""Arguments and options that are chosen more rarely."""

_STYLE = """<style>
.ddpnb-panel{box-sizing:border-box;max-width:780px;margin:4px 0;padding:8px 14px 12px;overflow:visible;
border:1px solid var(--jp-border-color2,rgba(128,128,128,.3));border-radius:6px;
background:var(--jp-layout-color1,transparent)}
.ddpnb-panel .widget-html-content{line-height:1.5;font-size:13px}
.ddpnb-panel .bad{color:var(--jp-error-color1,#d32f2f)}
.ddpnb-panel .soft{color:var(--jp-ui-font-color2,inherit);overflow-wrap:anywhere}
.ddpnb-panel .line{display:block;margin:2px 0;padding:6px 10px;border-radius:4px;background:rgba(128,128,128,.13);
color:var(--jp-ui-font-color0,inherit);font:12px/1.5 var(--jp-code-font-family,monospace);
white-space:pre-wrap;overflow-wrap:anywhere;user-select:all;cursor:text}
.ddpnb-panel pre.bad{margin:4px 0;padding:7px 10px;border:1px solid;border-radius:4px;max-height:240px;overflow:auto;
font:12px/1.45 var(--jp-code-font-family,monospace);white-space:pre-wrap}
.ddpnb-panel button.jupyter-button{border-radius:4px}
.ddpnb-panel .lm-AccordionPanel,.ddpnb-panel .jupyter-widget-Collapse,
.ddpnb-panel .jupyter-widget-Collapse-header,.ddpnb-panel .jupyter-widget-Collapse-contents{
border:0;background:none;padding:0}
.ddpnb-panel .jupyter-widget-Collapse-header{color:var(--jp-ui-font-color2,inherit);font-weight:400}
.jp-OutputArea-child:has(.ddpnb-panel)+.jp-OutputArea-child{display:none}
</style>"""
"""The last rule takes away the figure below while there is a living panel, which has it in its card."""


_LENGTH = 20_000
"""Characters shown of what a launch came to nothing for."""

_LINE = '<code class="line" role="textbox" aria-readonly="true" aria-label="the same in code" tabindex="0">{}</code>'


class Form:
    """The upper box of a panel.

    Args:
        arguments: {name: control} of the function.
        options: {name: control} of the launch.
        start, resume, reset: Called in any thread when their buttons are pressed; must be quick.
    """

    def __init__(
        self,
        arguments: Mapping[str, Control],
        options: Mapping[str, Control],
        *,
        start: Callable[[], None],
        resume: Callable[[], None],
        reset: Callable[[], None],
    ) -> None:
        self._controls = [*options.values(), *arguments.values()]
        folded = [control for control in self._controls if control.name in _FOLDED]
        shown = [control for control in self._controls if control.name not in _FOLDED]
        more = widgets.Accordion([_grid(folded)], titles=("More options",), selected_index=None)
        self._line = widgets.HTML()
        self._meaning = widgets.HTML(layout={"flex": "1 1 240px"})
        self._trouble = widgets.HTML()
        self.start = _button("Start", "launch what the line of code says", start, button_style="primary")
        self.resume = _button("Resume", "go on from the newest checkpoint in the run folder", resume)
        self.reset = _button("Reset", "all controls back to where they began", reset)
        buttons = widgets.HBox(
            [self._meaning, self.reset, self.resume, self.start],
            layout={"flex_flow": "row wrap", "align_items": "center"},
        )
        self.widget = widgets.VBox(
            [widgets.HTML(_STYLE), _grid(shown), *_kept(arguments), more, self._line, buttons, self._trouble],
            _dom_classes=["ddpnb-panel"],
        )

    def show(
        self, *, code: str | None, meaning: str, hint: str, trouble: str, is_busy: bool, resumable: int | None
    ) -> None:
        """Write what is known; what has not changed is not sent.

        Args:
            code: The line that does what Start does; None: nothing can be started.
            meaning: What it amounts to, or why it cannot.
            hint: What a change of a control does now.
            trouble: Why the last launch came to nothing.
            is_busy: Whether a run is going on.
            resumable: The step that a resumed run would go on from; None: there is nothing.
        """
        for control in self._controls:
            control.show_error()
        self._line.value = _LINE.format(escape(code or "…"))
        said = [f'<span class="{"soft" if code else "bad"}">{escape(whole(meaning))}</span>']
        said += [f'<span class="soft">{escape(hint)}</span>'] if hint else []
        self._meaning.value = f'<div role="status">{"<br>".join(said)}</div>'
        self._trouble.value = (
            f'<pre class="bad" role="alert">{escape(whole(cut(trouble, _LENGTH)))}</pre>' if trouble else ""
        )
        self.start.disabled = is_busy or code is None
        self.resume.disabled = is_busy or code is None or resumable is None
        self.resume.description = "Resume" if resumable is None else f"Resume step {resumable:,}"


def _button(words: str, meaning: str, press: Callable[[], None], **looks: Any) -> Any:
    layout = {"width": "max-content", "min_width": "84px"}
    button = widgets.Button(description=words, tooltip=meaning, layout=layout, **looks)
    button.on_click(lambda _: press())
    return button


def _grid(controls: list[Control]) -> Any:
    boxes = [control.box() for control in controls if control.widget is not None]
    layout = {"grid_template_columns": "repeat(auto-fit, minmax(min(290px, 100%), 1fr))", "grid_gap": "0 24px"}
    return widgets.GridBox(boxes, layout=layout)


def _kept(arguments: Mapping[str, Control]) -> list[Any]:
    """What there is nothing to choose for, in words."""
    kept = {name: each.choice.value for name, each in arguments.items() if isinstance(each.choice, Kept)}
    named = ", ".join(f"{name} ({type(value).__name__})" for name, value in kept.items())
    return [widgets.HTML(f'<span class="soft">without a control: {escape(named)}</span>')] if named else []
