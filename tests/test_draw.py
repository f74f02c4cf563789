"""Drawings of states that were folded from lists of messages: no process, no widget."""

from __future__ import annotations

import re
import warnings
import xml.etree.ElementTree as ElementTree
from array import array
from base64 import b64decode
from dataclasses import replace
from itertools import combinations, pairwise
from math import inf, nan
from typing import get_args

import pytest

from ddpnb import draw
from ddpnb.draw import curves, summary, words
from ddpnb.draw.aspect import Aspect, Tab
from ddpnb.draw.curves import curve, spread, ticks
from ddpnb.draw.figure import display_metadata, figure, png
from ddpnb.draw.lens import Lens
from ddpnb.draw.marks import Mark, written
from ddpnb.draw.output import download
from ddpnb.draw.palette import DARK, LIGHT, look
from ddpnb.draw.svg import STROKES, svg
from ddpnb.messages import Applied, Asked, Ended, Hung, Noted, Paced, Recalled, Resumed, Woke
from ddpnb.state import RunState, fold, new_state

from .messages_for_tests import finished, folded, metrics, output, progress, raised


def falling(num_points: int, *, spike_at: int | None = None) -> list[float]:
    values = [2.0 / (1 + step / 50) for step in range(num_points)]
    if spike_at is not None:
        values[spike_at] = 77.0
    return values


def svg_of(state: RunState) -> str:
    return svg(curve(state, "loss", STROKES))


def heights(picture: str, css_class: str) -> list[float]:
    """The y of every point in the paths of a class."""
    paths = re.findall(rf'<path class="{css_class}[^"]*" d="([^"]*)"', picture)
    return [float(y) for path in paths for y in re.findall(r"[ML ][\d.]+ ([\d.]+)", path)]


# ---- the words


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (0.23, "0.230"),
        (2.5, "2.50"),
        (99.95, "100"),
        (1234.5, "1,234"),
        (1e-7, "1.00e-7"),
        (1e9, "1.00e9"),
        (nan, "nan"),
        (-inf, "-inf"),
    ],
)
def test_a_number_has_three_digits(value: float, expected: str) -> None:
    assert words.number(value) == expected


def test_durations_and_rates_read_like_a_clock_and_a_speedometer() -> None:
    assert [words.duration(seconds) for seconds in (0.9, 75, 3723)] == ["0:00", "1:15", "1:02:03"]
    assert [words.rate(speed, "step") for speed in (0.4, 5.25, 1840)] == ["2.50 s/step", "5.2 steps/s", "1,840 steps/s"]


def test_nested_loops_are_told_from_the_outside_in() -> None:
    state = folded(
        1, [progress(0, 0, 1, 5, "epoch"), progress(0, 1, 90, 180, "step"), metrics(0, "loss", falling(100))]
    )

    assert summary.fraction(state) == pytest.approx(1.5 / 5)
    assert summary.facts(state, 14.0) == ["epoch 2/5", "step 270/900", "100 steps/s", "0:14 elapsed", "0:32 left"]


def test_a_run_that_hangs_has_no_speed_and_no_time_left() -> None:
    loops = [progress(0, 0, 1, 5, "epoch"), progress(0, 1, 90, 180, "step")]
    state = folded(1, [*loops, metrics(0, "loss", falling(100)), Hung(time=9.0, silence=12.0)])

    assert ("no steps", "0:14 elapsed") == (summary.status(state), summary.facts(state, 14.0)[-1])
    assert "/s" not in " ".join(summary.facts(state, 14.0))


def test_a_loop_never_passes_its_end() -> None:
    state = folded(1, [progress(0, 0, 5, 5, "epoch"), progress(0, 1, 180, 180, "step")])

    assert summary.fraction(state) == 1.0
    assert summary.facts(state, 1.0)[:2] == ["epoch 5/5", "step 900/900"]


@pytest.mark.parametrize(("first", "last", "made"), [(0, 59, 60), (1, 60, 60), (60, 99, 100)])
def test_steps_made_are_counted_as_a_checkpoint_does(first: int, last: int, made: int) -> None:
    logged = metrics(0, "loss", falling(last - first + 1), first_step=first)

    ended = folded(1, [logged, progress(0, 0, 5, 5, "epoch"), *finished(1)])

    assert ["epoch 5/5", f"step {made}"] == summary.facts(ended, 36.0)[:2]


