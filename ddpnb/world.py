"""Where one process stands among all: ranks, nodes and the address they meet at.

torchrun tells it by environment variables; a ddpnb worker is told the same and sets the same variables, so that code
written for torchrun runs unchanged.

Runs in: both
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
"""Name of the interface that leads nowhere but to this machine."""

_RUN_ID = "ddpnb"
"""What a worker of ours finds in TORCHELASTIC_RUN_ID; torchrun's workers find another word there."""
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One process's place. Words and meanings are torchrun's."""

    rank: int = 0
    """Global rank, 0 … world_size - 1."""
    local_rank: int = 0
    """Rank among the processes of this node, 0 … local_world_size - 1."""
    world_size: int = 1
    """Number of processes on all nodes."""
    local_world_size: int = 1
    """Number of processes on this node."""
    node_rank: int = 0
    """This node's number, 0 … nnodes - 1."""
    nnodes: int = 1
    """Number of nodes."""
    master_addr: str = "127.0.0.1"
    """Address that rank 0's store listens on."""
    master_port: int = 0
    """Port of that store; 0 where there is none."""

    def environment(self) -> dict[str, str]:
        """The variables that torchrun sets for its workers.

        Source: torch/distributed/elastic/agent/server/local_elastic_agent.py, `LocalElasticAgent._start_workers`.
        """
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.nnodes),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": _RUN_ID,
            # The store at MASTER_PORT is up already: a function's own env:// rendezvous joins it and opens no port.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> World:
        """Read torchrun's variables; what is missing is as in a world of one process."""

        def number(name: str, default: int) -> int:
            try:
                return int(environment.get(name, default))
            except ValueError:
                raise ValueError(f"{name}={environment[name]!r} in the environment is no number") from None

        rank, world_size = number("RANK", 0), number("WORLD_SIZE", 1)
        return cls(
            rank=rank,
            local_rank=number("LOCAL_RANK", rank),
            world_size=world_size,
            local_world_size=number("LOCAL_WORLD_SIZE", world_size),
            node_rank=number("GROUP_RANK", 0),
            nnodes=number("GROUP_WORLD_SIZE", 1),
            master_addr=environment.get("MASTER_ADDR", "127.0.0.1"),
            master_port=number("MASTER_PORT", 0),
        )


def is_worker() -> bool:
    """Whether this process is a worker of ours, or was started by one."""
    return os.environ.get("TORCHELASTIC_RUN_ID") == _RUN_ID


def is_under_torchrun() -> bool:
    """Whether torchrun, or another launcher that sets the variables of `env://`, has made this process a rank.

    In a notebook's kernel such variables have strayed in from wherever Jupyter was started: they are ignored, and it is
    said once.

    Source: `torch.distributed.is_torchelastic_launched` and torch/distributed/rendezvous.py, `_env_rendezvous_handler`.
    """
    is_told = "TORCHELASTIC_RUN_ID" in os.environ or all(name in os.environ for name in _RENDEZVOUS)
    if not is_told or is_worker():
        return False
    if ipython_kernel() is not None:
        _note_strays()
        return False
    return True


@functools.cache
def _note_strays() -> None:
    found = ", ".join(name for name in ("TORCHELASTIC_RUN_ID", *_RENDEZVOUS) if name in os.environ)
    print(f"ddpnb: a notebook's kernel is no rank of torchrun's: {found} in its environment: ignored", file=sys.stderr)


def ipython_kernel() -> Any:
    """The kernel that this process is; None where it is none. Where IPython was never imported, none runs."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None)
