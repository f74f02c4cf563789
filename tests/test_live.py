"""The live view of runs that are played from lists of messages, with widgets whose messages are recorded."""

from __future__ import annotations

import gc
import io
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import comm
import IPython
import pytest

from ddpnb import draw
from ddpnb.draw import figure
from ddpnb.messages import AnyMessage, Applied, Asked, Ended, Hung, Offered, Paused, Saved, Steered, Woke
from ddpnb.notebook import comms, frontend, live, painter, steering, terminal
from ddpnb.notebook.final import Final
from ddpnb.state import RunState, fold

from .conftest import wait_until
from .messages_for_tests import finished, folded, metrics, output, raised

DEADLINE = 20.0
"""Seconds against hangs."""


class PlayedRun:
    """A run that says what the test tells it to."""

    def __init__(self, num_ranks: int = 2, name: str = "train") -> None:
        self.name = name
        self.world_size = num_ranks
        self.watchers: list[Callable[[Any], None]] = []
        self.finishers: list[Callable[[Any], None]] = []
        self.around_waits: list[Callable[[], Any]] = []
        self.hang_after: float | None = 10.0
        self.is_shown_here: Callable[[], bool] = lambda: False
        self.asked: list[Any] = []
        self.state: RunState = folded(num_ranks, name=name)

    @property
    def is_live(self) -> bool:
        return self.state.ended is None

    def say(self, *messages: AnyMessage) -> None:
        for message in messages:
            self.state = fold(self.state, message)
            for watcher in tuple(self.watchers):
                watcher(self)

    def pause(self) -> None:
        self.asked.append("pause")

    def unpause(self) -> None:
        self.asked.append("unpause")

    def save(self) -> None:
        self.asked.append("save")

    def stop(self) -> None:
        self.asked.append("stop")

    def kill(self) -> None:
        self.asked.append("kill")

    def keep_waiting(self) -> None:
        self.asked.append("keep waiting")

    def set(self, **settings: Any) -> None:
        self.asked.append(settings)

    def stacks(self) -> dict[int, str]:
        return {0: "in the loop"}

    def be_waited_for(self) -> None:
        """What `Run.result()` does in its cell."""
        for finisher in tuple(self.finishers):
            finisher(self)


class Page:
    """What would be on the page: widget messages and displays, in order."""

    def __init__(self) -> None:
        self.values: list[str] = []  # drawings
        self.others: list[dict[str, Any]] = []  # what else changed, at each message
        self.times: list[float] = []
        self.displays: list[dict[str, Any]] = []
        self.updates: list[dict[str, Any]] = []
        self._has_changed = threading.Condition()

    def send(self, data: dict[str, Any] | None = None, **_: object) -> None:
        with self._has_changed:
            state = (data or {}).get("state", {})
            if isinstance(state.get("value"), str) and "class=" in state["value"]:
                self.values.append(state["value"])
            else:
                self.others.append(state)
            self.times.append(time.monotonic())
            self._has_changed.notify_all()

    def wait_for(self, holds: Callable[[], bool]) -> None:
        with self._has_changed:
            assert self._has_changed.wait_for(holds, DEADLINE)

    def display(self, bundle: dict[str, Any], **options: Any) -> None:
        self.displays.append(bundle | {"display_id": options["display_id"]})

    def update_display(self, bundle: dict[str, Any], **options: Any) -> None:
        self.updates.append(bundle | {"display_id": options["display_id"], "metadata": options["metadata"]})


class RecordedComm:
    """In place of a comm to a front end.

    Source: ipywidgets/widgets/tests/utils.py, `DummyComm`.
    """

    comm_id = "recorded"
    kernel = "there"

    def __init__(self, page: Page) -> None:
        self.send = page.send

    def open(self, *_: object, **__: object) -> None: ...
    def on_msg(self, *_: object) -> None: ...
    def close(self, *_: object, **__: object) -> None: ...


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    """A kernel with a page in front of it."""
    page = Page()
    monkeypatch.setattr(comm, "create_comm", lambda **_: RecordedComm(page))
    monkeypatch.setattr(comm, "get_comm_manager", dict)
    monkeypatch.setattr(IPython.display, "display", page.display)
    monkeypatch.setattr(IPython.display, "update_display", page.update_display)
    monkeypatch.setattr(live, "in_notebook_kernel", lambda: True)
    monkeypatch.setattr(live, "is_frontend_there", lambda: True)
    yield page
    assert views_end()


