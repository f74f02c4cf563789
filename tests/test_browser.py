"""What a user sees: a real JupyterLab, real clicks, in Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.lab import CHROMIUM, Lab, command, running_lab, save

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(240),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium on the path"),
]

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
SCREENSHOTS = os.environ.get("DDPNB_SCREENSHOTS")
"""A folder to keep pictures in, to be looked at."""

SLOW = """
%load_ext ddpnb
import ddpnb, time

def train(steps):
    for step in ddpnb.progress(range(steps), "step"):
        time.sleep(0.05)
        ddpnb.log(loss=1 / (step + 1 + ddpnb.rank()))
        if ddpnb.should_stop():
            return step
    return "all of them"
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("lab")) as running:
        yield running


def curve(page: Page) -> str:
    """The live curve's strokes, as drawn now; empty where there is none."""
    return str(
        page.evaluate(
            """() => [...document.querySelectorAll('.ddpnb svg path, .ddpnb svg polyline')]
                .map(stroke => stroke.getAttribute('d') ?? stroke.getAttribute('points')).join()"""
        )
    )


def wait_for_another_curve(page: Page, before: str) -> str:
    page.wait_for_function(
        """before => {
            const strokes = [...document.querySelectorAll('.ddpnb svg path, .ddpnb svg polyline')]
                .map(stroke => stroke.getAttribute('d') ?? stroke.getAttribute('points')).join();
            return strokes && strokes !== before;
        }""",
        arg=before,
        timeout=60_000,
    )
    return curve(page)


def card(page: Page) -> Locator:
    """The card on the page."""
    return page.locator(".widget-vbox.ddpnb")


def picture(page: Page, name: str) -> None:
    if SCREENSHOTS:
        # At once, by the page itself: what is drawn is another element half a second later.
        page.evaluate("() => document.querySelector('.ddpnb svg, .jp-OutputArea-output img')?.scrollIntoView()")
        page.screenshot(path=f"{SCREENSHOTS}/{name}.png")


def test_the_first_notebook_s_curves_move_while_it_trains(lab: Lab) -> None:
    path = lab.folder / "01_first_run.ipynb"
    shutil.copy(NOTEBOOKS / path.name, path)
    page = lab.open(path.name)
    command(page, "notebook:run-all-cells")

    first = wait_for_another_curve(page, "")
    picture(page, "first_run_early")
    second = wait_for_another_curve(page, first)
    picture(page, "first_run_later")
    expect(page.get_by_text("rank 1 raised ValueError in Cell In[9], line 5").last).to_be_visible(timeout=60_000)
    saved = save(page, path)
    picture(page, "first_run_end")
    page.close()

    assert first != second
    launched = saved.cells[8].outputs[0].data
    assert "<ddpnb run 'train': 2 ranks>" == launched["text/plain"]
    assert "image/png" in launched
    assert "widgets" not in saved.metadata


def test_the_interrupt_button_stops_a_waiting_cell_and_its_workers(lab: Lab) -> None:
    path = lab.write("interrupt.ipynb", SLOW, "run = ddpnb.launch(train, 10_000, nproc_per_node=2)", "run.result()")
    page = lab.open(path.name)
    command(page, "notebook:run-all-cells")
    wait_for_another_curve(page, "")

    command(page, "notebook:interrupt-kernel")

    expect(page.get_by_text("KeyboardInterrupt").first).to_be_visible(timeout=20_000)
    expect(page.locator(".jp-OutputArea-output img").first).to_be_attached(timeout=20_000)  # the final figure
    picture(page, "interrupted")
    page.close()


def test_a_reloaded_page_shows_the_run_live_again(lab: Lab) -> None:
    path = lab.write("reload.ipynb", SLOW, "run = ddpnb.launch(train, 10_000, nproc_per_node=2)", "run.stop()")
    page = lab.open(path.name)
    for _ in range(2):
        command(page, "notebook:run-cell-and-select-next")
    wait_for_another_curve(page, "")
    save(page, path)

    page.reload()

    before = wait_for_another_curve(page, "")
    wait_for_another_curve(page, before)
    picture(page, "reloaded")
    card(page).get_by_role("button", name="Stop", exact=True).click()
    expect(card(page).get_by_role("status")).to_have_text("stopped early, value kept", timeout=20_000)
    expect(card(page).get_by_role("button", name="Pause")).to_have_count(0)  # nothing to be asked any more
    page.close()