def test_a_resumed_run_counts_the_steps_of_the_run_before() -> None:
    resumed = Resumed(time=0.0, rank=0, path="/runs/x", step=60, epoch=2)
    loops = [progress(0, 0, 2, 5, "epoch"), progress(0, 1, 10, 90, "step")]  # on fewer ranks than before

    state = folded(1, [resumed, *loops, metrics(0, "loss", falling(10), first_step=60)])

    assert ["epoch 3/5", "step 70"] == summary.facts(state, 1.0)[:2]


def test_a_loop_without_a_length_has_no_bar() -> None:
    state = folded(1, [progress(0, 0, 7, None, "batch")])

    assert summary.fraction(state) is None
    assert summary.facts(state, 1.0) == ["batch 7", "0:01 elapsed"]
    assert 'role="progressbar"' not in draw.card(state, 1.0)


def test_an_empty_loop_is_drawn() -> None:
    state = folded(1, [progress(0, 0, 0, 0, "epoch"), *finished(1)])

    assert "epoch 0/0" in draw.card(state, 1.0)


def test_the_newest_lines_of_all_ranks_share_the_room() -> None:
    flood = output(0, "".join(f"line {number}\n" for number in range(100)))
    state = folded(3, [flood, output(2, "one word\n")])

    assert summary.last_lines(state, 4).lines == ((0, "line 97"), (0, "line 98"), (0, "line 99"), (2, "one word"))


def test_ranks_without_room_are_counted() -> None:
    state = folded(64, [output(rank, "hello\n") for rank in range(64)])

    last = summary.last_lines(state, 8)

    assert [rank for rank, _ in last.lines] == list(range(8))
    assert last.hidden_ranks == 56
    assert "and 59 more ranks" in draw.card(state, 1.0)


def test_a_traceback_is_shown_once_in_the_report_and_not_among_the_lines() -> None:
    failure = raised(1)

    state = folded(2, [output(1, "epoch 3\n" + failure.traceback), failure])

    assert ((1, "epoch 3"),) == summary.last_lines(state, 8).lines
    assert 1 == draw.card(state, 5.0).count("Traceback (most recent call last)")


def test_a_run_that_was_told_to_stop_and_kept_its_value_says_so() -> None:
    state = folded(2, [Asked(time=1.0, how="stop"), *finished(2)])

    assert "stopped early, value kept" == summary.status(state)


def test_a_slow_start_is_explained() -> None:
    state = new_state("train", 2, backend="gloo", started=0.0)

    assert "the first launch of a kernel loads PyTorch" not in draw.card(state, 0.2)
    assert "the first launch of a kernel loads PyTorch" in draw.card(state, 3.0)


def test_what_steers_a_terminal_is_taken_out_of_a_line() -> None:
    assert summary.clean("\x1b[31mred\x1b[0m\x07 \x1b]0;title\x07x\ty") == "red x   y"
    assert len(summary.clean("x" * 1000)) < 200


# ---- the palette


def contrast(one: str, other: str) -> float:
    """Source: WCAG 2.2, "contrast ratio"."""

    def luminance(colour: str) -> float:
        channels = [int(colour[begin : begin + 2], 16) / 255 for begin in (1, 3, 5)]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_every_rank_can_be_read_on_its_page() -> None:
    assert all(contrast(colour, "#ffffff") >= 4.5 for colour in LIGHT)
    assert all(contrast(colour, "#1e1e1e") >= 4.5 for colour in DARK)


def test_thirty_ranks_look_different() -> None:
    assert all(one != other for one, other in combinations(map(look, range(30)), 2))
    assert look(1_000_003).light in LIGHT


# ---- the curve


def test_the_loss_is_the_curve_whatever_was_logged_first() -> None:
    first = [metrics(0, "accuracy", [0.1])]

    assert curves.main_name(folded(1, [*first, metrics(0, "train_loss", [1.0]), metrics(0, "loss", [1.0])])) == "loss"
    assert curves.main_name(folded(1, [*first, metrics(0, "train_loss", [1.0])])) == "train_loss"
    assert curves.main_name(folded(1, first)) == "accuracy"
    assert curves.main_name(folded(1)) is None


@pytest.mark.parametrize("spike_at", [0, 5_000, 99_999])
def test_a_spike_survives_any_number_of_points(spike_at: int) -> None:
    state = folded(2, [metrics(0, "loss", falling(100_000, spike_at=spike_at)), metrics(1, "loss", falling(100_000))])
    drawn = curve(state, "loss", STROKES)

    assert len(drawn.lines[0].strokes) <= STROKES
    assert max(height for part in drawn.lines[0].parts for _, height in curves.corners(part)) == 77.0
    assert max(line.get_ydata().max() for line in figure(state).axes[0].lines) == 77.0


