"""Where one process stands among all: ranks, nodes and the address they meet at.

torchrun tells it by environment variables; a ddpnb worker is told the same and sets the same variables, so that code
written for torchrun runs unchanged.

Runs in: both
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
            "TORCHELASTIC_RUN_ID": "ddpnb",
            # The store at MASTER_PORT is up already: a function's own env:// rendezvous joins it and opens no port.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> World:
        """Read torchrun's variables; what is missing is as in a world of one process."""
        rank, world_size = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
        return cls(
            rank=rank,
            local_rank=int(environment.get("LOCAL_RANK", rank)),
            world_size=world_size,
            local_world_size=int(environment.get("LOCAL_WORLD_SIZE", world_size)),
            node_rank=int(environment.get("GROUP_RANK", 0)),
            nnodes=int(environment.get("GROUP_WORLD_SIZE", 1)),
            master_addr=environment.get("MASTER_ADDR", "127.0.0.1"),
            master_port=int(environment.get("MASTER_PORT", 0)),
        )
