"""`Panel`: a function's arguments and a launch's options as controls, buttons, and the card of the run they start.

Handlers of widgets come in any thread and only say what is wanted: a launch has a thread of its own, and whatever is
shown is written by the painter's one thread.

Runs in: kernel
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, get_args
from uuid import uuid4

import ipywidgets as widgets

from .. import candidates, checkpoints, folder
from ..draw import words
from ..draw.lens import PLAIN
from ..plan import BACKENDS, Options, Plan, StartMethod, check_call, make_plan, num_cores, num_gpus
from ..run import Launcher, Run
from . import choices, code
from .comms import answering, close
from .controls import Control
from .final import Final
from .form import Form
from .frontend import in_notebook_kernel, is_frontend_there
from .live import Card
from .painter import Watched, painter

_LEAST_SLIDER = 4
"""Workers that are offered on a machine of CPUs with fewer cores: ranks can be learnt about on two."""

_STRATEGIES = ("ddp", "fsdp", "dp", "none")
_OURS = {
    "view": "a panel shows its run itself",
    "resume": "the Resume button, or panel.resume(), goes on from the newest checkpoint in run_dir",
}  # {option that a panel does not take: why}

_WORDS = {
    "nproc_per_node": ("world size", "number of workers, one process per rank"),
    "backend": (
        "backend",
        "auto: nccl where every worker has a GPU, else gloo; none: the function makes its own group",
    ),
    "start_method": ("start method", "how processes are made; auto: forkserver on Linux, spawn elsewhere"),
    "run_dir": ("run folder", "where each run keeps checkpoints, curves and output; empty: nothing is written"),
}  # {option: what the page calls it, what it means}

_FOR_A_SAVED_PAGE = """<style>
.jp-OutputArea-child:has(+*+* .ddpnb-saved)>.jupyter-widgets:not(:has(*)),
.jp-OutputArea-child:has(.ddpnb-saved){display:none}
</style><i class="ddpnb-saved"></i>"""
"""A page that is opened again without the kernel would say "Error displaying widget: model not found" where the panel
was, above the figure that tells of the run: this takes these words away, and itself."""


class Panel(widgets.VBox):
    """Controls for a function's arguments, buttons to start and resume it, and the live view of its run.

        panel = ddpnb.Panel(train, lr=(1e-3, 1.0), epochs=(1, 20), nproc_per_node=2)
        panel                                   # as a cell's value: choose, press Start
        panel.controls["lr"].value = 0.05       # the same from code
        panel.start().result()

    Args:
        function: What every rank calls. Its signature makes the controls: its annotations and defaults, and what is
            offered beside. A default that no control fits is kept as it is.
        controls: {argument: what is offered for it}, for arguments that are named like an option of `launch`.
        options: {option of `launch`: its value}, for options that are named like an argument.
        offered: What is offered for an argument, as for `ipywidgets.interact`: (min, max) or (min, max, step) for a
            slider, logarithmic over two decades of fractions and more; a list or dict for a choice; a value for a field
            or a box to tick; `ipywidgets.fixed(value)`; a widget. Or an option of `launch`, such as run_dir, env,
            nproc_per_node: where the controls begin, or what all runs have.

    Raises:
        TypeError: something is offered for what is neither an argument nor an option.
        ValueError: nothing tells which values an argument may have, or what is offered cannot be.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        /,
        *,
        controls: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        **offered: Any,
    ) -> None:
        ours, own = _sort_out(function, offered)
        self._function = function
        self._asked = Launcher(**_checked_options({**ours, **(options or {})}))
        self._call = choices.choices_of(function, _with_strategies(function, {**own, **(controls or {})}))
        self.controls = {name: Control(name, choice) for name, choice in self._call.choices.items()}
        """{argument: its control}, whose `value` can be read and set."""
        self.options = {name: _option(name, choice) for name, choice in _options(self._asked)}
        """{option of launch: its control}: nproc_per_node, backend, start_method, run_dir."""

        self._lock = threading.Lock()  # of the two below
        self._run: Run | None = None
        self._is_launching = False
        self._trouble = ""  # why the last launch came to nothing
        self._seen: tuple[object, ...] = ()  # what of the run is shown
        self._folder_seen: tuple[object, ...] | None = None
        self._resumable: int | None = None  # the step that a resumed run would go on from
        self._card: Card | None = None
        self._display_id = uuid4().hex
        self._has_page = is_frontend_there()

        self._form = Form(
            self.controls,
            self.options,
            start=partial(self._press, resume=False),
            resume=partial(self._press, resume=True),
            reset=partial(painter.call, self.reset),
        )
        super().__init__([self._form.widget])  # type: ignore[no-untyped-call]
        args, kwargs = self._arguments()
        check_call(function, tuple(args.values()), kwargs)
        for control in self._all_controls():
            control.observe(self._changed)
        self._refresh()

    # ---- what is chosen

    @property
    def run(self) -> Run | None:
        """The present run, or the last one; None before the first."""
        return self._run

    @property
    def values(self) -> dict[str, Any]:
        """What the function will be called with, {argument: value}; defaults that no control fits are not passed.

        Raises:
            ValueError: what was typed somewhere is no value.
        """
        return {
            name: _value_of(control)
            for name, control in self.controls.items()
            if not (isinstance(control.choice, choices.Kept) and control.choice.is_default)
        }

    @property
    def code(self) -> str:
        """The line of code that does what Start does.

        Raises:
            ValueError: what was typed somewhere is no value.
        """
        args, kwargs = self._arguments()
        defaults = {option.name: option.default for option in fields(Options)}
        asked = {name: getattr(self._launcher(), name) for name in defaults if name not in _OURS}
        differing = {name: value for name, value in asked.items() if value != defaults[name]}
        return code.line(self._function, args, kwargs, differing)

    # ---- what is done

    def start(self) -> Run:
        """Launch the function with what is chosen, and show the run; returns at once.

        Raises:
            RuntimeError: this panel's run still goes on.
            Exception: whatever `launch` raises.
        """
        return self._launch_once(resume=False)

    def resume(self) -> Run:
        """As `start`, going on from the newest checkpoint in run_dir."""
        return self._launch_once(resume=True)

    def reset(self) -> None:
        """Put all controls back to where they began."""
        for control in self._all_controls():
            control.reset()

    def close(self) -> None:
        """Take the panel from the page; a run goes on."""
        self._has_page = False
        for child in self.children:
            close(child)
        super().close()  # type: ignore[no-untyped-call]

    # ---- shown

    def __repr__(self) -> str:
        return f"<ddpnb panel {_name(self._function)!r}>"

    def _ipython_display_(self) -> None:
        """The widgets, which only a living kernel has; the last run's figure, which stays; and what a saved page needs.

        With and without a page the outputs are the same but for the widgets, so that nbval may compare them.
        """
        if not in_notebook_kernel():
            print(repr(self))
            return
        from IPython.display import display

        self._has_page = self._has_page or is_frontend_there()
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        bundle = {"application/vnd.jupyter.widget-view+json": view} if self._has_page and self.comm is not None else {}
        display({**bundle, "text/plain": repr(self)}, raw=True)  # type: ignore[no-untyped-call]
        display({"text/plain": self._figure_text()}, raw=True, display_id=self._display_id)  # type: ignore[no-untyped-call]
        display({"text/html": _FOR_A_SAVED_PAGE, "text/plain": ""}, raw=True)  # type: ignore[no-untyped-call]

    def _figure_text(self) -> str:
        return f"<ddpnb panel {_name(self._function)!r}: its last run>"

    # ---- inside: launching

    def _press(self, *, resume: bool) -> None:
        """A button was pressed, once or ten times: in any thread, and nothing is waited for."""
        if self._begin():
            painter.call(self._refresh)
            threading.Thread(target=self._launch_pressed, args=(resume,), name="ddpnb-panel", daemon=True).start()

    def _launch_pressed(self, resume: bool) -> None:
        try:
            self._launch(resume)
        except Exception:
            pass  # it is shown in the panel

    def _launch_once(self, *, resume: bool) -> Run:
        if not self._begin():
            raise RuntimeError("this panel's run goes on: panel.run.stop() first, or make another panel")
        return self._launch(resume)

    def _begin(self) -> bool:
        """Whether there is no run yet; from now on there is."""
        with self._lock:
            if self._is_launching or (self._run is not None and self._run.running()):
                return False
            self._is_launching = True
            return True

    def _launch(self, resume: bool) -> Run:
        self._trouble = ""
        try:
            args, kwargs = self._arguments()
            run = self._launcher(resume=resume)(self._function, *args.values(), **kwargs)
            self._run = run
            self._attach(run)
        except BaseException as error:
            self._trouble = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._is_launching = False
            painter.call(self._refresh)
        return run

    def _launcher(self, resume: bool = False) -> Launcher:
        chosen = {name: _value_of(control) for name, control in self.options.items()}
        chosen["run_dir"] = chosen["run_dir"].strip() or None
        asked = {option.name: getattr(self._asked, option.name) for option in fields(Options)}
        return Launcher(**{**asked, **chosen, "resume": resume, "view": False})

    def _arguments(self) -> tuple[dict[str, Any], dict[str, Any]]:
        values = self.values
        args = {name: values.pop(name) for name in self._call.by_position if name in values}
        return args, values

    def _attach(self, run: Run) -> None:
        card = Card(run) if self._has_page else None
        Final(
            run,
            lambda: card.aspect.lens if card else PLAIN,
            text=self._figure_text(),
            display_id=self._display_id,
            has_widget=self._has_page,
        ).await_end()
        if card is not None:
            painter.call(partial(self._put, card))
            painter.add(card)
            run.around_waits += [card.answering, partial(answering, self._form.widget)]
        run.watchers.append(self._heard)

    def _put(self, card: Card) -> None:
        before, self._card = self._card, card
        self.children = (self._form.widget, card.widget)
        if before is not None:
            close(before.widget)

    # ---- inside: following

    def _all_controls(self) -> Iterator[Control]:
        yield from self.options.values()
        yield from self.controls.values()

    def _changed(self, control: Control) -> None:
        """A control has another value: in any thread."""
        painter.call(partial(self._follow, control))

    def _follow(self, control: Control) -> None:
        self._trouble = ""
        self._steer(control)
        self._refresh()

    def _steer(self, control: Control) -> None:
        """Change the value of the run that goes on, where its function reads it there."""
        run, name = self._run, control.name
        if run is None or run.done() or name not in self._live() or control.error:
            return
        try:
            run.set(**{name: control.value})
        except (RuntimeError, TypeError, ValueError) as error:  # it ends just now, or the value is no setting
            self._trouble = f"{name}: {error}"

    def _live(self) -> list[str]:
        """Controls whose value the run reads while it goes on."""
        return [name for name in self.controls if self._run is not None and name in self._run.state.offered]

    def _heard(self, run: Watched) -> None:
        """Something has changed: in the run's own thread, many times a second."""
        state = run.state
        seen = (state.status, state.ended, tuple(state.offered))
        if seen != self._seen:
            self._seen = seen
            painter.call(self._refresh)

    def _refresh(self) -> None:
        """Bring all that is shown up to date."""
        self._form.show(
            code=self._code_or_none(),
            meaning=self._meaning(),
            hint=self._hint(),
            trouble=self._trouble,
            is_busy=self._is_launching or (self._run is not None and self._run.running()),
            resumable=self._newest_step(),
        )

    def _code_or_none(self) -> str | None:
        try:
            make_plan(self._launcher(), self._function)
            return self.code
        except (TypeError, ValueError):
            return None

    def _meaning(self) -> str:
        """What the world size amounts to, or why nothing can be launched."""
        try:
            plan = make_plan(self._launcher(), self._function)
            return " · ".join(_in_words(plan, self.values))
        except (TypeError, ValueError) as error:
            return str(error)

    def _hint(self) -> str:
        if self._run is None or self._run.done():
            return ""
        live = [self.controls[name].words for name in self._live()]
        if not live:
            return "what you change now counts for the next start"
        return f"{', '.join(live)}: a change counts at once; all else for the next start"

    def _newest_step(self) -> int | None:
        """The step that a resumed run would go on from; looked up where there may be another."""
        text = self.options["run_dir"].value.strip()
        seen = (text, self._run, self._run is not None and self._run.done())
        if seen != self._folder_seen:
            self._folder_seen = seen
            self._resumable = _newest_step(text) if text else None
        return self._resumable