CUT_OFF = """() => {
    const card = document.querySelector('.widget-vbox.ddpnb'), head = card.querySelector('.head');
    const within = part => part.getBoundingClientRect().right <= card.getBoundingClientRect().right;
    const parts = [...card.querySelectorAll('button, select')].filter(part => part.offsetParent);
    const tabs = [...card.querySelectorAll('.ddpnb-tabs button')];
    const rows = new Set(tabs.map(tab => tab.getBoundingClientRect().top));
    return [head.scrollWidth > head.clientWidth, parts.filter(part => !within(part)).length, rows.size];
}"""
"""Whether words of the head are cut off, how many buttons and selectors are, and in how many rows the tabs stand."""


@pytest.mark.parametrize("width", [1100, 640])
def test_nothing_of_a_card_is_cut_off_on_a_wide_page_nor_on_a_narrow_one(lab: Lab, width: int) -> None:
    path = lab.write(f"width_{width}.ipynb", SLOW, "run = ddpnb.launch(train, 10_000, nproc_per_node=2)", "run.stop()")
    page = lab.open(path.name)
    for _ in range(2):
        command(page, "notebook:run-cell-and-select-next")
    wait_for_another_curve(page, "")

    page.set_viewport_size({"width": width, "height": 1000})
    wait_for_another_curve(page, curve(page))
    found = page.evaluate(CUT_OFF)
    picture(page, f"width_{width}")
    command(page, "notebook:run-cell-and-select-next")
    expect(page.locator(".ddpnb")).to_have_count(0, timeout=20_000)
    page.close()

    assert [False, 0, 1] == found


HOSTILE = """
EVIL = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>"

def hostile(steps):
    print(EVIL)
    ddpnb.setting(EVIL, EVIL)
    for step in ddpnb.progress(range(steps), EVIL):
        time.sleep(0.05)
        ddpnb.log({EVIL: 1 / (step + 1), "loss": 1 / (step + 1 + ddpnb.rank())})
        if ddpnb.should_stop():
            raise ValueError(EVIL)
"""


def test_a_card_is_driven_by_keys_and_nothing_of_the_user_s_becomes_markup(lab: Lab) -> None:
    launch = "run = ddpnb.launch(hostile, 10_000, nproc_per_node=2, name=EVIL)"
    path = lab.write("hostile.ipynb", SLOW + HOSTILE, launch)
    page = lab.open(path.name)
    command(page, "notebook:run-all-cells")
    wait_for_another_curve(page, "")

    for tab, expected in (("Ranks", "samples/s"), ("Output", "<img src=x"), ("Settings", "<img src=x")):
        card(page).get_by_role("button", name=tab, exact=True).focus()
        page.keyboard.press("Enter")
        expect(card(page).get_by_role("tabpanel", name=tab.lower())).to_be_attached()
        expect(card(page).get_by_text(expected).first).to_be_visible()
        picture(page, f"tab_{tab.lower()}")
    card(page).get_by_role("button", name="Curves", exact=True).click()
    names = card(page).get_by_title("the value that is drawn")
    names.select_option(label=names.locator("option").all_inner_texts()[0])
    card(page).get_by_title("linear axis, or one of logarithms").select_option("log")
    wait_for_another_curve(page, curve(page))
    card(page).get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator(".jp-OutputArea-output").get_by_text("raised ValueError").first).to_be_visible(timeout=20_000)
    expect(page.locator(".ddpnb")).to_have_count(0)  # the page of a failed run has no widget
    saved = save(page, path)
    picture(page, "failed")
    hacked = page.evaluate("() => window.hacked")
    page.close()

    assert hacked is None
    assert {"image/png", "text/html", "text/plain"} == set(saved.cells[1].outputs[0].data)