def views_end() -> bool:
    """Wait for the painter's thread to end."""
    for thread in threading.enumerate():
        if thread.name == "ddpnb-view":
            thread.join(DEADLINE)
    return all(thread.name != "ddpnb-view" for thread in threading.enumerate())


def test_a_launch_shows_one_widget_with_one_stable_line_of_text(page: Page) -> None:
    run = PlayedRun()

    live.attach(run, None)
    run.say(*finished(2))

    [shown] = page.displays
    assert shown["text/plain"] == "<ddpnb run 'train': 2 ranks>"
    assert "application/vnd.jupyter.widget-view+json" in shown


def test_a_flood_of_messages_is_drawn_twice_a_second_at_most(page: Page) -> None:
    run = PlayedRun()
    live.attach(run, None)

    step = 0
    while len(page.times) < 7:
        run.say(metrics(0, "loss", [1.0 / (1 + step)], first_step=step))
        step += 1
    run.say(*finished(2))

    assert step > 100
    # Drawings are at least half a second apart; what they take themselves varies. Two messages may come once: the
    # widgets, and the first name among them.
    assert len(page.times) <= 2 * (page.times[-1] - page.times[0]) + 4
    assert len(page.others) <= 2
    assert "<svg" in page.values[0]


def test_a_quiet_run_only_lets_time_go_on(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(painter, "INTERVAL", 0.01)
    monkeypatch.setattr(painter, "TICK", 0.02)
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: 7.0))
    run = PlayedRun()
    draws = count_draws(monkeypatch, at_least=5)

    live.attach(run, None)
    assert draws.wait(DEADLINE)

    assert page.values == []
    assert [list(state) for state in page.others] == [["children"]]
    run.say(*finished(2))


def count_draws(monkeypatch: pytest.MonkeyPatch, *, at_least: int) -> threading.Event:
    """An event that is set once cards have been drawn so many times."""
    count, reached, draw = 0, threading.Event(), live.Card.draw

    def counted(card: live.Card) -> None:
        nonlocal count
        draw(card)
        count += 1
        if count >= at_least:
            reached.set()

    monkeypatch.setattr(live.Card, "draw", counted)
    return reached


def test_the_figure_takes_the_widgets_place_once(page: Page) -> None:
    run = PlayedRun()
    live.attach(run, None)

    run.say(metrics(0, "loss", [2.0, 1.0]), *finished(2))
    run.be_waited_for()
    run.be_waited_for()
    assert views_end()

    [update] = page.updates
    assert update["display_id"] == page.displays[0]["display_id"]
    assert update["text/plain"] == page.displays[0]["text/plain"]
    assert update["image/png"].startswith("iVBOR")
    assert update["metadata"]["image/png"] == {"needs_background": "light", "width": 760, "height": 310}


def test_a_page_that_is_loaded_again_finds_the_whole_curve_in_the_widget(page: Page) -> None:
    run = PlayedRun()
    live.attach(run, None)

    run.say(metrics(0, "loss", [2.0, 1.0]), output(1, "bye\n"), *finished(2))
    assert views_end()

    assert ">finished</span>" in page.values[-1]
    assert "<svg" in page.values[-1]
    assert "bye" in page.values[-1]


def test_a_run_that_nobody_waits_for_has_its_figure_too(page: Page) -> None:
    run = PlayedRun()
    live.attach(run, None)

    run.say(metrics(0, "loss", [2.0, 1.0]), *finished(2))
    assert views_end()

    assert len(page.updates) == 1


def test_a_failed_run_leaves_its_report_where_its_widget_was(page: Page) -> None:
    run = PlayedRun()
    live.attach(run, None)

    run.say(metrics(0, "loss", [2.0, 1.0]), raised(1, "<b>bad</b> shape"), Ended(time=2.0, problem=None))
    assert views_end()

    [update] = page.updates
    assert {"image/png", "text/html", "text/plain", "display_id", "metadata"} == set(update)
    assert "ValueError: &lt;b&gt;bad&lt;/b&gt; shape" in update["text/html"]
    assert "<script" not in update["text/html"]


