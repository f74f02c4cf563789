"""One story: a run is chosen by keyboard, watched, held, steered, stopped, resumed, stopped from a reloaded page."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.lab import CHROMIUM, Lab, command, running_lab, save
from tests.test_browser import picture, wait_for_another_curve
from tests.test_panel_in_lab import button, line, slider

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium on the path"),
]

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


def run_cell(page: Page, number: int) -> None:
    page.evaluate(f"() => {{ window.jupyterapp.shell.currentWidget.content.activeCellIndex = {number} }}")
    command(page, "notebook:run-cell")


def test_a_run_is_chosen_watched_held_steered_stopped_resumed_and_stopped_from_a_reloaded_page(lab: Lab) -> None:
    path = lab.write("story.ipynb", DIGITS, WHILE_PAUSED, AFTERWARDS)
    page = lab.open(path.name)
    run_cell(page, 0)
    expect(page.locator(".ddpnb-panel")).to_be_visible(timeout=60_000)

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
