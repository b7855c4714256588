"""Devices that say ``cuda`` with a CPU's build of torch: values lie in the CPU's memory, rules are CUDA's.

Each operation is one launch, views are none, and what would make the host wait is counted. Operations over tensors of
two devices fail as on CUDA. ``torch.cuda.CUDAGraph`` keeps the operations of a capture with their tensors and does them
again on these; what CUDA forbids in a capture raises. There are no pools or kernels. Streams are kept apart: what one
has written, another may touch once it has waited for that. Importing this needs ``g++`` and is for the whole process,
so tests run it in one of their own (:mod:`run_on_pretended_cuda`).
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock, patch
from zlib import crc32

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch.nn import functional
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import leaves
from hf_selfspec.generate import unseen
from hf_selfspec.model.kernels import leaves as fused
from hf_selfspec.model.kernels import packing

DEVICE, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)
# What torch asks of a device's runtime before it dispatches anything.
_RUNTIME = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
struct Runtime final : impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  DeviceType type() const override { return static_type; }
  Device getDevice() const override { return Device(static_type, 0); }
  Device exchangeDevice(Device) const override { return getDevice(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device place) const noexcept override { return Stream(Stream::DEFAULT, place); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 2; }
};
static impl::DeviceGuardImplRegistrar registered(DeviceType::CUDA, new Runtime());
"""


def _register_runtime() -> None:
    folder, name = Path(torch.__file__).parent, f"pretended_{torch.__version__}_{crc32(_RUNTIME.encode())}.so"
    if not (library := Path(tempfile.gettempdir(), name)).exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as place:
            (source := Path(place, "runtime.cpp")).write_text(_RUNTIME)
            options = f"-shared -fPIC -std=c++20 -I{folder}/include -L{folder}/lib -Wl,-rpath,{folder}/lib -o".split()
            subprocess.run(["g++", *options, made := Path(place, name), source, "-lc10"], check=True)
            made.replace(library)  # whole, whoever else makes it
    ctypes.CDLL(str(library))


_register_runtime()

# What looks at the values on the host.
_READS = {"_local_scalar_dense", "item", "is_nonzero", "equal"}
# What has a size that depends on values.
_SIZED_BY_VALUES = {"nonzero", "masked_select", "nonzero_numpy", "unique_dim", "_unique2", "repeat_interleave"}
_MULTIPLY = {"addmm", "baddbmm", "bmm", "mm"}
_INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_"}
# What launches nothing.
_VIEWS = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "diagonal", "empty", "empty_like",
    "empty_strided", "expand", "is_same_size", "lift", "lift_fresh", "narrow", "new_empty", "new_empty_strided",
    "permute", "select", "set_", "slice", "split", "split_with_sizes", "squeeze", "sym_size", "sym_stride", "t",
    "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as_real",
}  # fmt: skip


@dataclass
class Counts:
    """What was counted while :attr:`is_on`."""

    reads: Counter[str] = field(default_factory=Counter)  # values that the host waited for, by operation
    uploads: Counter[str] = field(default_factory=Counter)  # copies from the host, by operation
    launches: Counter[str] = field(default_factory=Counter)  # by operation
    is_on: bool = False
    plans: int = 0  # attention for which cuDNN makes plans, one for each shape

    def reset(self) -> None:
        vars(self).update(vars(Counts()))

    def read(self, name: str) -> None:
        Graph.forbid(name)
        _streams.current.finish()
        self.reads[name] += self.is_on

    def upload(self, name: str, blocks: bool = True) -> None:
        if blocks:
            Graph.forbid(name)
        self.uploads[f"{name}{', blocking' * blocks}"] += self.is_on


counts = Counts()


class _Captures(threading.local):
    running: Graph | None = None


