"""The panel: controls from a signature, the line of code, buttons, and what is left in the notebook."""

from __future__ import annotations

import enum
import math
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, Optional

import ipywidgets
import pytest
from nbformat.v4 import new_code_cell, new_notebook

import ddpnb
from ddpnb.notebook import choices, code
from ddpnb.notebook.choices import Flag, Kept, Options, Own, Range, Typed, choice, choices_of, nothing, read, write
from ddpnb.notebook.controls import Control
from ddpnb.plan import Options as LaunchOptions

from .conftest import Kernel, wait_until


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Kind(enum.StrEnum):
    A = "a"
    B = "b"


def range_of(offered: tuple[Any, ...], default: Any = nothing) -> Range:
    found = choice(offered, nothing, default)
    assert isinstance(found, Range)
    return found


# ---- what can be chosen


@pytest.mark.parametrize(
    ("offered", "annotation", "default", "expected"),
    [
        ((1, 20), nothing, 5, Range(low=1, high=20, value=5, is_whole=True)),
        ((1, 20), nothing, nothing, Range(low=1, high=20, value=10, is_whole=True)),
        ((0, 1), nothing, 0.5, Range(low=0, high=1, value=0.5)),
        ((0, 1), float, nothing, Range(low=0, high=1, value=0.5)),
        ((0.0, 1.0, 0.25), nothing, nothing, Range(low=0.0, high=1.0, value=0.5, step=0.25)),
        ((1e-3, 1.0), nothing, 0.1, Range(low=1e-3, high=1.0, value=0.1, is_log=True)),
        ((1e-2, 1.0), nothing, 5.0, Range(low=1e-2, high=1.0, value=1.0, is_log=True)),
        ((0.02, 1.0), nothing, 0.1, Range(low=0.02, high=1.0, value=0.1)),
        ((0.0, 1.0), nothing, 0.1, Range(low=0.0, high=1.0, value=0.1)),
        ((1, 1000), nothing, 10, Range(low=1, high=1000, value=10, is_whole=True)),
        ([16, 32], nothing, 32, Options(named=(("16", 16), ("32", 32)), value=32)),
        (("a", "b"), nothing, nothing, Options(named=(("a", "a"), ("b", "b")), value="a")),
        ((1, 2, 3, 4), nothing, 3, Options(named=(("1", 1), ("2", 2), ("3", 3), ("4", 4)), value=3)),
        ({"small": 1, "large": 9}, nothing, 9, Options(named=(("small", 1), ("large", 9)), value=9)),
        ((True, False), nothing, False, Options(named=(("True", True), ("False", False)), value=False)),
        (0.5, nothing, 0.1, Typed(kind=float, value=0.5)),
        ("adam", nothing, "sgd", Typed(kind=str, value="adam")),
        (ipywidgets.fixed([1]), nothing, 3, Kept(value=[1], is_default=False)),
        (int, nothing, 3, Typed(kind=int, value=3)),
        (Colour, nothing, Colour.BLUE, Options(named=(("RED", Colour.RED), ("BLUE", Colour.BLUE)), value=Colour.BLUE)),
        (nothing, nothing, True, Flag(value=True)),
        (nothing, nothing, 5, Typed(kind=int, value=5)),
        (nothing, nothing, 0.1, Typed(kind=float, value=0.1)),
        (nothing, float, 1, Typed(kind=float, value=1.0)),
        (nothing, nothing, "sgd", Typed(kind=str, value="sgd")),
        (nothing, nothing, None, Typed(kind=None, value=None, may_be_none=True)),
        (nothing, float | None, None, Typed(kind=float, value=None, may_be_none=True)),
        (nothing, Optional[int], 3, Typed(kind=int, value=3, may_be_none=True)),  # noqa: UP045
        (nothing, Literal["a", "b"], "b", Options(named=(("a", "a"), ("b", "b")), value="b")),
        (nothing, Literal["a", "b"], nothing, Options(named=(("a", "a"), ("b", "b")), value="a")),
        (nothing, bool, nothing, Flag(value=False)),
        (nothing, nothing, Colour.RED, Options(named=(("RED", Colour.RED), ("BLUE", Colour.BLUE)), value=Colour.RED)),
        (nothing, nothing, (0.9, 0.99), Kept(value=(0.9, 0.99), is_default=True)),
        (nothing, nothing, [3], Kept(value=[3], is_default=True)),
        (nothing, list | None, None, Kept(value=None, is_default=True)),
        (range(2), nothing, 1, Options(named=(("0", 0), ("1", 1)), value=1)),
        (Kind.A, nothing, nothing, Options(named=(("A", Kind.A), ("B", Kind.B)), value=Kind.A)),
    ],
)
def test_a_choice_is_read_from_what_is_offered_then_the_annotation_then_the_default(
    offered: Any, annotation: Any, default: Any, expected: object
) -> None:
    assert expected == choice(offered, annotation, default)