def test_a_second_view_of_a_run_is_alive_too(page: Page) -> None:
    run = PlayedRun()
    live.attach(run, None)
    live.show(run)

    run.say(metrics(0, "loss", [2.0, 1.0]), *finished(2))
    run.be_waited_for()
    assert views_end()

    assert len({update["display_id"] for update in page.updates}) == 2
    assert sum(">finished</span>" in value for value in page.values) == 2


def test_an_ended_run_is_shown_as_its_figure(page: Page) -> None:
    run = PlayedRun()
    run.say(metrics(0, "loss", [2.0, 1.0]), *finished(2))

    live.show(run)

    assert [set(shown) - {"display_id"} for shown in page.displays] == [{"text/plain"}]
    assert len(page.updates) == 1
    assert page.values == []


def test_the_thread_ends_with_the_last_run_and_a_later_run_has_one_again(page: Page) -> None:
    for _ in range(2):
        run = PlayedRun()
        live.attach(run, None)
        assert any(thread.name == "ddpnb-view" and thread.daemon for thread in threading.enumerate())

        run.say(*finished(2))

        assert views_end()
        assert run.watchers == []


def test_a_run_that_ended_before_it_was_watched_leaves_no_thread(page: Page) -> None:
    run = PlayedRun()
    run.state = folded(2, finished(2))

    painter.painter.add(live.Card(run))

    assert views_end()


def test_the_painter_does_not_rest_after_the_end(page: Page) -> None:
    run = PlayedRun()
    turn = painter._Turn(live.Card(run), threading.Event())
    run.watchers.append(turn.changed)
    run.say(*finished(2))

    assert turn.take(time.monotonic() + painter.TICK) == 0.0
    assert turn.is_over


