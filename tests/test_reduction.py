"""Values of all ranks made one, and random streams of ranks, against plain arithmetic."""

from __future__ import annotations

import math
import random
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ddpnb
from ddpnb.train.reduction import gather, mean, total
from ddpnb.train.seeding import seed_everything

from .ranks import on_ranks

Pair = namedtuple("Pair", "first second")

sizes = pytest.mark.parametrize("world_size", [1, 2, 3])


def own_tensor(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """(2, 3), other values on each rank, not contiguous."""
    return (torch.arange(6, dtype=torch.float64).reshape(3, 2).T * (rank + 1)).to(dtype)


def own_values(rank: int) -> dict[str, Any]:
    """One of each kind that can be reduced."""
    return {
        "float": 0.5 + rank,
        "int": 10**17 + rank,
        "bool": rank == 0,
        "numpy": [np.float32(rank), np.int64(rank), np.bool_(True)],
        "tensor": (own_tensor(rank), own_tensor(rank, torch.float32), own_tensor(rank, torch.int32)),
        "scalar": torch.tensor(float(rank)),
        "empty": torch.zeros(0, 4),
        "pair": Pair(rank, {7: rank}),
        "nothing": [{}, (), []],
    }


def reduced(call: Callable[[Any], Any]) -> Any:
    return call(own_values(ddpnb.rank()))


def assert_same(expected: Any, actual: Any) -> None:
    """Equal in structure, types, dtypes, shapes and values."""
    assert type(expected) is type(actual), (expected, actual)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    elif isinstance(expected, dict):
        assert list(expected) == list(actual)
        for key in expected:
            assert_same(expected[key], actual[key])
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(actual)
        for ours, theirs in zip(expected, actual, strict=True):
            assert_same(ours, theirs)
    else:
        assert expected == actual or expected != expected


# ---- mean and total


@sizes
def test_a_total_is_the_sum_over_all_ranks(world_size: int) -> None:
    ranks = range(world_size)

    actual = on_ranks(world_size, reduced, total)

    expected = {
        "float": sum(0.5 + rank for rank in ranks),
        "int": sum(10**17 + rank for rank in ranks),
        "bool": 1,
        "numpy": [float(sum(ranks)), sum(ranks), world_size],
        "tensor": (
            sum(own_tensor(rank) for rank in ranks),
            sum(own_tensor(rank, torch.float32) for rank in ranks),
            sum(own_tensor(rank, torch.int32) for rank in ranks),
        ),
        "scalar": torch.tensor(float(sum(ranks))),
        "empty": torch.zeros(0, 4),
        "pair": Pair(sum(ranks), {7: sum(ranks)}),
        "nothing": [{}, (), []],
    }
    for value in actual:
        assert_same(expected, value)


@sizes
def test_a_mean_is_the_sum_divided_by_the_number_of_ranks(world_size: int) -> None:
    ranks = range(world_size)

    actual = on_ranks(world_size, reduced, mean)

    share = sum(ranks) / world_size
    integers = sum(own_tensor(rank) for rank in ranks) / world_size
    expected = {
        "float": 0.5 + share,
        "int": (world_size * 10**17 + sum(ranks)) / world_size,
        "bool": 1 / world_size,
        "numpy": [share, share, 1.0],
        "tensor": (integers, integers.float(), integers.to(torch.get_default_dtype())),
        "scalar": torch.tensor(share),
        "empty": torch.zeros(0, 4),
        "pair": Pair(share, {7: share}),
        "nothing": [{}, (), []],
    }
    for value in actual:
        assert_same(expected, value)


def random_total(seed: int) -> torch.Tensor:
    return total(torch.randn(1000, generator=torch.Generator().manual_seed(seed + ddpnb.rank())))


def test_all_ranks_get_the_same_bits() -> None:
    sums = on_ranks(3, random_total, 5)

    draws = [torch.randn(1000, generator=torch.Generator().manual_seed(5 + rank)) for rank in range(3)]
    torch.testing.assert_close(sums[0], torch.stack(draws).sum(0), rtol=0, atol=1e-6)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


def keys_in_another_order() -> dict[str, int]:
    return total({"a": 1, "b": 10} if ddpnb.rank() else {"b": 10, "a": 1})


def test_the_order_of_keys_does_not_matter_and_is_kept() -> None:
    first, second = on_ranks(2, keys_in_another_order)

    assert [("b", 20), ("a", 2)] == list(first.items())
    assert [("a", 2), ("b", 20)] == list(second.items())


def special_numbers() -> Any:
    odd = math.nan if ddpnb.rank() else 1.0
    return mean({"number": odd, "tensor": torch.tensor([odd, 2.0]), "infinite": math.inf})


def test_nan_and_infinity_pass_through() -> None:
    expected = {"number": math.nan, "tensor": torch.tensor([math.nan, 2.0]), "infinite": math.inf}

    for value in on_ranks(2, special_numbers):
        assert_same(expected, value)


def ones_added_to_a_large_number(dtype: torch.dtype, large: float) -> torch.Tensor:
    return total(torch.tensor([large if ddpnb.rank() == place else 1.0 for place in range(3)], dtype=dtype))


@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 2048.0), (torch.bfloat16, 256.0)])
def test_half_precision_is_summed_in_single(dtype: torch.dtype, large: float) -> None:
    # In half precision large + 1 is large again, so that only the sum that began with 1 + 1 would be right.
    actual = on_ranks(3, ones_added_to_a_large_number, dtype, large)

    assert_same([torch.full((3,), large + 2, dtype=dtype)] * 3, actual)


