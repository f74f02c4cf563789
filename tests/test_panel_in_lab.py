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


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("lab")) as running:
        yield running


def open_panel(lab: Lab, name: str, *cells: str) -> Page:
    """A page whose first cell has shown the panel."""
    lab.write(name, LEARN, *cells)
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


def step(page: Page) -> int:
    """The step that the card shows, of those before and of this epoch."""
    found = re.search(r"epoch (\d+)/\d+ · step (\d+)/(\d+)", page.locator(".ddpnb").first.inner_text())
    assert found is not None
    epoch, done, all_of_it = map(int, found.groups())
    return (epoch - 1) * all_of_it + done


def test_a_run_is_chosen_by_keyboard_started_steered_stopped_and_resumed(lab: Lab) -> None:
    page = open_panel(lab, "keys.ipynb", "print('was at', panel.run.result())")
    card = page.locator(".ddpnb").first

    slider(page, "world size").press("ArrowRight")
    expected = "ddpnb.launch(learn, epochs=5, batch_size=8, lr=0.01, clip_norm=None, nproc_per_node=2, run_dir='runs')"
    expect(line(page)).to_have_text(expected)
    slider(page, "lr").press("ArrowRight")
    expect(line(page)).to_contain_text("lr=0.011,")
    slider(page, "epochs").press("End")
    expect(line(page)).to_contain_text("epochs=100,")
    expect(page.get_by_text("2 CPU workers · 1 thread each · global batch 16")).to_be_visible()
    expect(button(page, "Resume")).to_be_disabled()
    picture(page, "panel_chosen")

    button(page, "Start").press("Enter")

    expect(button(page, "Start")).to_be_disabled()
    first = wait_for_another_curve(page, "")
    wait_for_another_curve(page, first)
    expect(card).to_contain_text("2 ranks")
    picture(page, "panel_running")

    button(page, "Pause").press("Enter")

    expect(button(page, "Unpause")).to_be_visible()
    held = step(page)
    page.wait_for_timeout(1500)  # thirty steps, if any were made
    assert held == step(page)
    picture(page, "panel_paused")

    button(page, "Unpause").press("Enter")
    slider(page, "lr").press("ArrowRight")

    expect(page.get_by_text("lr: a change counts at once; all else for the next start")).to_be_visible()
    expect(card).to_contain_text("lr 0.011 → 0.013", timeout=20_000)
    picture(page, "panel_steered")

    button(page, "Stop").press("Enter")

    expect(button(page, "Resume step")).to_be_enabled(timeout=60_000)
    stopped_at = int(button(page, "Resume step").inner_text().split()[-1])
    run_cell(page, 1)
    expect(page.get_by_text(f"was at {stopped_at}")).to_be_visible()
    assert stopped_at > held

    button(page, "Resume step").press("Enter")

    expect(button(page, "Start")).to_be_disabled()
    expect(card).to_contain_text(f"resumed from step {stopped_at}", timeout=60_000)
    picture(page, "panel_resumed")
    button(page, "Stop").click()
    expect(button(page, "Start")).to_be_enabled(timeout=60_000)
    page.close()


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


def test_a_run_is_stopped_from_a_page_that_was_reloaded_in_its_midst(lab: Lab) -> None:
    page = open_panel(lab, "reload.ipynb")
    slider(page, "epochs").press("End")
    button(page, "Start").click()
    wait_for_another_curve(page, "")
    save(page, lab.folder / "reload.ipynb")

    page.reload()

    before = wait_for_another_curve(page, "")
    wait_for_another_curve(page, before)
    button(page, "Stop").click()
    expect(button(page, "Resume step")).to_be_enabled(timeout=60_000)
    picture(page, "panel_reloaded")
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