def test_a_spike_survives_in_the_band_of_many_ranks() -> None:
    state = folded(
        64, [metrics(rank, "loss", falling(1000, spike_at=500 if rank == 40 else None)) for rank in range(64)]
    )

    band = curve(state, "loss", STROKES).band

    assert band
    assert max(high for _, _, high in band.edges) == 77.0
    assert "rank 40" not in svg_of(state)  # it ends where the others do


def test_the_card_does_not_grow_with_the_number_of_points() -> None:
    def num_bytes(num_points: int) -> int:
        values = [(step * 7919 % 1000) / 1000 for step in range(num_points)]
        return len(draw.card(folded(4, [metrics(rank, "loss", values) for rank in range(4)]), 1.0).encode())

    assert num_bytes(1000) < 30_000
    assert num_bytes(1_000_000) < 1.1 * num_bytes(1000)


def test_the_card_does_not_grow_with_the_number_of_ranks() -> None:
    state = folded(64, [metrics(rank, "loss", falling(1000)) for rank in range(64)])

    assert len(draw.card(state, 1.0).encode()) < 20_000


def test_the_mean_is_drawn_where_every_rank_has_a_value() -> None:
    state = folded(2, [metrics(0, "loss", [1.0] * 10), metrics(1, "loss", [3.0] * 6, first_step=2)])

    assert curve(state, "loss", STROKES).mean == tuple((float(step), 2.0) for step in range(2, 8))


def test_ranks_that_never_meet_have_no_mean_line() -> None:
    state = folded(2, [metrics(0, "loss", [1.0, 1.0]), metrics(1, "loss", [3.0, 3.0], first_step=100)])

    assert curve(state, "loss", STROKES).mean == ()
    assert "mean" not in svg_of(state)


def test_values_that_are_not_finite_leave_a_gap_and_are_said() -> None:
    state = folded(2, [metrics(0, "loss", [1.0, nan, inf, 2.0]), metrics(1, "loss", [1.0, 1.0, 1.0, 1.0])])
    drawn = curve(state, "loss", STROKES)

    assert [len(part) for part in drawn.lines[0].parts] == [1, 1]
    assert "loss: 2 values are not finite (rank 0)" in draw.card(state, 1.0)
    assert "2 values are not finite" in figure(state).axes[0].get_title(loc="left")
    assert not re.search(r'[dxy]="[^"]*(nan|inf)', svg_of(state))


def test_a_run_of_nothing_but_nan_has_no_axes() -> None:
    state = folded(2, [metrics(rank, "loss", [nan, nan]) for rank in range(2)])

    card = draw.card(state, 1.0)

    assert "<svg" not in card
    assert "4 values are not finite (ranks 0, 1)" in card
    assert figure(state).axes == []
    assert "4 values are not finite" in draw.text_card(state, 1.0)


@pytest.mark.parametrize("value", [0.0, -3.0, 1e300, -1e308, 5e-324, 1e-12])
def test_a_constant_of_any_size_is_drawn(value: float) -> None:
    state = folded(2, [metrics(rank, "loss", [value] * 3) for rank in range(2)])

    ElementTree.fromstring(svg_of(state))
    assert png(state)
    assert draw.text_card(state, 1.0)


def test_values_of_all_sizes_are_drawn_together() -> None:
    state = folded(1, [metrics(0, "loss", [1e308, -1e308, 1e308, 0.0])])

    assert not re.search("nan|inf", svg_of(state))
    assert png(state)


def test_one_value_is_a_dot() -> None:
    assert "<circle" in svg_of(folded(1, [metrics(0, "loss", [0.5])]))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.03, 2.41, [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]),
        (0.0, 0.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-1.0, 1.0, [-1.0, -0.5, 0.0, 0.5, 1.0]),
        (0.1, 0.3, [0.1, 0.15, 0.2, 0.25, 0.3]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, 5) == pytest.approx(expected)


@pytest.mark.parametrize("wanted", [[100.0] * 9, [0.0, 200.0], [199.0, 198.0, 50.0], [0.0, 1.0, 2.0, 199.0]])
def test_labels_stay_apart_in_order_and_inside(wanted: list[float]) -> None:
    placed = spread(wanted, 14.0, 0.0, 200.0)

    assert all(later - earlier >= 14.0 - 1e-9 for earlier, later in pairwise(sorted(placed)))
    assert min(placed) >= 0.0
    assert max(placed) <= 200.0
    assert sorted(wanted) == [at for _, at in sorted(zip(placed, wanted, strict=True))]