def mean_of_the_largest_half() -> torch.Tensor:
    return mean(torch.full((2,), 60000.0, dtype=torch.float16))


def test_a_mean_of_half_precision_does_not_overflow_on_the_way() -> None:
    assert_same([torch.full((2,), 60000.0, dtype=torch.float16)] * 2, on_ranks(2, mean_of_the_largest_half))


def complex_and_bool() -> Any:
    rank = ddpnb.rank()
    value = torch.tensor([1 + 2j, 3j]) * (rank + 1)
    return total([torch.zeros(1), value.conj(), value.to(torch.complex128), torch.tensor([True, rank == 0])])


def test_complex_tensors_add_up_and_bools_are_counted() -> None:
    value = torch.tensor([3 + 6j, 9j])
    expected = [torch.zeros(1), value.conj().resolve_conj(), value.to(torch.complex128), torch.tensor([2, 1])]

    for actual in on_ranks(2, complex_and_bool):
        assert_same(expected, actual)


def an_int_on_one_rank_a_float_on_another() -> float:
    return total(0 if ddpnb.rank() == 0 else 2.5)


def test_a_rank_that_counted_nothing_may_give_an_int_where_others_give_floats() -> None:
    assert [2.5, 2.5] == on_ranks(2, an_int_on_one_rank_a_float_on_another)


def large_ints() -> list[int]:
    return total([2**63 - 1, -(2**63), 2**53 + 1, -1])


@sizes
def test_ints_add_up_exactly(world_size: int) -> None:
    expected = [number * world_size for number in (2**63 - 1, -(2**63), 2**53 + 1, -1)]

    assert [expected] * world_size == on_ranks(world_size, large_ints)


def input_before_and_after(call: Callable[[Any], Any]) -> tuple[bool, bool, bool]:
    weight = torch.nn.Parameter(torch.ones(3))
    value = {"weight": weight, "double": weight * 2}
    result = call(value)
    taken = result[0] if isinstance(result, list) else result
    taken["weight"].add_(1)
    kept = torch.equal(weight, torch.ones(3)) and torch.equal(value["double"], torch.full((3,), 2.0))
    return kept, taken["weight"].requires_grad, taken["double"].requires_grad


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("call", [mean, total, gather])
def test_the_input_is_kept_and_the_result_has_no_gradient(world_size: int, call: Callable[[Any], Any]) -> None:
    assert [(True, False, False)] * world_size == on_ranks(world_size, input_before_and_after, call)


def results_own_their_memory() -> list[int]:
    results = mean([torch.zeros(1), torch.zeros(100_000)]) + gather(torch.zeros(1))
    return [result.untyped_storage().nbytes() for result in results]


def test_a_small_result_does_not_keep_a_large_one_alive() -> None:
    assert [[4, 400_000, 4, 4]] * 2 == on_ranks(2, results_own_their_memory)


