"""What goes into a payload comes out of it, and what cannot is named."""

from __future__ import annotations

import collections
import io
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ddpnb.errors import UnpicklableError
from ddpnb.payload import map_call, pack, pack_call, unpack, unpack_call


def travel(*args: Any, **kwargs: Any) -> Any:
    """The arguments as they arrive in a worker."""
    descriptor = pack_call(len, args, kwargs).to_file()
    call = unpack_call(map_call(descriptor))
    os.close(descriptor)
    return call.args if not kwargs else (call.args, call.kwargs)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (
        torch.equal(first, second)
        and first.dtype == second.dtype
        and first.stride() == second.stride()
        and first.requires_grad == second.requires_grad
        and type(first) is type(second)
    )


TENSORS = {
    "float": torch.randn(3, 4),
    "large": torch.randn(300, 400),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0),
    "empty with a shape": torch.empty(3, 0, 2),
    "bfloat16": torch.randn(1000).bfloat16(),
    "half": torch.randn(5).half(),
    "bool": torch.tensor([True, False]),
    "complex": torch.randn(4, dtype=torch.complex64),
    "int": torch.arange(10),
    "uint8": torch.arange(10, dtype=torch.uint8),
    "float8": torch.randn(8).to(torch.float8_e4m3fn),
    "transposed": torch.randn(300, 400).t(),
    "expanded": torch.randn(400, 1).expand(400, 300),
    "requires grad": torch.randn(4, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.randn(40, 40)),
    "frozen parameter": torch.nn.Parameter(torch.randn(4), requires_grad=False),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_arrives_as_it_was(kind: str) -> None:
    tensor = TENSORS[kind]
    through_file, through_bytes = travel(tensor)[0], unpack(pack(tensor))

    for arrived in (through_file, through_bytes):
        if kind == "float8":  # torch cannot compare them
            assert torch.equal(tensor.view(torch.uint8), arrived.view(torch.uint8))
        else:
            assert same(tensor, arrived)


@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:TypedStorage")
def test_conjugates_negatives_sparse_and_quantised_tensors_arrive_as_well() -> None:
    values = torch.randn(4, dtype=torch.complex64)
    sparse = torch.eye(5).to_sparse()
    quantised = torch.quantize_per_tensor(torch.randn(8), 0.1, 0, torch.qint8)

    conjugate, negative, eye, numbers = travel(values.conj(), values.conj().imag, sparse, quantised)[:4]

    assert torch.equal(values.conj(), conjugate)
    assert torch.equal(values.conj().imag, negative)
    assert torch.equal(torch.eye(5), eye.to_dense())
    assert torch.equal(quantised.dequantize(), numbers.dequantize())


def test_a_tensor_of_a_computation_arrives_as_a_leaf() -> None:
    (arrived,) = travel(torch.ones(3, requires_grad=True) * 2)

    assert arrived.is_leaf
    assert arrived.requires_grad
    assert [2.0, 2.0, 2.0] == arrived.tolist()


def test_tensors_that_share_storage_go_on_sharing_it() -> None:
    whole = torch.arange(10_000.0)

    whole_there, view_there, same_there = travel(whole, whole[10:20], whole)
    whole_there[10] = -1.0

    assert -1.0 == view_there[0].item()
    assert -1.0 == same_there[10].item()
    assert 10.0 == whole[10].item()


def test_tied_weights_stay_tied() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
    model[1].weight = model[0].weight

    (arrived,) = travel(model)

    assert arrived[0].weight is arrived[1].weight
    assert torch.equal(model(torch.ones(1, 40)), arrived(torch.ones(1, 40)))


def test_a_small_view_does_not_drag_its_whole_storage_along() -> None:
    whole = torch.arange(1_000_000.0)

    small = pack(whole[5:8])
    shared = pack((whole[5:8], whole))

    assert len(small) < 10_000
    assert [5.0, 6.0, 7.0] == unpack(small).tolist()
    assert len(shared) < 4_100_000


