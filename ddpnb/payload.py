"""A cell's function and its arguments <-> bytes, and clear words on what cannot travel.

Functions and classes of a notebook travel by value (cloudpickle). Large buffers, those of tensors and arrays, stand
beside the pickle, page-aligned, in one file in memory; every worker maps it privately, so that 512 MiB of captured data
are written once and copied only where a worker writes. Tensors of a GPU travel through the CPU and arrive there.

Runs in: both
"""

from __future__ import annotations

import fcntl
import functools
import inspect
import io
import linecache
import mmap
import os
import pickle
import struct
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
import cloudpickle.cloudpickle as _cloudpickle

from .agreement import anonymous_file
from .errors import UnpicklableError

if TYPE_CHECKING:
    import torch

_HEAD = struct.Struct("=QQ")  # number of buffers, length of the pickle
_UNNAMED = "<ddpnb>"  # stands for a file name inside a pickle
_COUNT = struct.Struct("=Q")
_SPAN = struct.Struct("=QQ")  # offset and length of a buffer
_SMALL = 1 << 10
"""Bytes below which a buffer stays in the pickle."""
_LARGE = 1 << 16
"""Bytes from which a buffer begins on a page of its own."""


@dataclass(frozen=True, slots=True)
class Call:
    """A function and its arguments as they arrive in a worker."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Parcel:
    """A packed call, before it is written."""

    segments: tuple[bytes | memoryview[int], ...]
    cells: Mapping[str, str]
    """{file name of a cell's code: "Cell In[3]"} for all code that travels by value."""

    @property
    def num_bytes(self) -> int:
        """Size of the whole."""
        return sum(len(segment) for segment in self.segments)

    def to_file(self) -> int:
        """Write into a file that no path leads to; returns its descriptor. It can be neither changed nor cut short."""
        descriptor = anonymous_file("ddpnb-payload")
        with open(descriptor, "wb", closefd=False) as file:
            file.writelines(self.segments)
        if hasattr(fcntl, "F_ADD_SEALS"):
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        return descriptor


# ---- packing


def pack_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Parcel:
    """Pack a call for the workers.

    Raises:
        UnpicklableError: something cannot travel; the text names the variable and its type.
    """
    files: set[str] = set()
    try:
        segments = _pack(Call(function, args, kwargs), files)
    except Exception as error:
        raise UnpicklableError(_why_not(function, args, kwargs, error)) from error
    sources = {file: "".join(linecache.getlines(file)) for file in files if not os.path.exists(file)}
    # The sources go first and by themselves: a worker needs them to show where unpacking the call failed.
    head = pickle.dumps(sources)
    head += bytes(-(_COUNT.size + len(head)) % mmap.PAGESIZE)  # what follows is aligned from its own beginning
    return Parcel((_COUNT.pack(len(head)), head, *segments), _cell_names(files))


def pack(value: object, name: str = "value") -> bytes:
    """Pack a value, such as a result.

    Raises:
        UnpicklableError: something in it cannot travel; the text says where it stands, starting with `name`.
    """
    try:
        return b"".join(_pack(value, set()))
    except Exception as error:
        path, culprit, reason = _find_culprit(name, value) or (name, value, error)
        raise UnpicklableError(f"{path} ({_type(culprit)}) cannot be pickled: {reason}") from error


def _pack(value: object, files: set[str]) -> tuple[bytes | memoryview[int], ...]:
    buffers: list[memoryview[int]] = []
    compact: frozenset[int] = frozenset()
    while True:
        stream = io.BytesIO()
        pickler = _Pickler(stream, buffers, compact, files)
        pickler.dump(value)  # type: ignore[no-untyped-call]
        wasteful = pickler.wasteful() - compact
        if not wasteful:
            break
        # A few numbers seen in a large storage that nothing else shares: once more, with a copy of just those.
        compact |= wasteful
        buffers.clear()
    return _lay_out(stream.getbuffer(), buffers)


def _lay_out(pickled: memoryview[int], buffers: list[memoryview[int]]) -> tuple[bytes | memoryview[int], ...]:
    """Head, spans, pickle, then each buffer at its aligned offset."""
    position = _HEAD.size + _SPAN.size * len(buffers) + len(pickled)
    spans: list[bytes] = []
    body: list[bytes | memoryview[int]] = []
    for buffer in buffers:
        alignment = mmap.PAGESIZE if len(buffer) >= _LARGE else 64
        padding = -position % alignment
        position += padding
        spans.append(_SPAN.pack(position, len(buffer)))
        body += [bytes(padding), buffer]
        position += len(buffer)
    return (_HEAD.pack(len(buffers), len(pickled)), *spans, pickled, *body)


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, but tensors leave their bytes beside the pickle and come from whatever device they are on."""

    def __init__(
        self, stream: io.BytesIO, buffers: list[memoryview[int]], compact: frozenset[int], files: set[str]
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=self._keep)  # type: ignore[no-untyped-call]
        self._buffers = buffers
        self._compact = compact
        self._files = files
        self._torch = sys.modules.get("torch")
        self._storages: dict[int, _Storage] = {}  # {storage id: its one stand-in}
        self._uses: Counter[int] = Counter()
        self._sparse: set[int] = set()  # storages of which a tensor shows less than half

    def _keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether the buffer stays in the pickle."""
        raw = buffer.raw()
        if len(raw) < _SMALL:
            return True
        self._buffers.append(raw)
        return False

    def wasteful(self) -> frozenset[int]:
        """Storages that would travel whole for one small view."""
        return frozenset(storage for storage in self._sparse if self._uses[storage] == 1)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.CodeType) and value.co_filename != _UNNAMED:
            # cloudpickle forgets which cell a code is from, and a traceback would not show it.
            self._files.add(value.co_filename)
            return _restore_code, (value.replace(co_filename=_UNNAMED), value.co_filename)
        if self._torch is not None and type(value) in (self._torch.Tensor, self._torch.nn.Parameter):
            return self._reduce_tensor(value)
        if isinstance(value, functools._lru_cache_wrapper) and value.__module__ == "__main__":
            return _restore_cache, (value.cache_parameters(), value.__wrapped__)
        if _is_ddp(value):
            raise TypeError("it belongs to its process group; take its .module, or .module.state_dict()")
        return super().reducer_override(value)  # type: ignore[no-untyped-call]

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        torch = self._torch
        assert torch is not None
        if tensor.is_nested:
            raise TypeError("a nested tensor cannot be pickled")
        parameter, requires_grad = isinstance(tensor, torch.nn.Parameter), tensor.requires_grad
        plain = tensor.detach()
        if plain.device.type not in ("cpu", "meta"):
            plain = plain.cpu()
        if plain.layout != torch.strided or plain.is_quantized or plain.device.type == "meta":
            return plain.requires_grad_(requires_grad).__reduce_ex__(2)
        plain = plain.resolve_conj().resolve_neg()
        storage = plain.untyped_storage()
        key = storage._cdata
        if key in self._compact:
            plain = plain.clone(memory_format=torch.contiguous_format)
            storage = plain.untyped_storage()
            key = storage._cdata
        elif plain.numel() * plain.element_size() < storage.nbytes() // 2:
            self._sparse.add(key)
        self._uses[key] += 1
        # The stand-in is kept, and with it the storage: tensors that share one go on sharing it, and no id is reused.
        stand_in = self._storages.setdefault(key, _Storage(storage))
        shape = (plain.dtype, plain.storage_offset(), tuple(plain.size()), plain.stride())
        attributes = vars(tensor) or None  # `weight._no_weight_decay = True` is how optimizers are told
        return _restore_tensor, (stand_in, *shape, requires_grad, parameter, attributes)


