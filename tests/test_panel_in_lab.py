"""The panel as a user has it: a real JupyterLab, real keys and clicks, in Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator

import ipykernel
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.lab import CHROMIUM, Lab, command, running_lab, save
from tests.test_browser import SCREENSHOTS, wait_for_another_curve

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(240),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium on the path"),
]

LEARN = """
%load_ext ddpnb
import ddpnb, time, torch

def learn(epochs=5, batch_size=8, lr=0.01, clip_norm=None):
    model = ddpnb.wrap(torch.nn.Linear(2, 1))
    data = torch.utils.data.TensorDataset(torch.ones(400, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loop = ddpnb.Loop(model, optimizer, ddpnb.loader(data, batch_size), epochs=epochs)
    for (x,) in loop:
        time.sleep(0.05)
        loop.update(model(x).square().mean() + ddpnb.rank())
    return loop.step

panel = ddpnb.Panel(learn, lr=(1e-3, 1.0), epochs=(1, 100), run_dir="runs", nproc_per_node=1)
panel
"""
DIGITS = """
%load_ext ddpnb
import ddpnb, time, torch
from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
digits = torch.utils.data.TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))

def train(epochs=3, batch_size=32, lr=0.05):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    model = ddpnb.wrap(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loader = ddpnb.loader(digits, batch_size, shuffle=True)
    loop = ddpnb.Loop(model, optimizer, loader, epochs=epochs)
    for inputs, targets in loop:
        time.sleep(0.03)  # digits are small
        loop.update(torch.nn.functional.cross_entropy(model(inputs), targets))
    return loop.step

panel = ddpnb.Panel(train, lr=(1e-3, 1.0), epochs=(1, 200), run_dir="runs", nproc_per_node=1)
panel
"""
WHILE_PAUSED = """
made = len(panel.run.history["loss"])
panel.run.wait(2)  # as long as sixty steps
print("steps made in the pause:", len(panel.run.history["loss"]) - made)
"""
AFTERWARDS = """
run = panel.run
steps = run.history.steps("loss").tolist()
print("resumed at", run.state.resumed.step, "without a gap:", steps == list(range(len(steps))))
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("lab")) as running:
        yield running


def open_panel(lab: Lab, name: str, *cells: str, panel: str = LEARN) -> Page:
    """A page whose first cell has shown the panel."""
    lab.write(name, panel, *cells)
    page = lab.open(name)
    command(page, "notebook:run-cell-and-select-next")
    expect(page.locator(".ddpnb-panel")).to_be_visible(timeout=60_000)
    return page


def run_cell(page: Page, number: int) -> None:
    """Run a cell, counted from 0: who has clicked on a widget has selected its cell."""
    page.evaluate(f"() => {{ window.jupyterapp.shell.currentWidget.content.activeCellIndex = {number} }}")
    command(page, "notebook:run-cell")


def slider(page: Page, name: str) -> Locator:
    """The handle of the slider with this name."""
    row = page.locator(".ddpnb-panel .widget-slider", has=page.get_by_text(name, exact=True))
    return row.get_by_role("slider")


def button(page: Page, name: str) -> Locator:
    return page.locator(".ddpnb-panel, .ddpnb").get_by_role("button", name=name)


def line(page: Page) -> Locator:
    return page.locator(".ddpnb-panel .line")


def picture(page: Page, name: str) -> None:
    """Keep a picture to be looked at, where that is wanted."""
    if SCREENSHOTS:
        page.locator(".jp-OutputArea-output:visible").first.scroll_into_view_if_needed()
        page.screenshot(path=f"{SCREENSHOTS}/{name}.png")


def head(page: Page) -> str:
    """What the card says of the run now."""
    return page.locator(".ddpnb").first.inner_text()


def steps_made(page: Page) -> int:
    """Steps in the history, as the card counts them over all epochs."""
    found = re.search(r"epoch (\d+)/\d+ · step (\d+)/(\d+)", head(page))
    assert found, head(page)
    epoch, step, per_epoch = map(int, found.groups())
    return (epoch - 1) * per_epoch + step


def wait_for_head(page: Page, pattern: str) -> None:
    expect(page.locator(".ddpnb").first).to_contain_text(re.compile(pattern), timeout=60_000)


def pixels(page: Page) -> bytes:
    """The curve as it is painted."""
    return page.locator(".ddpnb svg").first.screenshot()