def test_a_large_tensor_travels_once_and_beside_the_pickle() -> None:
    table = torch.randn(16 * 2**20 // 4)

    parcel = pack_call(len, (table, [table]), {})

    assert parcel.num_bytes < 17 * 2**20


def test_arrays_arrive_writable_and_with_their_order() -> None:
    array, fortran, strings = np.arange(100_000.0), np.asfortranarray(np.random.rand(100, 200)), np.array(["a", "bc"])

    array_there, fortran_there, strings_there = travel(array, fortran, strings)
    array_there[0] = 7.0

    assert 0.0 == array[0]
    assert np.array_equal(fortran, fortran_there)
    assert fortran_there.flags.f_contiguous
    assert strings.tolist() == strings_there.tolist()


def test_a_mapped_call_is_each_process_own() -> None:
    table = torch.zeros(100_000)
    descriptor = pack_call(len, (table,), {}).to_file()
    (first,), (second,) = (unpack_call(map_call(descriptor)).args for _ in range(2))
    os.close(descriptor)

    first[0] = 1.0

    assert (1.0, 0.0, 0.0) == (first[0].item(), second[0].item(), table[0].item())


def test_the_file_of_a_call_cannot_be_changed_or_cut_short() -> None:
    descriptor = pack_call(len, ([],), {}).to_file()

    with pytest.raises(PermissionError):
        os.write(descriptor, b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 1)
    os.close(descriptor)


def test_functions_closures_and_classes_of_a_notebook_travel_by_value() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("factor = 3\nclass Net:\n    size = 2\ndef train(x): return factor * x * Net.size", names)

    assert 30 == unpack(pack(names["train"]))(5)


def test_ordinary_values_arrive_equal() -> None:
    values = (1, 2.5, "ü", b"\0", None, {1, 2}, {"a": [1, (2,)]}, collections.Counter("aab"), range(3))

    assert (values, {"lr": 0.1}) == travel(*values, lr=0.1)


# ---- what cannot travel


class Holder:
    def __init__(self, part: object) -> None:
        self.part = part


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (threading.Lock(), "the value (_thread.lock) cannot be pickled: "),
        ({"a": [0, threading.Lock()]}, "the value['a'][1] (_thread.lock) cannot be pickled: "),
        (Holder({"x": threading.Lock()}), "the value.part['x'] (_thread.lock) cannot be pickled: "),
        ((number for number in range(3)), "the value (generator) cannot be pickled: "),
        ([io.BufferedReader(io.FileIO(os.devnull))], "the value[0] (_io.BufferedReader) cannot be pickled: "),
        (torch.nested.nested_tensor([torch.ones(2)]), "the value (torch.Tensor) cannot be pickled: a nested tensor"),
    ],
)
def test_the_part_that_cannot_be_pickled_is_named_with_its_type(value: object, words: str) -> None:
    with pytest.raises(UnpicklableError) as caught:
        pack(value, "the value")

    assert str(caught.value).startswith(words)


def test_an_argument_that_cannot_travel_is_named_by_its_parameter() -> None:
    def train(data: object, *, lock: object = None) -> None:
        """Never called."""

    with pytest.raises(UnpicklableError) as caught:
        pack_call(train, ([],), {"lock": threading.Lock()})

    assert str(caught.value).startswith("argument 'lock' of train() (_thread.lock) cannot travel to the workers: ")
    assert str(caught.value).endswith("Make it inside the function, or pass what it is made from.")


@pytest.mark.gpu
def test_a_tensor_of_a_gpu_arrives_on_the_cpu() -> None:
    (arrived,) = travel(torch.ones(3, device="cuda", requires_grad=True))

    assert ("cpu", True, [1.0, 1.0, 1.0]) == (arrived.device.type, arrived.requires_grad, arrived.tolist())


def test_a_ddp_model_says_what_to_take_instead(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        with pytest.raises(UnpicklableError) as caught:
            pack({"model": model}, "the returned value")
    finally:
        dist.destroy_process_group()

    assert "the returned value['model']" in str(caught.value)
    assert "it belongs to its process group; take its .module, or .module.state_dict()" in str(caught.value)