def _restore_code(code: types.CodeType, file: str) -> types.CodeType:
    return code.replace(co_filename=file)


def _restore_cache(parameters: dict[str, Any], function: Callable[..., Any]) -> Callable[..., Any]:
    cached: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    return cached


class _Storage:
    """Stands for a tensor's memory in a pickle, and arrives as a `torch.UntypedStorage`."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage

    def __reduce_ex__(self, protocol: object) -> Any:
        import torch

        view = torch.empty(0, dtype=torch.uint8).set_(self._storage).numpy()  # (bytes,)
        return _restore_storage, (pickle.PickleBuffer(view.data),)


def _restore_storage(buffer: Any) -> torch.UntypedStorage:
    import torch

    if not len(buffer):
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _restore_tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    parameter: bool,
    attributes: dict[str, Any] | None,
) -> torch.Tensor:
    import torch

    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
    tensor = torch.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)
    vars(tensor).update(attributes or {})
    return tensor


# ---- unpacking


def unpack(packed: bytes) -> Any:
    """What `pack` packed; tensors and arrays are writable and own their memory."""
    return _unpack(memoryview(bytearray(packed)))


def map_call(descriptor: int) -> memoryview[int]:
    """Map a parcel's file privately, and let tracebacks in this process show the source of its cells.

    Returns what `unpack_call` unpacks. Nothing of the user's has run yet.
    """
    size = os.fstat(descriptor).st_size
    whole = memoryview(mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    begin = _COUNT.size + _COUNT.unpack_from(whole)[0]
    sources: dict[str, str] = pickle.loads(whole[_COUNT.size : begin])
    for file, text in sources.items():
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return whole[begin:]


def unpack_call(packed: memoryview[int]) -> Call:
    """Unpack a mapped call; this imports the user's modules and may raise anything."""
    call = _unpack(packed)
    assert isinstance(call, Call)
    return call


