"""The panel as a user has it: a real JupyterLab, real keys and clicks, in Chromium."""

from __future__ import annotations

import json
from collections.abc import Iterator

import ipykernel
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.lab import CHROMIUM, Lab, command, running_lab, save
from tests.test_browser import picture, wait_for_another_curve

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


def test_a_run_is_chosen_by_keyboard_started_stopped_and_resumed(lab: Lab) -> None:
    page = open_panel(lab, "keys.ipynb", "panel.run.stop()", "print('was at', panel.run.result())")

    slider(page, "world size").press("ArrowRight")
    expect(line(page)).to_have_text(
        "ddpnb.launch(learn, epochs=5, batch_size=8, lr=0.01, clip_norm=None, nproc_per_node=2, run_dir='runs')"
    )
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
    expect(page.locator(".ddpnb").first).to_contain_text("2 ranks")
    picture(page, "panel_running")

    for number in (1, 2):
        run_cell(page, number)

    expect(button(page, "Resume step")).to_be_enabled(timeout=60_000)
    step = int(button(page, "Resume step").inner_text().split()[-1])
    expect(page.get_by_text(f"was at {step}")).to_be_visible()

    button(page, "Resume step").click()

    expect(button(page, "Start")).to_be_disabled()
    expect(page.locator(".ddpnb").first).to_contain_text(f"resumed from step {step}", timeout=60_000)
    picture(page, "panel_resumed")
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


def test_a_reloaded_page_has_the_panel_alive_and_one_without_kernel_has_the_figure(lab: Lab) -> None:
    page = open_panel(lab, "reload.ipynb", "panel.run.stop()")
    path = lab.folder / "reload.ipynb"
    slider(page, "epochs").press("End")
    button(page, "Start").click()
    wait_for_another_curve(page, "")
    save(page, path)

    page.reload()

    before = wait_for_another_curve(page, "")
    wait_for_another_curve(page, before)
    run_cell(page, 1)
    expect(button(page, "Resume step")).to_be_enabled(timeout=60_000)
    page.close()

    # Widgets that a reloaded page has not seen made are not in its document: a new panel is, and its figure.
    page = open_panel(lab, "reopened.ipynb", "panel.start().result()")
    run_cell(page, 1)
    expect(page.locator(".jp-OutputArea-output[data-mime-type='image/png']")).to_have_count(1, timeout=60_000)
    expect(page.locator(".jp-OutputArea-output[data-mime-type='image/png']")).to_be_hidden()
    saved = save(page, lab.folder / "reopened.ipynb")
    command(page, "kernelmenu:shutdown")
    page.close()
    page = lab.open("reopened.ipynb")

    expect(page.locator(".jp-OutputArea-output[data-mime-type='image/png']")).to_be_visible(timeout=60_000)
    expect(page.get_by_text("Error displaying widget: model not found")).to_be_hidden()
    expect(page.get_by_text("Error displaying widget: model not found")).to_have_count(1, timeout=60_000)
    picture(page, "panel_without_kernel")
    page.close()
    assert "widgets" not in saved.metadata
    assert json.dumps(saved).count("image/png") >= 1


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
