"""What "auto" means, on machines with and without GPUs: the device layer is faked, the choices are real."""

from __future__ import annotations

import functools

import pytest
import torch

from ddpnb import plan
from ddpnb.plan import Options, Plan, make_plan, settled_by_torchrun
from ddpnb.world import World


def train() -> None: ...


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Pretend to be a machine of so many GPUs and cores, and plan there."""

    def pretend(gpus: int, cores: int, **options: object) -> Plan:
        monkeypatch.setattr(plan, "num_gpus", lambda: gpus)
        monkeypatch.setattr(plan, "num_cores", lambda: cores)
        return make_plan(Options(**options), train)  # type: ignore[arg-type]

    return pretend


def test_auto_takes_every_gpu_and_nccl(machine) -> None:  # type: ignore[no-untyped-def]
    planned = machine(2, 16)

    assert (2, "nccl", ("cuda:0", "cuda:1"), 8) == (
        planned.local_world_size,
        planned.backend,
        planned.devices,
        planned.threads,
    )


def test_auto_takes_at_most_four_cpu_workers_and_gloo(machine) -> None:  # type: ignore[no-untyped-def]
    assert 4 == machine(0, 16).local_world_size
    assert 2 == machine(0, 2).local_world_size
    assert "gloo" == machine(0, 16).backend
    assert ("cpu",) * 4 == machine(0, 16).devices


def test_more_workers_than_gpus_compute_on_the_cpu(machine) -> None:  # type: ignore[no-untyped-def]
    planned = machine(1, 8, nproc_per_node=2)

    assert ("gloo", ("cpu", "cpu")) == (planned.backend, planned.devices)


def test_more_workers_than_gpus_are_refused_with_nccl(machine) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(
        ValueError, match="nproc_per_node=3 with backend='nccl' needs a GPU for each worker, and 2 GPUs"
    ):
        machine(2, 8, nproc_per_node=3, backend="nccl")


def test_gloo_on_a_machine_with_gpus_still_computes_on_them(machine) -> None:  # type: ignore[no-untyped-def]
    assert ("cuda:0", "cuda:1") == machine(2, 8, backend="gloo").devices


def test_threads_share_the_cores_and_never_fall_below_one(machine) -> None:  # type: ignore[no-untyped-def]
    assert 8 == machine(0, 16, nproc_per_node=2).threads
    assert 1 == machine(0, 2, nproc_per_node=8).threads
    assert 3 == machine(0, 2, threads_per_worker=3).threads


def test_fork_gives_each_worker_one_thread(machine) -> None:  # type: ignore[no-untyped-def]
    assert 1 == machine(0, 16, start_method="fork", threads_per_worker=8).threads


def test_fork_is_refused_once_the_kernel_has_used_cuda(machine, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    with pytest.raises(ValueError, match=r"CUDA is initialised in this kernel.*Leave start_method out"):
        machine(2, 8, start_method="fork")
    assert "forkserver" == machine(2, 8).start_method


def test_nodes_are_planned_as_they_were_asked_for(machine) -> None:  # type: ignore[no-untyped-def]
    planned = machine(0, 4, nproc_per_node=2, nnodes=3, node_rank=1, master_addr="10.0.0.1", master_port=4000)

    assert (2, 3, 1, "10.0.0.1", 4000) == (
        planned.local_world_size,
        planned.nnodes,
        planned.node_rank,
        planned.master_addr,
        planned.master_port,
    )
    assert None is machine(0, 4).master_addr


def test_what_torchrun_has_settled_is_planned(machine) -> None:  # type: ignore[no-untyped-def]
    place = World(rank=3, local_rank=1, world_size=4, local_world_size=2, node_rank=1, nnodes=2, master_port=4000)
    machine(0, 8)

    planned = make_plan(settled_by_torchrun(Options(nproc_per_node=4, start_method="fork"), place), train)

    assert (2, 1, "forkserver", None) == (
        planned.local_world_size,
        planned.nnodes,
        planned.start_method,
        planned.master_addr,
    )
    assert torch.get_num_threads() == planned.threads


def test_what_agrees_with_torchrun_is_no_reason_to_warn(machine, recwarn) -> None:  # type: ignore[no-untyped-def]
    place = World(world_size=2, local_world_size=2, nnodes=1, master_addr="10.0.0.1", master_port=4000)
    machine(0, 8)

    settled_by_torchrun(Options(nproc_per_node=2, master_addr="10.0.0.1", master_port=4000), place)

    assert not recwarn.list


def test_a_run_is_called_like_its_function(machine) -> None:  # type: ignore[no-untyped-def]
    assert "train" == machine(0, 2).name
    assert "digits" == machine(0, 2, name="digits").name
    assert "train" == make_plan(Options(nproc_per_node=1), functools.partial(train)).name