def _newest_step(run_dir: str) -> int | None:
    try:
        found = candidates.newest(folder.absolute(run_dir))
    except (OSError, ValueError):  # it goes away just now, or is no path
        return None
    return None if found is None else checkpoints.step_of(found)


def _in_words(plan: Plan, values: Mapping[str, Any]) -> Iterator[str]:
    """What a world size means: who computes, with how many threads, on how many samples a step."""
    workers = plan.local_world_size
    kind = "GPU" if plan.devices[0].startswith("cuda") else "CPU"
    yield words.count(workers, f"{kind} worker")
    if kind == "GPU":
        yield ", ".join(plan.devices) if workers <= _LEAST_SLIDER else f"{plan.devices[0]} … {plan.devices[-1]}"
    else:
        yield words.count(plan.threads, "thread") + (" each" if workers > 1 else "")
    batch_size = values.get("batch_size")
    if isinstance(batch_size, int):
        accumulate = values.get("accumulate", 1)
        accumulate = accumulate if isinstance(accumulate, int) else 1
        yield f"global batch {plan.nnodes * workers * batch_size * accumulate:,}"


def _value_of(control: Control) -> Any:
    try:
        return control.value
    except ValueError as error:
        raise ValueError(f"{control.name}: {error}") from None


# ---- what a panel is made from