def test_a_view_that_cannot_be_drawn_says_so_and_the_others_go_on(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = PlayedRun(name="bad"), PlayedRun(name="good")
    draw = live.Card.draw

    def failing(card: live.Card) -> None:
        if card.run is bad:
            raise ZeroDivisionError("a flaw of ours")
        draw(card)

    monkeypatch.setattr(live.Card, "draw", failing)
    live.attach(bad, None)
    live.attach(good, None)

    for run in (bad, good):
        run.say(metrics(0, "loss", [2.0, 1.0]))
    page.wait_for(
        lambda: any("a flaw of ours" in value and "bad: the live view has failed" in value for value in page.values)
    )
    page.wait_for(lambda: any("<svg" in value for value in page.values))
    for run in (bad, good):
        run.say(*finished(2))


def test_a_figure_that_cannot_be_drawn_is_a_warning_and_no_error(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    run = PlayedRun()
    run.say(metrics(0, "loss", [1.0]))
    final = Final(run)
    monkeypatch.setattr(figure, "png", lambda *_, **__: 1 / 0)

    with pytest.warns(UserWarning, match="the figure of 'train' could not be shown: ZeroDivisionError"):
        final.publish(run)


def test_no_view_shows_nothing(page: Page) -> None:
    run = PlayedRun()

    live.attach(run, False)
    run.say(*finished(2))

    assert (page.displays, page.values, run.watchers, run.finishers) == ([], [], [], [])


# ---- what can be clicked


class Clicks:
    """A card's widgets, as a reader finds them, by what is written on them."""

    def __init__(self, card: live.Card) -> None:
        self.card = card
        painted()

    def __getitem__(self, words: str) -> Any:
        for widget in comms.tree(self.card.widget):
            if words in (getattr(widget, "description", ""), getattr(widget, "tooltip", ""), widget.__class__.__name__):
                return widget
        raise KeyError(words)

    @property
    def buttons(self) -> list[str]:
        return [self.card._hands._pause.description, self.card._hands._stop.description]


def painted() -> None:
    """Wait until the painter has made all calls so far."""
    done = threading.Event()
    painter.painter.call(done.set)
    assert done.wait(DEADLINE)


@pytest.fixture
def shown(page: Page) -> Iterator[tuple[PlayedRun, live.Card, Clicks]]:
    """A run whose card is on the page."""
    run = PlayedRun()
    run.say(metrics(0, "loss", [2.0, 1.0]), metrics(0, "accuracy", [0.1, 0.9]))
    card = live.Card(run)
    painter.painter.add(card)
    yield run, card, Clicks(card)
    run.say(*finished(2))


Shown = tuple[PlayedRun, live.Card, Clicks]


def test_a_tab_is_drawn_at_once_and_in_one_message_beside_its_own(shown: Shown, page: Page) -> None:
    _, card, clicks = shown
    painted()
    before = len(page.values)

    clicks["ToggleButtons"].value = "ranks"
    painted()

    assert 'aria-label="ranks"' in card._live.value
    assert "on-ranks" in card.widget._dom_classes
    assert len(page.values) == before + 1


def test_the_curve_is_the_chosen_one(shown: Shown) -> None:
    _, card, clicks = shown

    clicks["the value that is drawn"].value = "accuracy"
    clicks["linear axis, or one of logarithms"].value = True
    clicks["a running mean over the curve"].value = 0.6
    painted()

    assert draw.Lens("accuracy", log=True, smoothing=0.6) == card.aspect.lens
    assert '<text class="n" x="46" y="13">accuracy</text>' in card._live.value


def test_a_name_that_nobody_chose_gives_way_to_the_loss(page: Page) -> None:
    run = PlayedRun()
    run.say(metrics(0, "accuracy", [0.1, 0.9]))
    card = live.Card(run)
    clicks = Clicks(card)

    run.say(metrics(0, "loss", [2.0, 1.0]))
    painter.painter.call(card.draw)
    painted()
    painted()

    assert "loss" == clicks["the value that is drawn"].value
    assert card.aspect.lens.name is None
    assert '<text class="n" x="46" y="13">loss</text>' in card._live.value


def test_pause_says_at_once_that_it_was_heard_and_then_what_the_run_does(shown: Shown) -> None:
    run, card, clicks = shown

    clicks["Pause"].click()
    painted()
    heard = clicks.buttons[0]
    run.say(Steered(time=1.0, how="pause"), *(Paused(time=1.0, rank=rank, check=3) for rank in range(2)))
    painter.painter.call(card.draw)
    painted()

    assert ["pause"] == run.asked
    assert "Pausing …" == heard
    assert "Unpause" == clicks.buttons[0]
    clicks["Unpause"].click()
    painted()
    assert ["pause", "unpause"] == run.asked


def test_ten_clicks_on_stop_stop_and_do_not_kill(shown: Shown) -> None:
    run, _, clicks = shown

    stop = clicks["Stop"]
    for _ in range(10):
        stop.click()
    painted()

    assert ["stop"] == run.asked
    assert "Stopping …" == stop.description
    assert stop.disabled


def test_stop_becomes_kill_after_a_moment(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    run, card, clicks = shown
    monkeypatch.setattr(steering, "_KILL_AFTER", 0.0)

    stop = clicks["Stop"]
    stop.click()
    painted()
    run.say(Asked(time=1.0, how="stop"))
    painter.painter.call(card.draw)
    painted()
    stop.click()
    painted()

    assert "Kill" == stop.description
    assert ["stop", "kill"] == run.asked


def test_save_without_a_folder_is_off_and_says_why(shown: Shown) -> None:
    _, _, clicks = shown

    assert clicks["Save"].disabled
    assert "run_dir" in clicks["Save"].tooltip


def test_saving_is_said_until_it_has_come_about(page: Page) -> None:
    run = PlayedRun()
    run.state = replace(run.state, folder="/runs/x")
    card = live.Card(run)
    save = Clicks(card)["Save"]

    save.click()
    save.click()
    painted()
    heard = save.description
    run.say(Saved(time=1.0, rank=0, path="/runs/x/checkpoints/step-00000003", step=3, epoch=0))
    painter.painter.call(card.draw)
    painted()

    assert ["save"] == run.asked
    assert "Saving …" == heard
    assert ("Save", False) == (save.description, save.disabled)


def test_what_could_not_be_asked_is_said_in_the_card(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    run, card, clicks = shown

    def refuse() -> None:
        raise RuntimeError("<nobody> can be asked")

    monkeypatch.setattr(run, "pause", refuse)
    clicks["Pause"].click()
    painted()

    assert "&lt;nobody&gt; can be asked" in card._live.value
    assert "Pause" == clicks.buttons[0]


def test_a_setting_is_a_slider_that_asks_once_and_follows_what_is_set_elsewhere(shown: Shown) -> None:
    run, card, clicks = shown
    run.say(Offered(rank=0, time=0.0, name="lr", value=0.1), Offered(rank=0, time=0.0, name="<b>on</b>", value=True))
    painter.painter.call(card.draw)
    painted()

    clicks["lr"].value = 0.0500123
    painted()
    asked = list(run.asked)
    run.say(Applied(rank=0, time=1.0, name="lr", before=0.1, value=0.05, step=7))
    run.say(Applied(rank=0, time=1.0, name="<b>on</b>", before=True, value=False, step=7))
    painter.painter.call(card.draw)
    painted()
    painted()

    assert [{"lr": 0.05}] == asked == run.asked
    assert (0.05, False) == (clicks["lr"].value, clicks["<b>on</b>"].value)


def test_the_patience_with_a_silent_rank_can_be_set(shown: Shown) -> None:
    run, _, clicks = shown

    clicks["hang after (s)"].value = 60.0
    painted()
    longer = run.hang_after
    clicks["hang after (s)"].value = 0.0
    painted()

    assert 60.0 == longer
    assert run.hang_after is None


def test_a_hang_has_its_buttons(shown: Shown) -> None:
    run, card, clicks = shown
    run.say(Hung(time=1.0, silence=12.0))
    painter.painter.call(card.draw)
    painted()
    assert "is-hung" in card.widget._dom_classes

    clicks["Keep waiting"].click()
    clicks["Stacks"].click()
    painted()
    wait_until(lambda: "in the loop" in card._live.value, what="the stacks")

    assert ["keep waiting"] == run.asked


def test_the_output_is_in_the_page_only_once_it_is_asked_for(shown: Shown) -> None:
    run, card, clicks = shown
    run.say(output(1, "hello\n"))
    painter.painter.call(card.draw)
    painted()

    link = card._eyes._link
    assert "" == link.value
    clicks["Download"].click()
    painted()
    assert "data:text/plain" in link.value


def test_a_card_does_not_keep_its_run_alive(page: Page) -> None:
    run = PlayedRun()
    card = live.Card(run)
    Clicks(card)
    run.say(*finished(2))
    assert views_end()
    ended = weakref.ref(run)

    del run, card
    gc.collect()

    assert ended() is None


def test_the_figure_at_the_end_is_looked_at_as_the_card_was(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    run, lenses = PlayedRun(), []
    monkeypatch.setattr(figure, "png", lambda _, lens: lenses.append(lens) or b"0" * 24)
    run.say(metrics(0, "loss", [2.0, 1.0]))
    live.attach(run, None)
    [card] = [turn._view for turn in painter.painter._turns]

    Clicks(card)["linear axis, or one of logarithms"].value = True
    painted()
    run.say(*finished(2))
    assert views_end()

    assert [draw.Lens(log=True)] == lenses


def test_a_run_is_not_shown_twice_by_the_cell_that_launches_it(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SimpleNamespace(execution_count=3)
    monkeypatch.setattr(live, "ipython_kernel", lambda: kernel)
    run = PlayedRun()

    live.attach(run, None)
    here = run.is_shown_here()
    kernel.execution_count = 4

    assert here
    assert not run.is_shown_here()
    run.say(*finished(2))


# ---- without a page


def test_a_kernel_without_a_page_gets_the_line_and_the_figure(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "is_frontend_there", lambda: False)
    run = PlayedRun()

    live.attach(run, None)
    run.say(metrics(0, "loss", [2.0, 1.0]), *finished(2))
    run.be_waited_for()

    assert [set(shown) - {"display_id"} for shown in page.displays] == [{"text/plain"}]
    assert len(page.updates) == 1
    assert (page.values, run.watchers) == ([], [])


def test_a_run_that_logged_nothing_is_the_line_alone(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "is_frontend_there", lambda: False)
    run = PlayedRun()

    live.attach(run, None)
    run.say(*finished(2))
    run.be_waited_for()

    assert len(page.displays) == 1
    assert page.updates == []


def test_a_view_that_is_forced_is_live_without_a_page(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "is_frontend_there", lambda: False)
    run = PlayedRun()

    live.attach(run, True)
    run.say(metrics(0, "loss", [2.0, 1.0]), *finished(2))
    assert views_end()

    assert page.values


class FakeKernel:
    def __init__(self, metadata: dict[str, str]) -> None:
        self.kernel = self
        self._metadata = metadata

    def get_parent(self) -> dict[str, object]:
        return {"metadata": self._metadata}


@pytest.mark.parametrize(
    ("variables", "metadata", "expected"),
    [
        ({}, {}, False),
        ({"JPY_SESSION_NAME": "t.ipynb"}, {}, True),
        ({"VSCODE_PID": "7"}, {}, True),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, {}, True),
        ({}, {"cellId": "a1"}, True),
    ],
)
def test_a_page_is_known_by_its_marks(
    variables: dict[str, str], metadata: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("JPY_SESSION_NAME", "VSCODE_PID", "KAGGLE_KERNEL_RUN_TYPE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(IPython, "get_ipython", lambda: FakeKernel(metadata))

    assert frontend.in_notebook_kernel()
    assert frontend.is_frontend_there() is expected


def test_plain_python_is_no_kernel() -> None:
    assert not frontend.in_notebook_kernel()
    assert not frontend.is_frontend_there()


# ---- a terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_the_output_of_each_rank_and_a_line_of_status() -> None:
    run, screen = PlayedRun(), Terminal()
    view = terminal.Lines(run, screen)

    run.say(output(0, "one\ntw"))
    view.draw()
    run.say(output(0, "o\n"), output(1, "three"))
    view.draw()
    run.say(*finished(2))
    view.draw()

    written = screen.getvalue()
    assert [line.rpartition("\r")[2] for line in written.split("\n") if "[rank" in line] == [
        "\x1b[K[rank 0] one",
        "\x1b[K[rank 0] two",
        "\x1b[K[rank 1] three",
    ]
    assert written.endswith("train: finished · 0:36\n")


def test_a_file_gets_no_status_but_the_last() -> None:
    run, log = PlayedRun(), io.StringIO()
    view = terminal.Lines(run, log)

    view.draw()
    run.say(output(0, "one\n"), *finished(2))
    view.draw()

    assert log.getvalue() == "[rank 0] one\ntrain: finished · 0:36\n"


def test_a_hang_is_written_once() -> None:
    run, log = PlayedRun(), io.StringIO()
    view = terminal.Lines(run, log)

    run.say(Hung(time=9.0, silence=12.0))
    view.draw()
    view.draw()
    run.say(Woke(time=10.0), Hung(time=40.0, silence=25.0))
    view.draw()

    assert re.findall(r"train: no step for \d+ s", log.getvalue()) == [
        "train: no step for 12 s",
        "train: no step for 25 s",
    ]


def test_a_flood_is_written_from_where_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpnb.state.OUTPUT_LIMIT", 100)
    run, log = PlayedRun(), io.StringIO()
    view = terminal.Lines(run, log)

    for number in range(50):
        run.say(output(0, f"line {number}\n"))
        if number % 10 == 0:
            view.draw()
    run.say(*finished(2))
    view.draw()

    lines = [line for line in log.getvalue().splitlines() if "[rank 0] line" in line]
    assert len(lines) == len(set(lines))
    assert lines[-1] == "[rank 0] line 49"


def test_without_a_terminal_only_what_the_ranks_print_and_the_end_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)
    run = PlayedRun()

    live.attach(run, None)
    run.say(output(1, "hello\n"), metrics(0, "loss", [1.0]), *finished(2))
    assert views_end()

    assert "[rank 1] hello\ntrain: finished · step 1 · 0:36 · loss 1.00\n" == log.getvalue()


def test_a_script_that_ends_right_after_waiting_has_seen_the_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)
    monkeypatch.setattr(painter.painter, "add", lambda view: None)  # the thread that draws never comes to it
    run = PlayedRun()

    live.attach(run, None)
    run.say(output(0, "the last line"), *finished(2))
    run.be_waited_for()
    run.be_waited_for()

    assert "[rank 0] the last line\ntrain: finished · 0:36\n" == log.getvalue()


def test_show_prints_the_card_outside_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    live.show(PlayedRun())

    assert "● train  running · 2 ranks · gloo · cpu" in capsys.readouterr().out