def counted_collectives() -> dict[str, list[str]]:
    """{call: names of the collectives that it makes}"""
    made: list[str] = []

    def counting(name: str) -> Callable[..., Any]:
        collective = getattr(dist, name)
        return lambda *args, **kwargs: (made.append(name), collective(*args, **kwargs))[1]

    names = ("all_reduce", "all_gather_single", "all_gather", "broadcast", "barrier")
    originals = {name: getattr(dist, name) for name in names}
    many = {str(index): torch.ones(index) for index in range(20)} | {"loss": 0.5, "seen": 3}
    counts = {}
    try:
        for name in names:
            setattr(dist, name, counting(name))
        for name, call in {"reduced": lambda: mean(many), "gathered": lambda: gather(ddpnb.rank())}.items():
            made.clear()
            call()
            counts[name] = list(made)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return counts


def test_a_reduction_costs_one_small_collective_and_one_for_each_dtype() -> None:
    agreement = "all_gather_single"
    expected = {"reduced": [agreement, "all_reduce", "all_reduce"], "gathered": [agreement, "all_gather_single"]}

    assert [expected] * 2 == on_ranks(2, counted_collectives)


def test_a_world_of_one_makes_no_collective() -> None:
    assert [{"reduced": [], "gathered": []}] == on_ranks(1, counted_collectives)


def test_alone_no_process_group_is_needed_or_made() -> None:
    value = own_values(0)

    summed, gathered = total(value), gather(value)

    assert not dist.is_initialized()
    assert_same(on_ranks(1, reduced, total)[0], summed)
    assert_same(on_ranks(1, reduced, gather)[0], gathered)


# ---- where ranks differ


def told(make: Callable[[int], Any], call: Callable[[Any], Any]) -> tuple[str, str, int]:
    """Type and text of the error on this rank, and what a reduction after it gives: the ranks are still in step."""
    try:
        call(make(ddpnb.rank()))
    except (TypeError, ValueError, OverflowError) as error:
        return type(error).__name__, str(error), total(1)
    return "no error", "", total(1)


def contains_itself(rank: int) -> list[Any]:
    value: list[Any] = [1]
    if rank:
        value.append(value)
    return value


STRUCTURE = "mean() needs the same structure on all ranks: "
CURE = ". gather() takes values that differ."