def test_a_widget_of_one_s_own_is_taken_as_it_is() -> None:
    widget = ipywidgets.IntText(3)

    assert Own(widget=widget) == choice(widget)


@pytest.mark.parametrize(
    ("offered", "words"),
    [
        ((5, 1), "no range"),
        ((1, math.inf), "no range"),
        ((32, 64, 128), r"for a choice offer a list, \[32, 64, 128\]"),
        ([], "nothing to choose from"),
        (object(), "no abbreviation"),
        (list, "tells of no values"),
        ((each for each in [1]), "no abbreviation"),
    ],
)
def test_what_cannot_be_offered_is_refused_with_its_argument_s_name(offered: Any, words: str) -> None:
    def train(lr: float) -> None: ...

    with pytest.raises((TypeError, ValueError), match=f"lr: .*{words}"):
        choices_of(train, {"lr": offered})


def test_an_argument_of_which_nothing_is_known_is_refused_with_what_to_offer() -> None:
    def train(epochs) -> None: ...  # type: ignore[no-untyped-def]

    with pytest.raises(ValueError, match=r"'epochs' has no default.*Panel\(train, epochs=\(1, 10\)\)"):
        ddpnb.Panel(train)


def test_a_rank_that_nobody_hands_over_is_named() -> None:
    with pytest.raises(ValueError, match=r"the function asks ddpnb.rank\(\)"):
        ddpnb.Panel(lambda rank, world_size: None)


def test_what_the_function_does_not_have_is_refused() -> None:
    def train(lr: float = 0.1, *rest: int) -> None: ...

    with pytest.raises(TypeError, match=r"'lrr' is no parameter of train\(\): it has lr"):
        ddpnb.Panel(train, lrr=(0, 1))


def test_keywords_beyond_the_signature_are_arguments_where_the_function_takes_them() -> None:
    def train(*args: int, **kwargs: float) -> None: ...

    panel = ddpnb.Panel(train, lr=(1e-3, 1.0), epochs=3)

    assert {"lr": 0.032, "epochs": 3} == panel.values


def test_annotations_in_strings_count_and_those_that_cannot_be_read_do_not() -> None:
    def train(lr: float = 1, net: NoSuchThing = None) -> None: ...  # type: ignore[name-defined] # noqa: F821

    assert {"lr": 1, "net": None} == ddpnb.Panel(train).values


