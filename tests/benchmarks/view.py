"""What the live view costs the kernel, and how long after `log()` a value is on the page.

    python -m tests.benchmarks.view                      # both tables, about 4 minutes
    python -m tests.benchmarks.view --quick --only lag

Run it from the repository's root. The cost is measured in a real ipykernel, with and without the view, while 4 ranks
have logged a thousand points each, and a million. The lag is measured on a page of a real JupyterLab in Chromium: its
clock and the worker's are the machine's.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from bisect import bisect_left
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from tests.benchmarks.bench import COLUMNS, BenchKernel, Report, Sample, duration, main, percent, sources
from tests.benchmarks.stream import COUNTING, RUNNING, Watched, show_watched, watch
from tests.lab import command, running_lab

if TYPE_CHECKING:
    # What a cell has by that name.
    import ddpnb


# ---- the kernel


def log_on(num_points: int) -> None:
    """Log that many points at once, and then twenty a second until told."""
    import random
    import time

    for _ in range(num_points):
        ddpnb.log(loss=random.random())
    while not ddpnb.should_stop():
        ddpnb.log(loss=random.random())
        time.sleep(0.05)


_LOGGED = """
while sum(series.num_points > {num_points} for series in run.state.history.get("loss", {{}}).values()) < 4:
    time.sleep(0.1)
time.sleep(3)
"""


def cost(report: Report, options: Namespace) -> None:
    """The kernel's share of a core, by the live view alone."""
    report.section("the kernel with a live view of 4 ranks")
    seconds = 6 if options.quick else 20
    rows: dict[str, Watched] = {}
    with BenchKernel(log_on, prepare=f"%load_ext ddpnb\n{COUNTING}") as kernel:
        for num_points in (1_000, 1_000_000):
            for view in (False, True):
                launch = f"run = ddpnb.launch(log_on, {num_points}, nproc_per_node=4, view={view})\n"
                kernel.do(launch + RUNNING + _LOGGED.format(num_points=num_points), timeout=300)
                rows[f"{num_points:,} points, {'view' if view else 'no view'}"] = watch(kernel, seconds)
                kernel.do("run.stop()\nrun.wait()", timeout=120)
    show_watched(report, f"The kernel, {seconds} s each", rows)
    for num_points in ("1,000", "1,000,000"):
        without, seen = rows[f"{num_points} points, no view"], rows[f"{num_points} points, view"]
        share = seen.share - without.share
        report.judge(f"the view's share of a core ≤ 2 %, {num_points} points", percent(share), share <= 0.02)
        rate = seen.widgets
        report.judge(f"≤ 2 widget messages a second, {num_points} points", f"{rate:.2f}/s", 0 < rate <= 2)


# ---- the page


def tell_the_time(seconds: float, per_second: float) -> list[float]:
    """Log a step at that rate; the wall clock's time at each of them."""
    import time

    began, times = time.time(), []
    while time.time() < began + seconds:
        times.append(time.time())
        ddpnb.log(loss=1 / len(times))
        time.sleep(1 / per_second)
    return times


# Notes when the card first says that it is at a step.
_OBSERVE = """() => {
    window.seen = [];
    const read = () => {
        const facts = document.querySelector('.ddpnb .facts')?.textContent ?? '';
        const step = /step ([\\d,]+)/.exec(facts);
        if (!step) return;
        const number = Number(step[1].replaceAll(',', ''));
        if (!window.seen.length || window.seen.at(-1)[0] < number) window.seen.push([number, Date.now() / 1000]);
    };
    new MutationObserver(read).observe(document.body, {subtree: true, childList: true, characterData: true});
}"""


def lag(report: Report, options: Namespace) -> None:
    """Seconds from `log()` until the page shows that step, or a later one."""
    report.section("from log() to the page")
    seconds = 10 if options.quick else 40
    cells = (
        f"%load_ext ddpnb\nimport ddpnb, json\n{sources(tell_the_time)}",
        f"run = ddpnb.launch(tell_the_time, {seconds}, 50.0, nproc_per_node=2, name='lag')",
        "open('times.json', 'w').write(json.dumps(run.result()))",
    )
    with tempfile.TemporaryDirectory() as work, running_lab(Path(work)) as lab:
        lab.write("lag.ipynb", *cells)
        page = lab.open("lag.ipynb")
        page.evaluate(_OBSERVE)
        command(page, "notebook:run-all-cells")
        page.wait_for_function(
            "() => window.jupyterapp.shell.currentWidget.content.widgets[2].model.executionCount",
            timeout=1000 * (seconds + 90),
        )
        page.wait_for_timeout(1000)
        seen = page.evaluate("() => window.seen")
        times = json.loads((lab.folder / "times.json").read_text())
    steps = [step for step, _ in seen]
    # The launch is over, and the last steps are shown by the figure.
    counted = range(min(100, len(times) // 4), steps[-1])
    lags = Sample(seen[bisect_left(steps, step)][1] - times[step] for step in counted)
    slow = sorted(lags)[ceil(0.95 * len(lags)) - 1]
    report.table("Lag", ("", *COLUMNS), [("every step", *lags.columns(duration))])
    gaps = Sample(later[1] - earlier[1] for earlier, later in pairwise(seen))
    report.note(f"drawn {len(seen)} times, {duration(gaps.median)} apart in the median")
    report.judge("the median lag ≤ 0.5 s", duration(lags.median), lags.median <= 0.5)
    report.judge("the lag of 95 % ≤ 1.0 s", duration(slow), slow <= 1.0)


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(__doc__, {"cost": cost, "lag": lag}))