def test_a_run_is_chosen_watched_held_steered_stopped_resumed_and_stopped_from_a_reloaded_page(lab: Lab) -> None:
    page = open_panel(lab, "story.ipynb", WHILE_PAUSED, AFTERWARDS, panel=DIGITS)

    # ---- chosen by keyboard
    slider(page, "world size").press("ArrowRight")
    slider(page, "lr").press("ArrowLeft")
    slider(page, "epochs").press("End")
    expect(line(page)).to_have_text(
        re.compile(r"ddpnb\.launch\(train, epochs=200, batch_size=32, lr=0\.04\d*, nproc_per_node=2, run_dir='runs'\)")
    )
    button(page, "Start").press("Enter")

    # ---- watched: two ranks' curves, in pixels
    wait_for_another_curve(page, "")
    expect(page.locator(".ddpnb svg path.r")).to_have_count(2, timeout=60_000)
    before = pixels(page)
    wait_for_another_curve(page, wait_for_another_curve(page, ""))
    assert before != pixels(page)

    # ---- held
    button(page, "Pause").press("Enter")
    expect(button(page, "Unpause")).to_be_visible(timeout=60_000)
    wait_for_head(page, "paused")
    held = steps_made(page)
    run_cell(page, 1)
    expect(page.get_by_text("steps made in the pause: 0")).to_be_visible(timeout=60_000)
    picture(page, "story_paused")
    assert held == steps_made(page)

    button(page, "Unpause").press("Enter")
    wait_for_another_curve(page, wait_for_another_curve(page, ""))
    assert held < steps_made(page)

    # ---- steered: another learning rate, and the mark where it changed
    page.locator(".ddpnb").get_by_text("Settings", exact=True).click()
    live = page.locator(".ddpnb .widget-slider", has=page.get_by_text("lr", exact=True)).get_by_role("slider")
    live.press("ArrowLeft")
    page.locator(".ddpnb").get_by_text("Curves", exact=True).click()
    mark = page.locator(".ddpnb svg text", has_text=re.compile(r"lr 0\.045\d* → 0\.0[34]"))
    expect(mark).to_be_visible(timeout=60_000)
    slider(page, "lr").press("ArrowRight")  # the panel's own control does the same
    wait_for_head(page, r"lr 0\.050")
    expect(page.get_by_text("lr: a change counts at once; all else for the next start")).to_be_visible()
    picture(page, "story_steered")

    page.locator(".ddpnb").get_by_text("Output", exact=True).click()
    expect(page.locator(".ddpnb .for-output select")).to_have_value("all ranks")
    page.locator(".ddpnb").get_by_text("Curves", exact=True).click()

    # ---- stopped with a checkpoint, resumed at the next step
    button(page, "Stop").press("Enter")
    expect(button(page, "Resume step")).to_be_enabled(timeout=60_000)
    saved_at = int(button(page, "Resume step").inner_text().split()[-1])
    button(page, "Resume step").press("Enter")
    wait_for_head(page, f"resumed from step {saved_at}")
    wait_for_another_curve(page, wait_for_another_curve(page, ""))
    picture(page, "story_resumed")

    # ---- saved, reloaded, and stopped from the reloaded page
    path = lab.folder / "story.ipynb"
    save(page, path)
    page.reload()
    wait_for_another_curve(page, wait_for_another_curve(page, ""))
    button(page, "Stop").click()
    expect(button(page, "Resume step")).to_be_enabled(timeout=60_000)
    run_cell(page, 2)
    expect(page.get_by_text(f"resumed at {saved_at} without a gap: True")).to_be_visible(timeout=60_000)
    picture(page, "story_end")
    notebook = save(page, path)
    page.close()

    assert "widgets" not in notebook.metadata


def test_what_is_typed_wrong_is_refused_beside_it(lab: Lab) -> None:
    page = open_panel(lab, "typed.ipynb")
    field = page.get_by_label("batch size")

    field.fill("abc")
    field.press("Enter")

    expect(page.get_by_text("'abc' is not a whole number", exact=True)).to_be_visible()
    expect(button(page, "Start")).to_be_disabled()
    picture(page, "panel_typed_wrong")

    field.fill("16")
    field.press("Tab")

    expect(page.get_by_text("'abc' is not a whole number", exact=True)).to_be_hidden()
    expect(button(page, "Start")).to_be_enabled()
    expect(line(page)).to_contain_text("batch_size=16")
    page.close()


def test_a_page_without_its_kernel_has_the_last_run_s_figure_and_no_dead_widget(lab: Lab) -> None:
    page = open_panel(lab, "reopened.ipynb")
    path = lab.folder / "reopened.ipynb"
    figure = page.locator(".jp-OutputArea-output[data-mime-type='image/png']")
    slider(page, "epochs").press("Home")
    button(page, "Start").click()
    expect(figure).to_have_count(1, timeout=60_000)
    expect(figure).to_be_hidden()  # the card has it
    saved = save(page, path)
    command(page, "kernelmenu:shutdown")
    page.close()

    page = lab.open(path.name)

    dead = page.get_by_text("Error displaying widget: model not found")
    expect(dead).to_have_count(1, timeout=60_000)
    expect(dead).to_be_hidden()
    expect(page.locator(".jp-OutputArea-output[data-mime-type='image/png']")).to_be_visible()
    picture(page, "panel_without_kernel")
    page.close()
    kinds = [sorted(output["data"]) for output in saved.cells[0].outputs]
    assert [
        ["application/vnd.jupyter.widget-view+json", "text/plain"],
        ["image/png", "text/plain"],
        ["text/html", "text/plain"],
    ] == kinds
    assert "widgets" not in saved.metadata


@pytest.mark.skipif(ipykernel.version_info < (7,), reason="ipykernel hears clicks after the cell")
def test_a_button_answers_while_a_cell_waits_for_the_run(lab: Lab) -> None:
    page = open_panel(lab, "waiting.ipynb", "print('was at', panel.start().result())")
    slider(page, "epochs").press("ArrowRight")
    run_cell(page, 1)
    wait_for_another_curve(page, "")

    slider(page, "lr").press("ArrowRight")

    expect(line(page)).to_contain_text("lr=0.011,")
    expect(page.get_by_text("was at")).to_have_count(1)  # in the code: the cell still waits
    expect(page.get_by_text("was at 300")).to_be_visible(timeout=60_000)
    page.close()