def test_labels_with_room_stay_where_they_want_to_be() -> None:
    assert spread([150.0, 20.0, 80.0], 14.0, 0.0, 200.0) == [150.0, 20.0, 80.0]


def test_equal_ends_have_labels_apart() -> None:
    picture = svg_of(folded(8, [metrics(rank, "loss", falling(50)) for rank in range(8)]))

    found = [float(y) for y in re.findall(r'y="([\d.]+)">(?:rank \d|mean) ', picture)]

    assert len(found) == 9
    assert all(later - earlier >= 13.9 for earlier, later in pairwise(sorted(found)))


def test_the_picture_says_in_words_what_it_shows() -> None:
    root = ElementTree.fromstring(svg_of(folded(2, [metrics(0, "loss", [3.0, 1.0]), metrics(1, "loss", [3.0, 2.0])])))
    name = "{http://www.w3.org/2000/svg}"

    assert root.get("role") == "img"
    assert root.findtext(f"{name}title") == "loss of 2 ranks"
    assert root.findtext(f"{name}desc") == (
        "rank 0 1.00, rank 1 2.00, mean 1.50 at step 1; from step 0 on between 1.00 and 3.00"
    )


# ---- through a lens


def looked_at(state: RunState, lens: Lens) -> curves.Curve:
    return curve(state, "loss", STROKES, lens)


def test_logarithms_leave_out_what_has_none_and_say_so() -> None:
    shown = looked_at(folded(1, [metrics(0, "loss", [1.0, 0.0, -2.0, 0.1])]), Lens(log=True))

    assert [[stroke.mean for stroke in part] for part in shown.lines[0].parts] == [[1.0], [0.1]]
    assert "values of 0 and below have no logarithm" == shown.trouble
    assert not re.search("nan|inf", svg(shown))


def test_where_nothing_has_a_logarithm_the_axis_is_linear_and_it_is_said() -> None:
    state = folded(2, [metrics(rank, "loss", [0.0, -1.0]) for rank in range(2)])

    shown = looked_at(state, Lens(log=True))

    assert not shown.lens.log
    assert "no value is above 0" in draw.card(state, 1.0, Aspect(lens=Lens(log=True)))
    assert png(state, lens=Lens(log=True))


@pytest.mark.parametrize("values", [[1e-300, 1e300], [1e-12, 3.0], [0.5], [2.0, 2.0], [nan, 1.0], [5e-324]])
def test_logarithms_of_any_size_are_drawn(values: list[float]) -> None:
    state, lens = folded(2, [metrics(rank, "loss", values) for rank in range(2)]), Lens(log=True, smoothing=0.9)

    assert not re.search(r'[dxy]="[^"]*(nan|inf)', svg(looked_at(state, lens)))
    assert png(state, lens=lens)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.3, 2.0, [0.2, 0.5, 1.0, 2.0]), (1e-3, 1e2, [1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0]), (1.0, 1.0, [0.5, 1.0, 2.0])],
)
def test_ticks_of_logarithms_are_round_and_enclose_the_values(low: float, high: float, expected: list[float]) -> None:
    assert curves.log_ticks(low, high, 5) == pytest.approx(expected)


def test_smoothing_is_the_running_mean_of_the_textbook() -> None:
    shown = looked_at(folded(1, [metrics(0, "loss", [1.0, 0.0, 0.0])]), Lens(smoothing=0.5))

    assert [value for _, value in shown.lines[0].trend[0]] == pytest.approx([1.0, 1 / 3, 1 / 7])
    assert svg(shown).count('class="f ') == 1


def test_smoothing_goes_on_over_a_gap() -> None:
    shown = looked_at(folded(1, [metrics(0, "loss", [1.0, nan, 0.0])]), Lens(smoothing=0.5))

    assert [len(part) for part in shown.lines[0].trend] == [1, 1]
    assert shown.lines[0].trend[1][0][1] == pytest.approx(1 / 3)


def test_along_seconds_a_curve_begins_at_the_launch() -> None:
    shown = looked_at(folded(1, [metrics(0, "loss", [1.0, 0.5], first_step=300, seconds=0.5)]), Lens(by_time=True))

    assert shown.span == (150.0, 150.5)