def _unpack(packed: memoryview[int]) -> Any:
    num_buffers, length = _HEAD.unpack_from(packed)
    begin = _HEAD.size + _SPAN.size * num_buffers
    spans = [_SPAN.unpack_from(packed, _HEAD.size + _SPAN.size * index) for index in range(num_buffers)]
    buffers = [packed[offset : offset + size] for offset, size in spans]
    return _Unpickler(io.BytesIO(packed[begin : begin + length]), buffers=buffers).load()


class _Unpickler(pickle.Unpickler):
    """pickle, but a class that this process has is left as it is.

    cloudpickle finds a cell's class again when an instance of it comes back from a worker, and would then overwrite its
    methods and attributes with the worker's copies.
    """

    def __init__(self, stream: io.BytesIO, buffers: list[memoryview[int]]) -> None:
        super().__init__(stream, buffers=buffers)
        self._had: set[type] = set()

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if found in (_cloudpickle._make_skeleton_class, _cloudpickle._make_skeleton_enum):
            return functools.partial(self._make_skeleton, found)
        if found is _cloudpickle._class_setstate:
            return self._set_state
        return found

    def _make_skeleton(self, make: Callable[..., type], *args: Any) -> type:
        *_, class_tracker_id, _ = args
        is_known = class_tracker_id in _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID
        made = make(*args)
        if is_known:
            self._had.add(made)
        return made

    def _set_state(self, made: type, state: Any) -> type:
        return made if made in self._had else _cloudpickle._class_setstate(made, state)


# ---- words on what cannot travel


def _why_not(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    for path, value in _pieces(function, name, args, kwargs):
        found = _find_culprit(path, value)
        if found:
            path, culprit, reason = found
            return (
                f"{path} ({_type(culprit)}) cannot travel to the workers: {reason}. "
                "Make it inside the function, or pass what it is made from."
            )
    return f"{name}() cannot travel to the workers: {error}"


def _pieces(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, object]]:
    try:
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a builtin without a signature
        bound = {str(position): value for position, value in enumerate(args)} | dict(kwargs)
    for parameter, value in bound.items():
        yield f"argument {parameter!r} of {name}()", value
    yield f"{name}()", function


def _find_culprit(path: str, value: object, depth: int = 0) -> tuple[str, object, Exception] | None:
    """The innermost part of `value` that does not pickle by itself: its path, the part, and why; None if none."""
    try:
        _pack(value, set())
    except Exception as error:
        reason = error
    else:
        return None
    if depth < 8 and not _is_ddp(value):
        for step, part in _parts(path, value):
            found = _find_culprit(step, part, depth + 1)
            if found:
                return found
    return path, value, reason


def _parts(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, types.FunctionType):
        try:
            captured = inspect.getclosurevars(value)
        except ValueError:  # a variable that has no value yet
            return
        for name, part in captured.nonlocals.items():
            yield f"variable {name!r} captured by {value.__name__}()", part
        for name, part in captured.globals.items():
            if not isinstance(part, types.ModuleType):
                yield f"global variable {name!r} used by {value.__name__}()", part
        for name, part in (value.__kwdefaults__ or {}).items():
            yield f"default of {name!r} of {value.__name__}()", part
        for position, part in enumerate(value.__defaults__ or ()):
            yield f"default {position} of {value.__name__}()", part
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield f"{path}[{key!r}]", part
    elif isinstance(value, (list, tuple, set, frozenset)):
        for position, part in enumerate(value):
            yield f"{path}[{position}]", part
    elif isinstance(value, type):
        for name, part in vars(value).items():
            if not name.startswith("__"):
                yield f"{path}.{name}", part
    else:
        for name, part in getattr(value, "__dict__", {}).items():
            yield f"{path}.{name}", part


def _is_ddp(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.parallel.DistributedDataParallel)


def _type(value: object) -> str:
    kind = type(value)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _cell_names(files: set[str]) -> dict[str, str]:
    """Which notebook cell a file name of compiled code stands for, as IPython's own tracebacks name it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    names = {}
    for file in files:
        label = shell.compile.format_code_name(file) if shell else None
        if label:
            names[file] = " ".join(label)
    return names