def _sort_out(function: Callable[..., Any], offered: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords that are options of launch, and those that are for the function's arguments."""
    names = {option.name for option in fields(Options)}
    for name in offered:
        if name in names and name in _parameters(function):
            called = _name(function)
            raise ValueError(
                f"{name!r} is an option of launch and a parameter of {called}() as well: Panel({called}, "
                f"controls={{{name!r}: …}}) means the parameter, Panel({called}, options={{{name!r}: …}}) the option"
            )
    ours = {name: value for name, value in offered.items() if name in names}
    return ours, {name: value for name, value in offered.items() if name not in names}


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
    for name, why in _OURS.items():
        if name in options:
            raise ValueError(f"{name}={options[name]!r}: {why}")
    if options.get("nproc_per_node") == 0:
        raise ValueError(
            "nproc_per_node=0 calls the function in the kernel: launch does that, a panel's runs have workers"
        )
    return options


def _options(asked: Launcher) -> list[tuple[str, choices.Choice]]:
    """The options that a panel offers, and what can be chosen for each."""
    gpus, cores = num_gpus(), num_cores()
    workers = make_plan(asked, print).local_world_size
    most = max(workers, gpus or max(cores, _LEAST_SLIDER))
    slider = choices.Range(low=1, high=max(2, most), value=workers, is_whole=True)
    backends: list[tuple[str, Any]] = [(name, name) for name in ("auto", *BACKENDS[: 2 if gpus else 1])]
    methods: list[tuple[str, Any]] = [(name, name) for name in ("auto", *get_args(StartMethod))]
    run_dir = "" if asked.run_dir is None else os.fspath(asked.run_dir)
    return [
        ("nproc_per_node", slider),
        ("backend", choices.Options(named=(*backends, ("none", None)), value=asked.backend)),
        ("start_method", choices.Options(named=tuple(methods), value=asked.start_method)),
        ("run_dir", choices.Typed(kind=str, value=run_dir)),
    ]


def _option(name: str, choice: choices.Choice) -> Control:
    shown, meaning = _WORDS[name]
    return Control(name, choice, words=shown, meaning=meaning)


def _with_strategies(function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """With the strategies of `wrap`, where the function has such a parameter and says nothing else."""
    parameter = _parameters(function).get("strategy")
    is_open = parameter is not None and (parameter.default in _STRATEGIES or parameter.default is parameter.empty)
    return {"strategy": list(_STRATEGIES), **offered} if is_open else offered


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin that does not tell
        return {}


def _name(function: Callable[..., Any]) -> str:
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))