def test_what_goes_on_is_joined_to_the_run_before_along_seconds_too() -> None:
    before = metrics(0, "loss", [3.0, 2.0])
    times = array("d", [-2.0, -1.0]).tobytes()
    recalled = Recalled(time=0.0, rank=0, name="loss", steps=before.steps, values=before.values, times=times)
    resumed = Resumed(time=0.0, rank=0, path="/runs/x", step=2, epoch=0)
    state = folded(1, [recalled, resumed, metrics(0, "loss", [1.0], first_step=2, seconds=0.5)])

    by_step, by_time = looked_at(state, Lens()), looked_at(state, Lens(by_time=True))

    assert [len(part) for part in by_step.lines[0].parts] == [3]
    assert by_time.span == (0.0, 3.0)
    assert [("resumed", 2)] == [(mark.text, mark.place) for mark in by_step.marks]
    assert [("resumed", 2.0)] == [(mark.text, mark.place) for mark in by_time.marks]


def test_what_measures_the_same_on_other_data_is_drawn_beside_it() -> None:
    names = ("loss", "val_loss", "test/loss", "accuracy", "val_accuracy")
    state = folded(2, [metrics(rank, name, [1.0, 0.5]) for rank in range(2) for name in names])

    shown = looked_at(state, Lens())

    assert ["val_loss", "test/loss"] == [other.name for other in shown.companions]
    assert ["val_accuracy"] == [other.name for other in curve(state, "accuracy", STROKES).companions]
    assert {"loss", "accuracy", "val_accuracy"} == {
        axes.get_title(loc="left").split()[0] for axes in figure(state).axes
    }


def test_a_name_of_nothing_but_a_split_is_a_kind_of_its_own() -> None:
    state = folded(1, [metrics(0, name, [1.0]) for name in ("test", "val", "loss")])

    assert () == curve(state, "test", STROKES).companions


def test_epochs_begin_at_the_first_step_logged_in_them() -> None:
    logged = metrics(0, "loss", falling(100), seconds=1.0)
    epochs = [
        replace(progress(0, 0, done, 3, "epoch"), began=began) for done, began in ((0, -1.0), (1, 39.5), (2, 98.9))
    ]

    state = folded(1, [logged, *epochs, progress(0, 0, 3, 3, "epoch")])

    assert [(1, 0), (2, 40), (3, 99)] == [(epoch.number, epoch.step) for epoch in state.epochs]
    assert ["epoch 1", "epoch 2", "epoch 3"] == [mark.text for mark in looked_at(state, Lens()).marks]


def test_of_very_many_epochs_some_are_marked_and_not_all_kept() -> None:
    logged = [metrics(0, "loss", falling(5000), seconds=1.0)]
    epochs = [replace(progress(0, 0, done, 5000, "epoch"), began=float(done)) for done in range(5000)]

    state = folded(1, logged + epochs)

    assert len(state.epochs) <= 1000
    assert 2 <= len(looked_at(state, Lens()).marks) <= 24


def test_epochs_are_marked_up_to_the_last_though_not_all_are_known() -> None:
    logged = metrics(0, "loss", falling(600), seconds=1.0)
    known = [1, 3, 4, 6, 9, 11, 13, *range(15, 60, 2)]
    epochs = [replace(progress(0, 0, number - 1, 60, "epoch"), began=10.0 * number - 10) for number in known]

    numbers = [int(mark.text.split()[1]) for mark in looked_at(folded(1, [logged, *epochs]), Lens()).marks]

    assert [1, 6, 11, 15, 21, 25, 31, 35, 41, 45, 51, 55] == numbers


def test_the_epoch_that_goes_on_begins_where_the_run_was_resumed() -> None:
    resumed = Resumed(time=0.0, rank=0, path="/runs/x", step=200, epoch=18)
    counted_up, epoch = (replace(progress(0, 0, done, 60, "epoch"), began=1.0) for done in (17, 18))

    state = folded(1, [resumed, counted_up, epoch, metrics(0, "loss", [1.0] * 30, first_step=200)])

    assert [(19, 200)] == [(epoch.number, epoch.step) for epoch in state.epochs]


