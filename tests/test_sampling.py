"""Which sample comes when, by values: no processes, a sampler is told its rank."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from ddpnb.train.sampling import GlobalBatchSampler, Place, Request, epoch_order, generators_kept, seed_generators

BATCH = 3
LENGTHS = range(1, 41)


def epoch_of(
    world_size: int, length: int, place: Place, batch_size: int = BATCH, **options: bool
) -> list[list[Request]]:
    """What each rank is to load, by rank."""
    return [
        list(GlobalBatchSampler(length, batch_size, rank=rank, world_size=world_size, place=place, **options))
        for rank in range(world_size)
    ]


def counted(request: Request) -> list[int]:
    """The samples that count."""
    return request.indices[: request.size]


def joined(ranks: list[list[Request]]) -> list[list[int]]:
    """The samples of each global batch, in the order in which they were dealt."""
    batches = []
    for requests in zip(*ranks, strict=True):
        hands = [counted(request) for request in requests]
        batches.append([hand[turn] for turn in range(len(hands[0])) for hand in hands if turn < len(hand)])
    return batches


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_every_epoch_is_exactly_the_dataset(world_size: int, shuffle: bool) -> None:
    for length in LENGTHS:
        for epoch in range(3):
            ranks = epoch_of(world_size, length, Place(0, epoch), shuffle=shuffle)
            seen = chain.from_iterable(joined(ranks))

            assert list(range(length)) == sorted(seen), (length, epoch)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_the_kth_batches_of_all_ranks_are_the_kth_of_one_process(world_size: int, shuffle: bool) -> None:
    for length in LENGTHS:
        place = Place(7, 2)
        ranks = epoch_of(world_size, length, place, shuffle=shuffle)
        (alone,) = epoch_of(1, length, place, batch_size=world_size * BATCH, shuffle=shuffle)

        assert [request.indices for request in alone] == joined(ranks), length
        assert all([r.stop for r in requests] == [r.stop for r in alone] for requests in ranks), length


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_ranks_have_equally_many_batches_and_their_shares_differ_by_one_at_most(world_size: int) -> None:
    for length in LENGTHS:
        ranks = epoch_of(world_size, length, Place(0))
        sizes = [[request.size for request in requests] for requests in zip(*ranks, strict=True)]

        assert {len(GlobalBatchSampler(length, BATCH, world_size=world_size, place=Place(0)))} == set(map(len, ranks))
        assert all(max(shares) - min(shares) <= 1 for shares in sizes), length
        assert all(shares == [BATCH] * world_size for shares in sizes[:-1]), length


def test_a_rank_without_samples_is_given_one_of_the_batch_for_its_shape() -> None:
    _, (last,) = epoch_of(2, 1, Place(0))

    assert Request(seed=0, epoch=0, indices=[0], size=0, stop=1) == last


def test_two_epochs_differ_and_the_same_one_does_not() -> None:
    first, again, second = (list(epoch_order(40, 0, epoch)) for epoch in (0, 0, 1))

    assert first == again
    assert first != second


def test_no_epoch_of_one_seed_is_an_epoch_of_another() -> None:
    orders = {tuple(epoch_order(40, seed, epoch)) for seed in range(-5, 15) for epoch in range(20)}

    assert 20 * 20 == len(orders)


def test_an_order_is_the_same_on_every_machine() -> None:
    assert [9, 3, 0, 6, 8, 2, 4, 1, 5, 7] == epoch_order(10, 0, 1).tolist()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_rest_of_an_epoch_is_dealt_out_to_any_number_of_ranks(world_size: int, shuffle: bool) -> None:
    for length in (1, 11, 24, 40):
        place = Place(3, 1)
        (alone,) = epoch_of(1, length, place, batch_size=1, shuffle=shuffle)
        order = [request.indices[0] for request in alone]
        for stop in [0, *(request.stop for request in epoch_of(world_size, length, place, shuffle=shuffle)[0])]:
            for other in (1, 2, 3, 5):
                rest = joined(epoch_of(other, length, replace(place, samples=stop), shuffle=shuffle))

                assert order[stop:] == list(chain.from_iterable(rest)), (length, stop, other)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_padding_is_that_of_torch(world_size: int) -> None:
    for length in LENGTHS:
        indices = range(length)
        expected = [
            list(BatchSampler(DistributedSampler(indices, world_size, rank, shuffle=False), BATCH, drop_last=False))
            for rank in range(world_size)
        ]

        ranks = epoch_of(world_size, length, Place(0), pad=True)

        assert expected == [[counted(request) for request in requests] for requests in ranks], length


def test_padding_begins_the_shuffled_order_anew() -> None:
    order = epoch_order(5, 0, 0).tolist()

    assert [[*order, order[0]]] == joined(epoch_of(2, 5, Place(0), pad=True, shuffle=True))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_drop_last_leaves_out_what_fills_no_global_batch(world_size: int) -> None:
    for length in LENGTHS:
        full = length // (world_size * BATCH)
        whole = joined(epoch_of(world_size, length, Place(0), shuffle=True))

        assert whole[:full] == joined(epoch_of(world_size, length, Place(0), shuffle=True, drop_last=True)), length


@pytest.mark.parametrize("options", [{}, {"pad": True}, {"drop_last": True}])
def test_an_epoch_is_over_after_its_last_batch_and_not_before(options: dict[str, bool]) -> None:
    for length in range(6, 41):
        sampler = GlobalBatchSampler(length, BATCH, world_size=2, place=Place(0), **options)
        *before, last = [request.stop for request in sampler]

        assert not any(map(sampler.is_over, [0, *before])), length
        assert sampler.is_over(last), length


# ---- random numbers


def draws() -> list[float]:
    """Of each generator; three normal ones, of which NumPy, Python and torch keep a second half in store."""
    return [
        *(random.gauss(0, 1) for _ in range(3)),
        *np.random.standard_normal(3),
        *torch.randn(3, dtype=torch.float64).tolist(),
    ]


def test_the_same_numbers_seed_the_same_draws() -> None:
    with generators_kept():
        first, second, again = (seed_generators(0, 1, index) or draws() for index in (5, 6, 5))

    assert first == again
    assert not set(first) & set(second)


def test_a_seed_does_not_depend_on_what_was_drawn_before() -> None:
    with generators_kept():
        seed_generators(0, 1, 2)
        expected = draws()
        random.gauss(0, 1), np.random.standard_normal(), torch.randn(1)
        seed_generators(0, 1, 2)

        assert expected == draws()


def test_generators_go_on_as_if_nothing_had_been_drawn() -> None:
    with generators_kept():
        seed_generators(1)
        draws()
        expected = draws()

        seed_generators(1)
        draws()
        with generators_kept():
            seed_generators(2)

        assert expected == draws()


def fail_after_seeding() -> None:
    with generators_kept():
        seed_generators(2)
        raise KeyError


def test_an_exception_leaves_the_generators_as_they_were() -> None:
    with generators_kept():
        seed_generators(1)
        expected = draws()

        seed_generators(1)
        with pytest.raises(KeyError):
            fail_after_seeding()

        assert expected == draws()