DIFFERENCES: dict[str, tuple[Callable[[int], Any], str, str]] = {
    "shape": (
        lambda rank: {"loss": torch.zeros(2 + (rank == 1))},
        "ValueError",
        f"{STRUCTURE}value['loss'] is a tensor of float32 and shape (2,) on ranks 0, 2; "
        f"a tensor of float32 and shape (3,) on rank 1{CURE}",
    ),
    "dtype": (
        lambda rank: [0, torch.zeros(2, dtype=(torch.float32, torch.float64, torch.int64)[rank])],
        "ValueError",
        f"{STRUCTURE}value[1] is a tensor of float32 and shape (2,) on rank 0; "
        f"a tensor of float64 and shape (2,) on rank 1; a tensor of int64 and shape (2,) on rank 2{CURE}",
    ),
    "a key that one has": (
        lambda rank: {"a": 1, "z": 2} if rank != 2 else {"a": 1, "m": 3, "z": 2},
        "ValueError",
        f"{STRUCTURE}value['m'] is missing on ranks 0, 1; a number on rank 2{CURE}",
    ),
    "a key that one lacks": (
        lambda rank: {"a": {"b": 1}} if rank else {"a": {}},
        "ValueError",
        f"{STRUCTURE}value['a']['b'] is missing on rank 0; a number on ranks 1, 2{CURE}",
    ),
    "kind": (
        lambda rank: 1.0 if rank else torch.tensor(1.0),
        "ValueError",
        f"{STRUCTURE}value is a tensor of float32 and shape () on rank 0; a number on ranks 1, 2{CURE}",
    ),
    "length": (
        lambda rank: (1,) * (rank // 2),
        "ValueError",
        f"{STRUCTURE}value is a tuple of length 0 on ranks 0, 1; a tuple of length 1 on rank 2{CURE}",
    ),
    "container": (
        lambda rank: [] if rank else (),
        "ValueError",
        f"{STRUCTURE}value is a tuple of length 0 on rank 0; a list of length 0 on ranks 1, 2{CURE}",
    ),
    "type on one rank": (
        lambda rank: {"name": "Ada" if rank == 1 else 1.0},
        "TypeError",
        "mean(): on rank 1 value['name'] is of type str: "
        "what can be reduced are numbers, tensors, and dicts, lists and tuples of them",
    ),
    "type on all ranks": (
        lambda rank: [None],
        "TypeError",
        "mean(): on rank 0 value[0] is of type NoneType: "
        "what can be reduced are numbers, tensors, and dicts, lists and tuples of them",
    ),
    "two wrong types": (
        lambda rank: (1, b"", 2j)[rank],
        "TypeError",
        "mean(): on rank 1 value is of type bytes: "
        "what can be reduced are numbers, tensors, and dicts, lists and tuples of them",
    ),
    "type of a key": (
        lambda rank: {(1, 2) if rank else "a": 1},
        "TypeError",
        "mean(): on rank 1 value has a key of type tuple: keys are str or int",
    ),
    "a sparse tensor": (
        lambda rank: torch.eye(2).to_sparse() if rank == 2 else torch.eye(2),
        "TypeError",
        "mean(): on rank 2 value is a tensor that is sparse, nested or quantized: pass a dense one",
    ),
    "a tensor without data": (
        lambda rank: torch.empty(2, device="cpu" if rank else "meta"),
        "TypeError",
        "mean(): on rank 0 value is a tensor that has no data (device meta): pass a dense one",
    ),
    "an int beyond 64 bits": (
        lambda rank: 2**63 if rank else -(2**63),
        "OverflowError",
        "mean(): on rank 1 value is an int that needs more than 64 bits: pass float(…)",
    ),
    "a value in itself": (
        contains_itself,
        "ValueError",
        "mean(): on rank 1 value is nested too deeply: does it contain itself?",
    ),
}


def all_told(names: list[str]) -> dict[str, tuple[str, str, int]]:
    return {name: told(DIFFERENCES[name][0], mean) for name in names}


def test_what_one_rank_cannot_reduce_is_the_same_error_on_all_and_none_hangs() -> None:
    expected = {name: (kind, text, 3) for name, (_, kind, text) in DIFFERENCES.items()}

    for actual in on_ranks(3, all_told, list(DIFFERENCES)):
        assert expected == actual


def different_calls(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> tuple[str, str, int]:
    return told(lambda rank: 1.5, second if ddpnb.rank() else first)


@pytest.mark.parametrize(("first", "second"), [(mean, total), (gather, mean), (total, gather)])
def test_ranks_in_different_calls_are_told_so(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> None:
    calls = f"{first.__name__}() on rank 0; {second.__name__}() on rank 1"
    text = f"the ranks are in different calls: {calls}. Make each call on all ranks, in one order."

    assert [("ValueError", text, 2)] * 2 == on_ranks(2, different_calls, first, second)


def small_integers(rank: int) -> dict[str, torch.Tensor]:
    return {"fits": torch.tensor([100], dtype=torch.int16), "count": torch.tensor([100, -3], dtype=torch.int8)}


def test_a_tensor_of_small_integers_does_not_wrap() -> None:
    text = (
        "total(): value['count'] sums up to values from -6 to 200, which int8 does not hold: "
        "pass it as int64, with .long()"
    )

    assert [("OverflowError", text, 2)] * 2 == on_ranks(2, told, small_integers, total)


@pytest.mark.parametrize("call", [mean, total, gather])
def test_alone_the_same_values_are_refused(call: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"\(\): on rank 0 value\['a'\] is of type object: what can "):
        call({"a": object()})


# ---- gather

DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64)


def to_be_gathered(rank: int) -> Any:
    """Other structures, shapes and dtypes on each rank."""
    strange = [math.nan, -math.inf, 2**200, True, None, "naïve \N{GRINNING FACE} \udc80", np.float32(0.5)]
    if rank == 0:
        return {"strange": strange, 3: (), "key": [{}]}
    tensors = [own_tensor(rank, dtype) for dtype in DTYPES]
    lazy = torch.tensor([1 + 2j]).conj()
    return (*tensors, torch.tensor(True), torch.zeros(0, 3, dtype=torch.bfloat16), lazy, torch.ones(1).expand(4))


def gathered_values() -> Any:
    return gather(to_be_gathered(ddpnb.rank()))


@sizes
def test_gather_gives_every_rank_all_values_in_rank_order(world_size: int) -> None:
    strange = [math.nan, -math.inf, 2**200, True, None, "naïve \N{GRINNING FACE} \udc80", 0.5]
    expected: list[Any] = [{"strange": strange, 3: (), "key": [{}]}]
    for rank in range(1, world_size):
        *tensors, lazy, expanded = to_be_gathered(rank)
        expected.append((*tensors, lazy.resolve_conj(), expanded.contiguous()))

    for actual in on_ranks(world_size, gathered_values):
        assert_same(expected, actual)


def gathered_batches() -> torch.Tensor:
    return torch.cat(gather(torch.full((ddpnb.rank(), 2), float(ddpnb.rank()))))


def test_batches_of_different_lengths_are_joined() -> None:
    expected = torch.tensor([[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]])

    assert_same([expected] * 3, on_ranks(3, gathered_batches))


def gathered_alike() -> list[bool]:
    first, second = gather(torch.ones(2))
    return [first.data_ptr() == second.data_ptr(), torch.equal(first, second)]


def test_equal_values_are_gathered_as_separate_copies() -> None:
    assert [[False, True]] * 2 == on_ranks(2, gathered_alike)


def not_gatherable_on_one(rank: int) -> Any:
    return [1, {1, 2}] if rank else [1]


def test_what_one_rank_cannot_gather_is_the_same_error_on_all() -> None:
    text = (
        "gather(): on rank 1 value[1] is of type set: "
        "what can go elsewhere are numbers, tensors, strings, None, and dicts, lists and tuples of them"
    )

    assert [("TypeError", text, 2)] * 2 == on_ranks(2, told, not_gatherable_on_one, gather)


# ---- random streams


def draws(seed: int, same_on_all_ranks: bool = False) -> tuple[int, float, float, float]:
    """The seed that was used, and one draw from each generator."""
    used = seed_everything(seed, same_on_all_ranks=same_on_all_ranks)
    return used, random.random(), float(np.random.rand()), torch.rand(()).item()


def test_each_rank_has_a_stream_of_its_own_that_is_the_same_in_every_run() -> None:
    first, again = on_ranks(3, draws, 7), on_ranks(3, draws, 7)

    assert first == again
    for of_all_ranks in zip(*first, strict=True):
        assert 3 == len(set(of_all_ranks))


def dropped(seed: int) -> torch.Tensor:
    seed_everything(seed)
    return torch.nn.Dropout(0.5)(torch.ones(64))


def test_ranks_drop_different_units() -> None:
    first, second = on_ranks(2, dropped, 0)

    assert not torch.equal(first, second)


def draws_of_many(num_seeds: int) -> list[tuple[int, float, float, float]]:
    return [draws(seed) for seed in range(num_seeds)]


def test_no_rank_of_a_seed_repeats_a_rank_of_another() -> None:
    first, second, third = on_ranks(3, draws_of_many, 50)

    for of_all in zip(*first, *second, *third, strict=True):
        assert 150 == len(set(of_all))


@pytest.mark.parametrize("seed", [3, 2**40])
def test_ranks_that_share_a_seed_draw_what_a_plain_script_draws(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    expected = (seed, random.random(), torch.rand(()).item())

    for used, of_python, of_numpy, of_torch in on_ranks(2, draws, seed, same_on_all_ranks=True):
        assert expected == (used, of_python, of_torch)
        assert np.random.RandomState(seed if seed < 2**32 else [0, 2**8]).rand() == of_numpy


def test_the_seed_that_comes_back_gives_the_stream_again() -> None:
    used, *expected = draws(11)

    assert expected == list(draws(used, same_on_all_ranks=True))[1:]


@pytest.mark.parametrize(
    ("seed", "kind", "text"),
    [
        (-1, ValueError, "seed=-1 is negative: give one from 0 to 2**64 - 1"),
        (2**64, ValueError, "seed=18446744073709551616 is too large: give one from 0 to 2**64 - 1"),
        (1.0, TypeError, "seed=1.0 is not an int: give one from 0 to 2**64 - 1, such as 0"),
        ("0", TypeError, "seed='0' is not an int: give one from 0 to 2**64 - 1, such as 0"),
        (True, TypeError, "seed=True is not an int: give one from 0 to 2**64 - 1, such as 0"),
        (None, TypeError, "seed=None is not an int: give one from 0 to 2**64 - 1, such as 0"),
    ],
)
def test_a_seed_that_is_none_is_refused(seed: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        seed_everything(seed)

    assert text == str(caught.value)


def test_an_integer_of_numpy_is_a_seed() -> None:
    assert draws(5) == draws(np.int64(5))  # type: ignore[arg-type]