def test_a_changed_setting_is_marked_where_it_counts() -> None:
    applied = Applied(rank=0, time=30.0, name="lr", before=0.1, value=0.05, step=60)
    state = folded(1, [metrics(0, "loss", falling(100), seconds=0.5), applied])

    assert [("lr 0.1 → 0.05", 60)] == [(mark.text, mark.place) for mark in looked_at(state, Lens()).marks]
    assert [30.0] == [mark.place for mark in looked_at(state, Lens(by_time=True)).marks]
    assert "lr 0.1 → 0.05" in svg(looked_at(state, Lens()))
    assert "lr 0.1 → 0.05" in [text.get_text() for text in figure(state).axes[0].texts]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_setting_keeps_its_value_up_to_the_next_and_the_last_up_to_the_end(num_ranks: int) -> None:
    rates = [metrics(rank, "lr", [value], first_step=step) for rank in range(num_ranks) for step, value in
             ((0, 0.3), (50, 0.1))]  # fmt: skip
    state = folded(num_ranks, [*(metrics(rank, "loss", falling(100)) for rank in range(num_ranks)), *rates])

    shown = curve(state, "lr", STROKES)

    stairs = [(0, 0.3), (50, 0.3), (50, 0.1), (99, 0.1)]
    assert stairs == [(place, pytest.approx(value)) for place, value in curves.corners(shown.lines[0].parts[0])]
    assert (stairs if num_ranks > 1 else []) == [(place, pytest.approx(value)) for place, value in shown.mean]
    assert ["loss", "lr"] == [axes.get_title(loc="left").split()[0] for axes in figure(state).axes]


def test_a_setting_that_never_changed_has_no_panel_in_the_figure() -> None:
    state = folded(1, [metrics(0, "loss", falling(100)), metrics(0, "lr", [0.1])])

    assert ["loss"] == [axes.get_title(loc="left") for axes in figure(state).axes]
    assert (0, 99) == curve(state, "lr", STROKES).span


def test_marks_without_room_have_no_words() -> None:
    crowd = [Mark(float(place), "epoch 1", "epoch") for place in range(10)]

    sides = [side for _, side in written(crowd, lambda place: 10 * place, letter=5.0, right=95.0)]

    assert ["right", None, None, None, None, "right", None, None, None, None] == sides


# ---- the tabs


def paced(rank: int, *, data: float = 0.01, wait: float | None = 0.02, num_steps: int = 50) -> Paced:
    return Paced(
        time=1.0, rank=rank, num_steps=num_steps, step=0.1, data=data, wait=wait, samples=640.0, memory=212_000_000
    )


def test_a_rank_s_step_is_cut_into_its_parts() -> None:
    state = folded(2, [paced(0), paced(1)])

    page = draw.card(state, 1.0, Aspect(tab="ranks"))

    assert 2 == page.count('aria-label="data 10.0 ms, compute 70.0 ms, waiting for others 20.0 ms"')
    assert "1,280 samples/s" in " ".join(summary.facts(state, 1.0))
    assert "212 MB" in page


def test_the_slowest_rank_is_named_beside_its_bar() -> None:
    state = folded(2, [metrics(0, "loss", [1.0, 0.5]), paced(0, wait=0.06), paced(1, data=0.06, wait=0.0)])

    assert "slowest: data loading" in draw.card(state, 1.0)


def test_many_ranks_have_their_table_in_a_tab_alone_and_the_slowest_in_words() -> None:
    many = [paced(rank, wait=0.0 if rank == 7 else 0.06, data=0.06 if rank == 7 else 0.01) for rank in range(16)]
    state = folded(16, [metrics(rank, "loss", falling(10)) for rank in range(16)] + many)

    assert "<table" not in draw.card(state, 1.0)
    assert "rank 7 is the slowest: data loading" in draw.card(state, 1.0)
    assert 17 == draw.card(state, 1.0, Aspect(tab="ranks")).count("<tr>")


def test_ranks_that_have_timed_no_step_are_in_the_table_all_the_same() -> None:
    page = draw.card(folded(2, [paced(0, num_steps=0)]), 1.0, Aspect(tab="ranks"))

    assert "no step was timed yet" in page
    assert 3 == page.count("<tr>")


def test_a_search_shows_the_lines_that_match_and_counts_them() -> None:
    state = folded(2, [output(0, "epoch 1\nEPOCH 2\nother\n"), output(1, "epoch 3\n")])

    page = draw.card(state, 1.0, Aspect(tab="output", search="epoch"))
    one = draw.card(state, 1.0, Aspect(tab="output", search="epoch", rank=1))

    assert "3 lines with “epoch”" in page
    assert "EPOCH 2" in page
    assert "other" not in page
    assert "1 line with “epoch”" in one


