"""The process group of a worker, without its worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from ddpnb.group import _ALL_CREATED, Group, is_echo
from ddpnb.world import World


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    yield
    assert not dist.is_initialized()


def test_a_rank_closes_its_group_only_when_all_have_made_theirs() -> None:
    # Gloo connects from both sides: a rank that leaves early fails one that is still at it.
    store = dist.HashStore()
    group = Group(World(rank=1, world_size=2), store, timeout=30.0)
    group._backend = "gloo"
    closing = threading.Thread(target=group.close)

    closing.start()
    closing.join(0.3)
    waited = closing.is_alive()
    store.set(_ALL_CREATED, "")
    closing.join(10)

    assert waited
    assert not closing.is_alive()


def test_the_last_rank_to_make_its_group_lets_all_go(loopback: None) -> None:
    store = dist.HashStore()
    group = Group(World(), store, timeout=30.0)

    group.create("gloo", torch.device("cpu"))

    assert store.check([_ALL_CREATED])
    group.close()


def test_init_process_group_is_given_back(loopback: None) -> None:
    own = dist.init_process_group
    group = Group(World(), dist.HashStore(), timeout=30.0)
    taken = dist.init_process_group

    group.close()

    assert taken is not own
    assert own is dist.init_process_group is dist.distributed_c10d.init_process_group


def test_a_second_group_of_another_backend_is_an_error_that_says_what_to_do(loopback: None) -> None:
    group = Group(World(), dist.HashStore(), timeout=30.0)
    group.create("gloo", torch.device("cpu"))
    try:
        with pytest.raises(ValueError, match="twice") as caught:
            dist.init_process_group("nccl")
    finally:
        group.close()

    assert "launch with backend=None" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"), True),
        (dist.DistNetworkError("The client socket has failed to connect"), True),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ConnectionResetError("connection reset by peer"), False),
        (ValueError("gloo: connection closed by peer"), False),
    ],
)
def test_an_echo_comes_from_torch_distributed_and_speaks_of_a_peer(error: Exception, expected: bool) -> None:
    assert expected == is_echo(error)


def test_an_echo_that_the_function_wrapped_is_one_still() -> None:
    wrapped = ValueError("training failed")
    wrapped.__cause__ = dist.DistNetworkError("connection closed by peer")

    assert is_echo(wrapped)