# ---- what is typed


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (float, "1e-3", 0.001),
        (float, " 2 ", 2.0),
        (float, "inf", math.inf),
        (int, "12", 12),
        (str, " as it is ", " as it is "),
        (str, "", ""),
        (None, "0.5", 0.5),
        (None, "(1, 2)", (1, 2)),
        (None, "warm", "warm"),
        (None, "None", None),
    ],
)
def test_what_is_typed_becomes_a_value(kind: Any, text: str, value: object) -> None:
    found = read(Typed(kind=kind, value=None, may_be_none=kind is None), text)

    assert (value, type(value)) == (found, type(found))


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (float, "abc", "'abc' is not a number"),
        (float, "", "empty: a number is needed"),
        (float, "nan", "nan is not a number"),
        (int, "2.5", "'2.5' is not a whole number"),
        (int, "None", "'None' is not a whole number"),
        (int, "<b>", "'<b>' is not a whole number"),
    ],
)
def test_what_is_typed_wrong_is_refused_in_words(kind: Any, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(Typed(kind=kind, value=0), text)


@pytest.mark.parametrize("value", [0.1, 1e-3, 1e9, 0.1 + 0.2, 5, "a", "5", "None", "it's", None, (1, "x")])
def test_what_is_written_is_read_again(value: object) -> None:
    typed = Typed(kind=None, value=value, may_be_none=True)

    assert value == read(typed, write(typed, value))


# ---- controls


def test_a_logarithmic_slider_gives_numbers_that_one_would_write() -> None:
    control = Control("lr", range_of((1e-3, 1.0), 0.1))

    positions = []
    for step in range(4):
        control.widget.value = 10 ** (-1 - 0.05 * step)
        positions.append(control.value)

    assert [0.1, 0.089, 0.079, 0.071] == positions


def test_a_value_set_by_code_is_kept_to_the_last_digit() -> None:
    control = Control("lr", range_of((1e-3, 1.0), 0.1))

    control.value = 0.0123456789

    assert 0.0123456789 == control.value


@pytest.mark.parametrize(
    ("offered", "default", "value", "words"),
    [
        ((1e-3, 1.0), 0.1, 2.0, "lr: 2.0 is not from 0.001 to 1.0"),
        ((1, 20), 5, 2.5, "lr: 2.5 is not a whole number"),
        ((1, 20), 5, "3", "lr: '3' is not a number"),
        ((1, 20), 5, True, "lr: True is not a number"),
        ([16, 32], 16, 8, "lr: 8 is none of 16, 32"),
        (nothing, 0.1, "fast", "lr: 'fast' is not a number"),
        (nothing, True, 1, "lr: 1 is neither True nor False"),
    ],
)
def test_a_value_that_cannot_be_chosen_is_refused_by_code_too(
    offered: Any, default: Any, value: Any, words: str
) -> None:
    control = Control("lr", choice(offered, nothing, default))

    with pytest.raises((TypeError, ValueError), match=words):
        control.value = value

    assert default == control.value


def test_none_is_kept_until_something_else_is_typed() -> None:
    control = Control("clip_norm", choice(nothing, float | None, None))
    before = (control.widget.value, control.value)

    control.widget.value = "0.5"

    assert ("None", None) == before
    assert 0.5 == control.value


def test_choices_that_are_equal_or_cannot_be_compared_stay_apart() -> None:
    import numpy

    values = [1, True, numpy.zeros(2), numpy.zeros(2)]
    control = Control("x", choice(values))

    control.value = values[1]
    first = control.value
    control.value = values[3]

    assert first is True
    assert control.value is values[3]


def test_each_control_has_a_name_and_a_meaning_for_those_who_cannot_see_it() -> None:
    panel = ddpnb.Panel(lambda lr=0.1, warm=True, name="x", opt="a": None, lr=(1e-3, 1.0), controls={"name": "y"})

    shown = [each.widget for each in (*panel.options.values(), *panel.controls.values())]

    assert all(widget.description and widget.tooltip for widget in shown)
    assert "world size" == panel.options["nproc_per_node"].widget.description


# ---- the line of code


def caught(line: str, names: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a line launches: the function, its arguments and options, as `launch` and a Launcher would get them."""
    calls = []

    def launch(*args: Any, **kwargs: Any) -> None:
        calls.append((args, kwargs))

    def launcher(**options: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: calls.append((args, kwargs | {"options": options}))

    exec(line, {**names, "ddpnb": types.SimpleNamespace(launch=launch, Launcher=launcher)})
    [call] = calls
    return call


@pytest.fixture
def notebook_names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Names of a notebook, which are those of `__main__`."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    return vars(main)


def test_the_line_launches_what_start_launches(notebook_names: dict[str, Any], tmp_path: Path) -> None:
    def train(
        lr: float = 0.1, colour: Colour = Colour.RED, act: Any = None, clip: Any = None, name_: str = ""
    ) -> None: ...

    notebook_names |= {"train": train, "Colour": Colour, "square": math.sqrt}
    panel = ddpnb.Panel(
        train,
        lr=(1e-3, 1.0),
        act={"sqrt": math.sqrt, "sin": math.sin},
        name_='it\'s "so"',
        run_dir=tmp_path,
        nproc_per_node=2,
        env={"A": "1"},
    )
    panel.controls["colour"].value = Colour.BLUE
    panel.options["backend"].value = None

    args, kwargs = caught(panel.code, notebook_names)

    assert (train,) == args
    assert panel.values == {name: kwargs[name] for name in panel.values}
    options = {name: value for name, value in kwargs.items() if name not in panel.values}
    assert {"nproc_per_node": 2, "backend": None, "run_dir": str(tmp_path), "env": {"A": "1"}} == options


def test_arguments_without_a_name_are_in_their_places(notebook_names: dict[str, Any]) -> None:
    def train(epochs: int, /, lr: float = 0.1) -> None: ...

    notebook_names["train"] = train
    panel = ddpnb.Panel(train, epochs=(1, 9), nproc_per_node=2)

    assert "ddpnb.launch(train, 5, lr=0.1, nproc_per_node=2)" == panel.code


def test_an_argument_named_like_an_option_is_told_apart(notebook_names: dict[str, Any]) -> None:
    def train(timeout: int = 3, name: str = "x") -> None: ...

    notebook_names["train"] = train
    panel = ddpnb.Panel(train, controls={"timeout": (1, 5)}, options={"timeout": 60.0}, nproc_per_node=2)

    assert "ddpnb.Launcher(nproc_per_node=2, timeout=60.0)(train, timeout=3, name='x')" == panel.code
    with pytest.raises(ValueError, match=r"controls=\{'timeout': …\}\) means the parameter"):
        ddpnb.Panel(train, timeout=(1, 5))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.inf, 'float("inf")'),
        ((1,), "(1,)"),
        ({"a": [1.5, None]}, "{'a': [1.5, None]}"),
        (Path("runs"), "'runs'"),
        ([object()], "x"),
    ],
)
def test_values_are_spelled_as_code(value: object, expected: str, notebook_names: dict[str, Any]) -> None:
    assert expected == code.spelled(value, "x")


# ---- the panel, without a page


def test_a_default_that_no_control_fits_is_kept_and_named() -> None:
    def train(lr: float = 0.1, betas: tuple[float, float] = (0.9, 0.99)) -> None: ...

    panel = ddpnb.Panel(train)

    assert {"lr": 0.1} == panel.values
    assert any("without a control: betas (tuple)" in text for text in texts_of(panel))


@pytest.mark.parametrize(
    ("default", "annotation"),
    [(math.nan, nothing), (10**5000, nothing), (10**400, float), ("\ud800", str)],
    ids=["nan", "thousands of digits", "no float", "no Unicode"],
)
def test_a_default_that_nobody_could_type_is_kept(default: Any, annotation: Any) -> None:
    def train(x=default) -> None: ...  # type: ignore[no-untyped-def]

    train.__annotations__["x"] = annotation

    panel = ddpnb.Panel(train)

    assert {} == panel.values
    assert Kept(value=default, is_default=True) == panel.controls["x"].choice


def test_a_range_beyond_all_numbers_of_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="is no range"):
        choice((1, 10**400))


def test_arguments_that_are_no_words_of_python_are_spelled_so_that_the_line_can_be_run() -> None:
    def train(**kwargs: object) -> None: ...

    panel = ddpnb.Panel(train, nproc_per_node=2, **{"a b": 1, "class": "x", "lr": 0.5})

    _, _, call = panel.code.partition("(train, ")
    assert {"a b": 1, "class": "x", "lr": 0.5, "nproc_per_node": 2} == eval(f"dict({call}")


def texts_of(panel: Any) -> list[str]:
    from ddpnb.notebook.comms import tree

    return [widget.value for widget in tree(panel) if isinstance(widget, ipywidgets.HTML)]


def test_a_strategy_is_offered_where_the_function_has_one() -> None:
    panel = ddpnb.Panel(lambda strategy="fsdp": None)

    assert (
        Options(named=tuple((name, name) for name in ("ddp", "fsdp", "dp", "none")), value="fsdp")
        == panel.controls["strategy"].choice
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"view": True}, "a panel shows its run itself"),
        ({"resume": True}, "the Resume button"),
        ({"nproc_per_node": 0}, "workers"),
        ({"backend": "mpi"}, "backend='mpi' is none of"),
    ],
)
def test_options_that_a_panel_cannot_have_are_refused_when_it_is_made(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ddpnb.Panel(lambda: None, **options)


def test_what_the_world_size_means_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpnb.plan.num_cores", lambda: 8)
    panel = ddpnb.Panel(lambda batch_size=64, accumulate=2: None, nproc_per_node=2)

    panel.options["nproc_per_node"].value = 4

    assert "4 CPU workers · 2 threads each · global batch 512" == panel._meaning()


def test_what_is_typed_wrong_is_said_beside_it_and_nothing_can_be_started() -> None:
    panel = ddpnb.Panel(lambda lr=0.1: None)
    control = panel.controls["lr"]

    control.widget.value = "<img src=x>"

    wait_until(lambda: panel._form.start.disabled, what="the button's end")
    assert "&#x27;&lt;img src=x&gt;&#x27; is not a number" in control.note.value
    with pytest.raises(ValueError, match="lr: '<img src=x>' is not a number"):
        panel.start()
    assert panel.run is None

    panel.reset()

    wait_until(lambda: not panel._form.start.disabled, what="the button's return")
    assert 0.1 == control.value


def test_every_launch_option_is_a_panel_s_keyword() -> None:
    given = {"timeout": 30.0, "stop_timeout": 5.0, "threads_per_worker": 1, "env": {}, "name": "x", "nproc_per_node": 2}

    panel = ddpnb.Panel(lambda: None, **given)

    assert given == {name: getattr(panel._launcher(), name) for name in given}
    assert choices.Options  # the two that are called so
    assert LaunchOptions


# ---- in a kernel


TRAIN = """
import contextlib, ddpnb, time

def train(steps=3, lr=0.1, fail=False):
    for step in range(steps):
        ddpnb.log(loss=lr / (step + 1))
    if fail:
        raise ValueError("<b>no</b>")
    while steps == 99 and not ddpnb.should_stop():
        time.sleep(0.01)
    return lr

def settled(panel):
    # The painter has shown all that it was told.
    import threading
    from ddpnb.notebook.painter import painter
    done = threading.Event()
    painter.call(done.set)
    assert done.wait(20)
"""


@pytest.fixture(scope="module")
def shared_kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    assert kernel.run("%load_ext ddpnb" + TRAIN).error is None
    yield kernel
    kernel.close()


def test_a_panel_starts_what_is_chosen(kernel: Kernel) -> None:
    reply = kernel.run("""
        panel = ddpnb.Panel(train, lr=(1e-3, 1.0), nproc_per_node=2)
        panel.controls["lr"].value = 0.05
        before = panel.run
        run = panel.start()
        print(before, run is panel.run, run.result(), run.world_size)
    """)

    assert "None True 0.05 2" == reply.text


def test_a_panel_leaves_text_and_the_last_run_s_figure(kernel: Kernel) -> None:
    shown = kernel.run("panel = ddpnb.Panel(train, nproc_per_node=1); panel")
    waited = kernel.run("panel.start().result()")

    assert ["<ddpnb panel 'train'>", "<ddpnb panel 'train': its last run>", ""] == [
        each["text/plain"] for each in shown.displays
    ]
    assert all("application/vnd.jupyter.widget-view+json" not in each for each in shown.displays)
    assert [["image/png", "text/plain"]] == [sorted(each) for each in waited.updates]


def test_few_messages_are_sent_where_no_page_is(kernel: Kernel) -> None:
    kernel.run("panel = ddpnb.Panel(train, nproc_per_node=1); panel")

    waited = kernel.run("panel.start().result(); panel.start().result(); settled(panel)")

    assert waited.comms <= 20


def test_ten_clicks_launch_one_run(kernel: Kernel) -> None:
    reply = kernel.run("""
        launched = []
        from ddpnb import run as runs
        runs.on_launch.append(lambda run, view: launched.append(run))
        panel = ddpnb.Panel(train, nproc_per_node=1, steps=99)
        for _ in range(10):
            panel._form.start.click()
        while panel.run is None or panel._is_launching:
            time.sleep(0.01)
        panel._form.start.click()
        settled(panel)
        print(len(launched), panel._form.start.disabled)
        try:
            panel.start()
        except RuntimeError as error:
            print(error)
        while not panel.run.history:
            time.sleep(0.01)
        panel.run.stop()
        print(panel.run.result())
        settled(panel)
        print(panel._form.start.disabled)
        del runs.on_launch[-1]
    """)

    expected = "1 True\nthis panel's run goes on: panel.run.stop() first, or make another panel\n0.1\nFalse"
    assert expected == reply.text


def test_what_a_launch_refuses_is_shown_in_the_panel_escaped(kernel: Kernel) -> None:
    reply = kernel.run("""
        panel = ddpnb.Panel(lambda lr=0.1, lock=ddpnb.__loader__: time.sleep(unpicklable is None), nproc_per_node=1)
        import threading
        unpicklable = threading.Lock()
        panel._form.start.click()
        while not panel._trouble:
            time.sleep(0.01)
        settled(panel)
        print(panel._form._trouble.value.partition(":")[0], panel.run, panel._form.start.disabled)
    """)

    assert '<pre class="bad" role="alert">UnpicklableError None False' == reply.text


def test_a_failed_run_can_be_followed_by_another(kernel: Kernel) -> None:
    reply = kernel.run("""
        panel = ddpnb.Panel(train, nproc_per_node=1)
        panel.controls["fail"].value = True
        try:
            panel.start().result()
        except ValueError as error:
            print(type(error).__name__)
        panel.reset()
        print(panel.start().result())
    """)

    assert "ValueError\n0.1" == reply.text


def test_resume_is_offered_where_the_run_folder_has_a_checkpoint(kernel: Kernel, tmp_path: Path) -> None:
    reply = kernel.run(f"""
        import torch
        def learn(epochs=1):
            model = ddpnb.wrap(torch.nn.Linear(2, 1))
            data = torch.utils.data.TensorDataset(torch.ones(8, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loop = ddpnb.Loop(model, optimizer, ddpnb.loader(data, 2), epochs=epochs)
            for (x,) in loop:
                loop.update(model(x).mean())
            return loop.step

        panel = ddpnb.Panel(learn, run_dir={str(tmp_path)!r}, nproc_per_node=1)
        settled(panel)
        print(panel._form.resume.description, panel._form.resume.disabled)
        print(panel.start().result())
        settled(panel)
        print(panel._form.resume.description, panel._form.resume.disabled)
        panel.controls["epochs"].value = 2
        run = panel.resume()
        print(run.result(), run.state.resumed.step, "resume=" in panel.code)
        panel.options["run_dir"].value = ""
        settled(panel)
        print(panel._form.resume.description, panel._form.resume.disabled)
        try:
            panel.resume()
        except ValueError as error:
            print(str(error)[:11])
    """)

    expected = "Resume True\n4\nResume step 4 False\n8 4 False\nResume True\nresume=True"
    assert expected == reply.text


def test_a_control_whose_value_the_run_reads_changes_it_at_once(kernel: Kernel) -> None:
    reply = kernel.run("""
        def read(lr=0.1, epochs=3):
            while not ddpnb.should_stop():
                ddpnb.log(loss=ddpnb.setting("lr", lr))
                time.sleep(0.01)
            return ddpnb.setting("lr", lr), epochs

        panel = ddpnb.Panel(read, lr=(1e-3, 1.0), nproc_per_node=2)
        run = panel.start()
        while "lr" not in run.state.offered:
            time.sleep(0.01)
        settled(panel)
        print(panel._hint())
        panel.controls["lr"].value = 0.5
        panel.controls["epochs"].value = 9
        while not run.state.applied:
            time.sleep(0.01)
        run.stop()
        print(run.results())
        print(panel._hint())
    """)

    expected = "lr: a change counts at once; all else for the next start\n{0: (0.5, 3), 1: (0.5, 3)}\n"
    assert expected == reply.text + "\n"


def test_two_panels_and_three_runs_go_on_at_once(kernel: Kernel) -> None:
    reply = kernel.run("""
        panels = [ddpnb.Panel(train, nproc_per_node=1, steps=99, lr=each) for each in (0.1, 0.2)]
        several = [panel.start() for panel in panels] + [ddpnb.launch(train, 99, 0.3, nproc_per_node=1, view=False)]
        while not all(run.history for run in several):
            time.sleep(0.01)
        for run in several:
            run.stop()
        print([run.result() for run in several])
    """)

    assert "[0.1, 0.2, 0.3]" == reply.text


def test_runs_one_after_the_other_leave_no_widgets_behind(kernel: Kernel) -> None:
    reply = kernel.run("""
        from ipywidgets import Widget
        panel = ddpnb.Panel(lambda: None, nproc_per_node=1)
        numbers = []
        for _ in range(3):
            panel._has_page = True
            panel.start().result()
            settled(panel)
            numbers.append(len(Widget.get_manager_state()["state"]))
        print(numbers[1] - numbers[0], numbers[2] - numbers[1])
        panel.close()
    """)

    assert "0 0" == reply.text


def test_a_closed_panel_still_has_its_run(kernel: Kernel) -> None:
    reply = kernel.run("""
        panel = ddpnb.Panel(train, nproc_per_node=1, steps=99)
        run = panel.start()
        while not run.history:
            time.sleep(0.01)
        panel.close()
        panel.close()
        settled(panel)
        print(panel.run is run, panel.comm, run.running())
        run.stop()
        print(run.result(), panel.start().stop())
        panel.run.wait()
    """)

    assert "True None True\n0.1 None" == reply.text


@pytest.mark.parametrize("wait", ["panel.run.result()", "await panel.run"])
def test_an_interrupt_of_a_cell_that_waits_for_a_panel_s_run_stops_it(kernel: Kernel, wait: str) -> None:
    kernel.run("""
        panel = ddpnb.Panel(train, nproc_per_node=1, steps=99)
        run = panel.start()
        while not run.history:
            time.sleep(0.01)

        @contextlib.contextmanager
        def saying():
            print("waiting", flush=True)
            yield

        run.around_waits.append(saying)
    """)
    first = "print('waiting', flush=True)\n" if "await" in wait else ""
    pressed: list[str] = []

    def press(text: str) -> None:
        if not pressed:
            pressed.append(text)
            kernel.interrupt()

    reply = kernel.wait(kernel.start(first + wait), on_stdout=press)

    assert reply.error in ("KeyboardInterrupt", "CancelledError")
    assert [True, "finished"] == kernel.value("print([run.done(), panel.run.state.status])")


def test_a_panel_needs_no_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    panel = ddpnb.Panel(partial(print, "x"), nproc_per_node=2)

    panel._ipython_display_()

    assert "<ddpnb panel 'print'>\n" == capsys.readouterr().out


def test_a_notebook_with_a_panel_keeps_no_widget(tmp_path: Path) -> None:
    from nbclient import NotebookClient

    cells = [
        "%load_ext ddpnb" + TRAIN + "panel = ddpnb.Panel(train, nproc_per_node=1)\npanel",
        "panel.start().result()",
    ]
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])

    NotebookClient(notebook, store_widget_state=False, raise_on_iopub_timeout=True).execute()

    kinds = [sorted(output["data"]) for output in notebook.cells[0].outputs]
    assert [["text/plain"], ["image/png", "text/plain"], ["text/html", "text/plain"]] == kinds