def test_the_output_of_200_mb_is_bounded_on_the_page_and_in_the_download() -> None:
    flood = "x" * 99 + "\n"
    state = folded(2, [output(rank, flood * 10_000) for _ in range(100) for rank in range(2)])

    page, link = draw.card(state, 1.0, Aspect(tab="output")), download(state, None)

    assert len(page) < 10_000
    assert "earlier characters are no longer here" in page
    assert len(link) < 6_000_000


def test_a_download_is_the_text_itself() -> None:
    link = download(folded(2, [output(1, "a < b\n")], name="../a b"), 1)

    [data] = re.findall(r'href="data:text/plain;charset=utf-8;base64,([^"]*)"', link)
    assert "a < b\n" == b64decode(data).decode()
    assert 'download=".._a_b-rank-1.txt"' in link


def test_what_was_changed_is_listed_in_the_settings() -> None:
    applied = Applied(rank=0, time=30.0, name="lr", before=None, value=0.05, step=60)

    assert "lr → 0.05 from step 60 on" in draw.card(folded(1, [applied]), 1.0, Aspect(tab="settings"))
    assert "no setting is known" in draw.card(folded(1), 1.0, Aspect(tab="settings"))


def test_a_hang_is_told_while_it_lasts() -> None:
    stacked = Aspect(stacks="rank 0\n  in the loop")
    hanging = folded(2, [Hung(time=1.0, silence=12.0)])

    assert "no step for 12 s" in draw.card(hanging, 1.0)
    assert "in the loop" in draw.card(hanging, 1.0, stacked)
    assert "no step for" not in draw.card(fold(hanging, Woke(time=2.0)), 3.0, stacked)


# ---- the card


def test_what_a_user_wrote_is_never_markup() -> None:
    evil = "<script>alert(1)</script>&\"'"
    messages = [metrics(0, evil, [1.0, 2.0]), output(0, evil + "\n"), Noted(time=0.0, text=evil), raised(0, evil)]
    state = folded(1, [*messages, progress(0, 0, 1, 2, evil), Ended(time=2.0, problem=None)], name=evil)

    state = fold(state, Applied(rank=0, time=1.0, name=evil, before=evil, value=evil, step=1))
    looks = [Aspect(tab=tab, search=evil, said=evil, stacks=evil) for tab in get_args(Tab)]
    cards = [draw.card(state, 1.0, aspect) for aspect in (*looks, replace(looks[2], search="script"))]
    for page in (*cards, draw.last_page(state, b"png"), draw.trouble(evil, evil), download(state, None)):
        assert "<script" not in page
        ElementTree.fromstring(f"<page>{page}</page>")


@pytest.mark.filterwarnings("ignore:Glyph")  # pytest's filters replace ours
@pytest.mark.parametrize(
    "odd", ["\ud800", "x" * 1_000_000, "\0\x1b[31m", "损失"], ids=["half a pair", "long", "control", "Chinese"]
)
def test_no_text_of_a_user_is_more_than_a_page_can_have(odd: str) -> None:
    messages = [metrics(0, odd, [1.0, nan]), output(0, odd + "\n"), Noted(time=0.0, text=odd), raised(0, odd)]
    messages += [progress(0, 0, 1, 2, odd), Applied(rank=0, time=1.0, name=odd, before=odd, value=odd, step=1)]
    running = folded(1, [*messages[:3], *messages[4:]], name=odd)
    ended = fold(folded(1, messages, name=odd), Ended(time=2.0, problem=None))

    for state in (running, ended):
        cards = [draw.card(state, 1.0, Aspect(tab=tab, search=odd, said=odd, stacks=odd)) for tab in get_args(Tab)]
        for page in (*cards, draw.last_page(state, b"png"), draw.trouble("run", odd[:100])):
            assert len(page.encode()) < 120_000
        assert len(draw.text_card(state, 1.0)) + len(draw.line(state, 1.0)) + len(draw.label(odd, 1)) < 60_000
        with warnings.catch_warnings(record=True) as warned:
            assert png(state)
        assert not warned


def test_a_name_with_mathematics_in_it_is_drawn_as_it_is() -> None:
    assert png(folded(1, [metrics(0, "$\\frac{", [1.0, 2.0]), output(0, "$\\frac{\n")], name="$\\frac{"))


def test_before_the_first_value_the_card_says_how_to_log_one() -> None:
    assert "ddpnb.log(loss=…)" in draw.card(folded(2), 1.0)
    assert "starting 2 workers" in draw.card(new_state("train", 2, backend="gloo", started=0.0), 1.0)


