"""Distributed PyTorch training from a notebook.

    import ddpnb

    run = ddpnb.launch(train, epochs=3, nproc_per_node=2)   # workers start, the cell returns, the curves move
    weights = run.result()                                  # rank 0's value, or the error of the rank that failed

Importing this package is light: neither torch nor matplotlib is imported before something is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .context import device as device
    from .context import is_rank_zero as is_rank_zero
    from .context import local_rank as local_rank
    from .context import local_world_size as local_world_size
    from .context import log as log
    from .context import node_rank as node_rank
    from .context import progress as progress
    from .context import rank as rank
    from .context import setting as setting
    from .context import should_stop as should_stop
    from .context import world_size as world_size
    from .diagnosis import doctor as doctor
    from .errors import CheckpointError as CheckpointError
    from .errors import LaunchError as LaunchError
    from .errors import RunKilled as RunKilled
    from .errors import RunStopped as RunStopped
    from .errors import UnpicklableError as UnpicklableError
    from .errors import WorkerError as WorkerError
    from .notebook.live import show as show
    from .notebook.panel import Panel as Panel
    from .roster import runs as runs
    from .run import Launcher as Launcher
    from .run import Run as Run
    from .run import launch as launch
    from .run import open_run as open_run
    from .server import prestart as prestart
    from .train.accumulation import accumulate as accumulate
    from .train.batchnorm import SyncBatchNorm as SyncBatchNorm
    from .train.batchnorm import convert_sync_batchnorm as convert_sync_batchnorm
    from .train.checkpoint import load_checkpoint as load_checkpoint
    from .train.checkpoint import save_checkpoint as save_checkpoint
    from .train.checks import TrainingWarning as TrainingWarning
    from .train.loading import Loader as Loader
    from .train.loading import loader as loader
    from .train.loop import Loop as Loop
    from .train.reduction import gather as gather
    from .train.reduction import mean as mean
    from .train.reduction import total as total
    from .train.seeding import seed_everything as seed_everything
    from .train.wrapping import load_state_dict as load_state_dict
    from .train.wrapping import state_dict as state_dict
    from .train.wrapping import unwrap as unwrap
    from .train.wrapping import wrap as wrap

__version__ = "0.1.0"

_HOMES = {
    "context": (
        "device",
        "is_rank_zero",
        "local_rank",
        "local_world_size",
        "log",
        "node_rank",
        "progress",
        "rank",
        "setting",
        "should_stop",
        "world_size",
    ),
    "diagnosis": ("doctor",),
    "errors": ("CheckpointError", "LaunchError", "RunKilled", "RunStopped", "UnpicklableError", "WorkerError"),
    "notebook.live": ("show",),
    "notebook.panel": ("Panel",),
    "roster": ("runs",),
    "run": ("Launcher", "Run", "launch", "open_run"),
    "server": ("prestart",),
    "train.accumulation": ("accumulate",),
    "train.batchnorm": (
        "SyncBatchNorm",
        "convert_sync_batchnorm",
    ),
    "train.checkpoint": ("load_checkpoint", "save_checkpoint"),
    "train.checks": ("TrainingWarning",),
    "train.loading": (
        "Loader",
        "loader",
    ),
    "train.loop": ("Loop",),
    "train.reduction": (
        "gather",
        "mean",
        "total",
    ),
    "train.seeding": ("seed_everything",),
    "train.wrapping": (
        "load_state_dict",
        "state_dict",
        "unwrap",
        "wrap",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ddpnb' has no attribute {name!r}")
    module = importlib.import_module(f".{_HOME_OF[name]}", __name__)
    if _HOME_OF[name] == "run":
        _join_view(module)
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _join_view(run: Any) -> None:
    """Show each new run in the notebook: the one place where launching and viewing meet."""
    live = importlib.import_module(".notebook.live", __name__)
    if live.attach not in run.on_launch:
        run.on_launch.append(live.attach)


def load_ipython_extension(ipython: object) -> None:
    """`%load_ext ddpnb`: start the worker server in the background, so that the first launch takes no time."""
    importlib.import_module(".server", __name__).prestart()
    __getattr__("launch")  # a tenth of a second of imports, which the first launch need not wait for