class Graph:
    """A ``torch.cuda.CUDAGraph``."""

    kernels: ClassVar[list[int]] = []  # of each that was made

    def __init__(self) -> None:
        self._steps: list[tuple[Any, Any, Any, list[Any]]] = []
        self._is_whole = True

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert _captures.running is None
        assert capture_error_mode == "thread_local"
        assert _streams.current is not _streams.default
        _captures.running = self

    def capture_end(self) -> None:
        _captures.running = None
        self.kernels.append(len(self._steps))
        if not self._is_whole:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def replay(self) -> None:
        """Does all operations again on the same tensors, and writes their results to the same ones."""
        assert _captures.running is None
        counts.launches["graph"] += counts.is_on
        _streams.current.launch()
        for func, args, kwargs, results in self._steps:
            _streams.current.touch((args, kwargs), [*_written(func, args, kwargs), *results])
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # values are a CPU's
            for func, args, kwargs, results in self._steps:
                now = func(*args, **kwargs)
                for before, value in zip(results, now if isinstance(now, tuple) else (now,), strict=False):
                    before.copy_(value)

    @staticmethod
    def run(name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation on raw tensors; in a capture it is only noted, and what it finds is left as it was
        (what would be new is there, with values that nobody may use)."""
        if name in _VIEWS and "empty" not in name:
            return func(*args, **kwargs)
        graph, written = _captures.running, _written(func, args, kwargs)
        before_all = [value.clone() for value in written if graph is not None]
        result = func(*args, **kwargs)
        for value, kept in zip(written, before_all, strict=False):
            value.copy_(kept)
        before = {value.untyped_storage().data_ptr() for value in _tensors((args, kwargs))}
        new = [value for value in _tensors(result) if value.untyped_storage().data_ptr() not in before]
        _streams.current.own(new)
        if name in _VIEWS:
            return result if graph is None else result.zero_()  # which are tokens and slots
        if graph is None:
            _streams.current.touch((args, kwargs), [*written, *new])
        else:
            assert not new or len(new) == len(_tensors(result))
            graph._steps.append((func, args, kwargs, new))
        return result

    @staticmethod
    def forbid(what: str) -> None:
        if (graph := _captures.running) is not None:
            graph._is_whole = False
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")


class Pretended(torch.Tensor):
    """A tensor of one of the devices."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor, device: torch.device = DEVICE) -> Pretended:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), raw.stride(), raw.storage_offset(), dtype=raw.dtype,
            device=DEVICE if device.index is None else device,
        )  # fmt: skip
        tensor.raw = raw
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def record_stream(self, stream: _Stream) -> None:
        vars(self.raw.untyped_storage()).setdefault("streams", set()).add(stream)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """As of ``torch.utils._pytree``, whose functions take as long as a tiny model's operations."""
    if isinstance(value, (tuple, list)):
        return type(value)([_mapped(function, item) for item in value])
    return {key: _mapped(function, item) for key, item in value.items()} if isinstance(value, dict) else function(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [value] if isinstance(value, torch.Tensor) else [tensor for item in items for tensor in _tensors(item)]


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operation writes."""
    schema, written = getattr(func, "_schema", None), list[torch.Tensor]()
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += _tensors(args[place] if place < len(args) else kwargs.get(argument.name))
    return written


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, Pretended) else value


def _is_here(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.split("::")[1]
    tensors = _tensors((args, kwargs))
    here = [value for value in tensors if isinstance(value, Pretended)]
    elsewhere = [value for value in tensors if not isinstance(value, Pretended)]
    device = kwargs.get("device")
    if not here and not _is_here(device):
        return func(*args, **kwargs)
    raw_args, raw_kwargs = _mapped(_raw, (args, kwargs))
    if device is not None:
        raw_kwargs["device"] = "cpu"
    raw_kwargs.pop("pin_memory", None)
    if name == "_to_copy" and here and device is not None and not _is_here(device):
        counts.read("to the host")
        raw_kwargs.pop("non_blocking", None)
        return func(*raw_args, **raw_kwargs).clone()
    if name in _READS:
        counts.read(name)
        return func(*raw_args, **raw_kwargs)
    if name == "_fused_sdp_choice":
        return (SDPBackend.CUDNN_ATTENTION if torch.backends.cuda.cudnn_sdp_enabled() else SDPBackend.MATH).value
    _count(name, args, here, elsewhere, blocks=not (kwargs.get("non_blocking") or (name == "copy_" and args[2:])))
    if name == "copy_" and not isinstance(args[0], Pretended):
        _streams.current.late.append((args[0], raw_args[1].clone()))
        return args[0]
    place = torch.device(device) if _is_here(device) else _place_of(name, args, here)
    result = Graph.run(name, _OF_A_CPU.get(name, func), raw_args, raw_kwargs)
    for value in here:
        if isinstance(result, torch.Tensor) and value.raw is result and value.device == place:
            return value  # in place
    if name == "_to_copy" and any(result is value.raw for value in here):
        result = result.clone()
    return _mapped(lambda value: Pretended(value, place) if isinstance(value, torch.Tensor) else value, result)


def as_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that does what a function does to the values."""

    def launch(*args: Any) -> Any:
        here = [value for value in _tensors(args) if isinstance(value, Pretended)]
        _count(function.__name__, args, here, [], blocks=False)
        result = Graph.run(function.__name__, function, _mapped(_raw, args), {})
        return _mapped(lambda value: Pretended(value, here[0].device), result)

    return launch


def _in_four_bits(input: torch.Tensor, numbers: torch.Tensor, group: int, scales: torch.Tensor) -> torch.Tensor:
    scale, middle = scales.repeat_interleave(group, dim=0).unbind(-1)  # [k, n]
    return input @ ((packing.one_a_byte(numbers).t() - 8.0) * scale + middle).to(input.dtype)


# What a CPU does not have, or not of whole numbers.
_OF_A_CPU: dict[str, Any] = {
    "_convert_weight_to_int4pack": lambda numbers, _: numbers.clone(),
    "_weight_int4pack_mm": _in_four_bits,
    "histc": lambda values, *args: torch.histc(values.float(), *args).to(values.dtype),
    "_scaled_dot_product_efficient_attention": lambda query, key, value, mask, *_, scale=None: (
        functional.scaled_dot_product_attention(query, key, value, mask, scale=scale), *[None] * 3
    ),
}  # fmt: skip


def _place_of(name: str, args: Any, here: list[Pretended]) -> torch.device:
    """The device of an operation's tensors, of which numbers alone may lie elsewhere."""
    if name == "copy_" and isinstance(args[0], Pretended):
        return args[0].device
    places = {value.device for value in here if value.dim()} or {here[0].device}
    if len(places) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, found several: {name}")
    return places.pop()


def _count(name: str, args: Any, here: list[Pretended], elsewhere: list[torch.Tensor], blocks: bool) -> None:
    if name == "_to_copy" and not here:
        counts.upload("to the device", blocks)
    elif name == "copy_" and elsewhere:
        if isinstance(args[0], Pretended):
            counts.upload("copy_", blocks)
        elif blocks or not vars(args[0].untyped_storage()).get("is_pinned"):
            counts.read("copy_")
    elif name in _SIZED_BY_VALUES or (
        name in _INDEXES and any(i is not None and i.dtype is torch.bool for i in args[1])
    ):
        counts.read(f"{name} by values")
    elif any(value.dim() for value in elsewhere):
        if name not in _INDEXES or not isinstance(args[0], Pretended):
            raise RuntimeError(f"Expected all tensors to be on the same device: {name}")
        counts.upload("index")
    if name not in _VIEWS:
        counts.launches[name] += counts.is_on
        if _captures.running is None:
            _streams.current.launch()
            _streams.current.has_scratch |= name in _MULTIPLY
        elif name in _MULTIPLY and _streams.current.has_scratch:
            raise RuntimeError("a capture uses memory of a library that it does not own")


class _Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Called(TorchFunctionMode):
    """What goes to the host or comes from it before anything is dispatched."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention and isinstance(args[0], Pretended):
            counts.launches["attention"] += counts.is_on
            here = [value for value in _tensors((args, kwargs)) if isinstance(value, Pretended)]
            counts.plans += counts.is_on and torch.backends.cuda.cudnn_sdp_enabled()
            place = _place_of("attention", args, here)
            raw_args, raw_kwargs = _mapped(_raw, (args, kwargs))
            with torch._C.DisableTorchFunction():
                return Pretended(Graph.run("attention", func, raw_args, raw_kwargs), place)
        if func in (torch.tensor, torch.as_tensor) and _is_here(kwargs.get("device")):
            counts.upload("tensor")
            return Pretended(func(*args, **kwargs | {"device": "cpu"}), torch.device(kwargs["device"]))
        if func is torch.Tensor.pin_memory or kwargs.pop("pin_memory", False):
            pinned = args[0].clone() if func is torch.Tensor.pin_memory else func(*args, **kwargs)
            vars(pinned.untyped_storage())["is_pinned"] = True
            return pinned
        if func is torch.Tensor.tolist and isinstance(args[0], Pretended):
            counts.read("tolist")
            return args[0].raw.tolist()
        return func(*args, **kwargs)


# A device is torch's; modes of others are left to plain `generate`.
_Called.__module__ = _Dispatched.__module__ = "torch"


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.at, self.known = 0.0, Counter[_Stream]()

    def record(self, stream: Any = None) -> None:
        self.at, self.known = time.perf_counter(), (stream or _streams.current).known()

    def synchronize(self) -> None:
        if any(count > _Stream.finished[stream] for stream, count in self.known.items()):
            counts.read("event")
        _streams.current.deliver()

    def elapsed_time(self, later: _Event) -> float:
        return 1e3 * (later.at - self.at)


_numbers = itertools.count()


class _Stream:
    """Work of one thread; memory that it uses may be given to another stream, which has to wait for it before."""

    finished: ClassVar[Counter[_Stream]] = Counter()  # what the host has waited for, of each stream

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream, self.launched = next(_numbers), 0
        self.late: list[tuple[torch.Tensor, torch.Tensor]] = []  # copies to the host that nobody has waited for yet
        self.has_scratch = False  # whether a library has memory there that may be freed before a graph is
        self._waited: Counter[_Stream] = Counter()

    def known(self) -> Counter[_Stream]:
        """What is done, of each stream, once what this one was handed so far is done."""
        return self._waited | Counter({self: self.launched})

    def record_event(self) -> _Event:
        (event := _Event()).record(self)
        return event

    def wait_event(self, event: _Event) -> None:
        self._waited |= event.known

    def wait_stream(self, other: _Stream) -> None:
        self.wait_event(other.record_event())

    def finish(self) -> None:
        """The host waits, and hands over what it does later to whatever stream afterwards."""
        self.deliver()
        with _finishing:
            _Stream.finished |= self.known()

    def deliver(self) -> None:
        """Copies what the host waits for, which it would not find without that."""
        for memory, value in self.late:
            memory.copy_(value)
        self.late.clear()

    def synchronize(self) -> None:
        counts.read("synchronize")

    def touch(self, inputs: Any, written: list[torch.Tensor]) -> None:
        """Raises where memory was last written by another stream, for which this one has not waited."""
        for tensor in _tensors(inputs):
            memory = vars(tensor.untyped_storage())
            stream, launched = memory.get("written", (self, 0))
            if stream is not self and launched > max(self._waited[stream], _Stream.finished[stream]):
                raise RuntimeError("memory is touched that another stream may still be writing")
            if memory.get("owner") not in (None, self) and self not in memory.get("streams", ()):
                raise RuntimeError("memory could be freed for its own stream while this one uses it")
        for tensor in written:
            vars(tensor.untyped_storage())["written"] = self, self.launched

    def own(self, tensors: list[torch.Tensor]) -> None:
        """What is freed is for the stream that it was made on; those of captures leave that to whoever captures."""
        for tensor in tensors:
            vars(tensor.untyped_storage()).setdefault("owner", self if self is _streams.default else None)

    def launch(self) -> None:
        self.launched += 1
        _streams.used.add(self)
        if any(self._waited[other] < other.launched for other in _streams.used - {self}):
            raise RuntimeError("work begins beside that of another stream, which may use the same memory")


class _Streams(threading.local):
    def __init__(self) -> None:
        is_first = threading.current_thread() is threading.main_thread()
        self.current = self.default = _first if is_first else _Stream()
        self.used: set[_Stream] = set()

    @contextmanager
    def during(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


_first, _finishing = _Stream(), threading.Lock()
_streams, _captures = _Streams(), _Captures()


# What ``torch.cuda`` is for a GPU, as far as it is used.
_MODULE: dict[str, Any] = {
    "_lazy_init": lambda: None,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=132),
    "mem_get_info": lambda device=None: (1 << 36, 1 << 36),
    "synchronize": lambda device=None: counts.read("synchronize"),
    "Event": _Event,
    "Stream": _Stream,
    "current_stream": lambda device=None: _streams.current,
    "default_stream": lambda device=None: _streams.default,
    "stream": _streams.during,
    "CUDAGraph": Graph,
    "empty_cache": lambda: None,
    "default_generators": (Mock(),),
    "graph_pool_handle": lambda: (0, next(_numbers)),
    "is_current_stream_capturing": lambda: _captures.running is not None,
}


@contextmanager
def pretended() -> Iterator[None]:
    """Makes the devices usable."""
    with ExitStack() as stack:
        for name, value in _MODULE.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        # Weights on a device have torch's own classes.
        stack.enter_context(patch.object(unseen, "_PLAIN_WEIGHTS", unseen._PLAIN_WEIGHTS | {Pretended}))
        stack.enter_context(patch.object(packing, "nn", SimpleNamespace(Parameter=Pretended, Linear=torch.nn.Linear)))
        kernels = {name: as_one(getattr(leaves, name)) for name in ("norm", "rotate", "activate")}
        modules = {f"{fused.__package__}.triton_leaves": SimpleNamespace(NORMS=leaves.NORMS, **kernels)}
        stack.enter_context(patch.dict(sys.modules, modules))
        stack.enter_context(patch.object(torch.backends.cuda, "can_use_efficient_attention", lambda _: True))
        # Else weights that move keep their objects, which are a CPU's.
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, False)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.enter_context(here())
        yield


@contextmanager
def here() -> Iterator[None]:
    """Makes the devices usable in a further thread."""
    with _Dispatched(), _Called():
        yield


def move(module: torch.nn.Module, device: torch.device = DEVICE) -> torch.nn.Module:
    """As ``to``, but in no stream."""
    return module._apply(lambda value: Pretended(value.detach(), device))


def spread(model: torch.nn.Module) -> None:
    """Moves a Llama to both devices, as ``device_map`` does: the second half of its layers, norm and head to another.

    accelerate's own hooks move what goes from one to the other.
    """
    inner, half = model.model, len(model.model.layers) // 2
    first, second = inner.layers[:half], inner.layers[half:]
    for module in (inner.embed_tokens, inner.rotary_emb, *first, *second, inner.norm, model.lm_head):
        place = OTHER if module in (*second, inner.norm, model.lm_head) else DEVICE
        add_hook_to_module(move(module, place), AlignDevicesHook(place, skip_keys=["past_key_values"]), append=True)
    add_hook_to_module(model, AlignDevicesHook(DEVICE, io_same_device=True), append=True)