def test_a_run_that_logged_nothing_ends_without_axes() -> None:
    state = folded(2, finished(2))

    assert "<svg" not in draw.card(state, 99.0)
    assert "ddpnb.log" not in draw.card(state, 99.0)
    assert figure(state).axes == []


def test_the_clock_stops_at_the_end() -> None:
    state = folded(2, finished(2, at=36.0))

    assert draw.card(state, 36.0) == draw.card(state, 99.0)
    assert "0:36" in draw.card(state, 99.0)


def test_a_failure_is_shown_with_its_rank_and_report() -> None:
    state = folded(2, [raised(1, "bad shape"), Ended(time=2.0, problem=None)])

    for page in (draw.card(state, 3.0), draw.text_card(state, 3.0)):
        assert "failed on rank 1" in page
        assert "ValueError: bad shape" in page
    assert "bad shape" in " ".join(text.get_text() for text in figure(state).texts)


def test_a_run_that_could_not_begin_says_why() -> None:
    state = fold(new_state("train", 2, backend="gloo", started=0.0), Ended(time=1.0, problem="the server died"))

    assert "the server died" in draw.card(state, 1.0)
    assert png(state)


def test_the_last_page_of_a_failed_run_has_its_picture_in_words_too_and_its_report() -> None:
    state = folded(2, [metrics(0, "loss", [1.0, 0.25]), raised(1, "bad shape"), Ended(time=2.0, problem=None)])

    page = draw.last_page(state, b"png")

    assert 'alt="train, failed on rank 1: loss 0.250"' in page
    assert "ValueError: bad shape" in page


def test_every_theme_has_its_colours() -> None:
    assert '[data-jp-theme-light="false"] .ddpnb' in draw.STYLE
    assert "body.vscode-dark .ddpnb" in draw.STYLE
    assert all(colour in draw.STYLE for colour in LIGHT + DARK)


# ---- text and figure


def test_the_label_is_the_same_at_every_moment() -> None:
    assert draw.label("train", 2) == "<ddpnb run 'train': 2 ranks>"
    assert draw.label("train", 1) == "<ddpnb run 'train': 1 rank>"


def test_the_text_card_shows_bar_curve_and_output() -> None:
    messages = [metrics(rank, "loss", falling(340)) for rank in range(2)]
    state = folded(2, [*messages, progress(0, 0, 1, 4, "epoch"), output(1, "hello\n")])

    head, bar, spark, last = draw.text_card(state, 14.0).splitlines()

    assert head == "● train  running · 2 ranks · gloo · cpu"
    assert bar.startswith("█" * 10 + "░" * 30 + "  epoch 1/4")
    assert spark.startswith("█")
    assert last == "1│ hello"


def test_the_saved_picture_is_small_and_sharp() -> None:
    messages = [metrics(rank, name, falling(5000)) for rank in range(4) for name in ("loss", "accuracy", "lr")]

    picture = png(folded(4, messages + finished(4)))

    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 60_000
    assert display_metadata(picture) == {"needs_background": "light", "width": 760, "height": 310}


def test_other_values_have_small_panels_unless_logged_once() -> None:
    messages = [metrics(0, name, [1.0, 2.0]) for name in ("loss", "a", "b", "c", "d")] + [metrics(0, "once", [1.0])]

    titles = [axes.get_title(loc="left") for axes in figure(folded(1, messages)).axes]

    assert [title.split()[0] for title in titles] == ["loss", "c", "b", "a"]
    assert len(figure(folded(1, [metrics(0, "loss", [1.0, 2.0]), metrics(0, "once", [1.0])])).axes) == 1


def test_what_was_noted_stands_below_the_curves_which_keep_their_size() -> None:
    said = [metrics(0, "loss", [2.0, 1.0, 0.5]), *finished(1)]
    bare = figure(folded(1, said))

    noted = figure(folded(1, [*said, Noted(time=1.0, text="resumed with other arguments: lr 0.1 → 0.2")]))

    sizes = [[axes.get_window_extent().size.tolist() for axes in drawn.axes] for drawn in (bare, noted)]
    assert sizes[0] == [pytest.approx(size) for size in sizes[1]]
    assert noted.get_size_inches()[1] > bare.get_size_inches()[1]
    assert "note: resumed with other arguments: lr 0.1 → 0.2" in [text.get_text() for text in noted.texts]
