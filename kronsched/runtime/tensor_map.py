"""Tensor maps: the descriptors by which Hopper's TMA copies tiles between global and shared memory.

A kernel takes a map by value, as a parameter `const __grid_constant__ CUtensorMap`. Its program says on the host side what the
map describes, by TVM's own call

    T.call_packed("runtime.cuTensorMapEncodeTiled", map, dtype, rank, tensor.data, extents…, strides…, box…, steps…,
                  interleave, swizzle, l2, fill)

which `tensor_maps` reads; `MapCache` encodes the map for the address that a tensor has in a call.

Read first: `TensorMap`.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kronsched.dtypes import DTYPES
from kronsched.errors import CompileError

ENCODE = "runtime.cuTensorMapEncodeTiled"
NBYTES = 128
_SWIZZLES = {0: "none", 1: "32B", 2: "64B", 3: "128B"}
_KEPT = 64

# cuda.h defines the type, but NVRTC has no cuda.h: the same size and alignment there.
DECLARATION = """\
#ifdef __CUDACC_RTC__
struct alignas(64) CUtensorMap_st { unsigned long long opaque[16]; };
typedef struct CUtensorMap_st CUtensorMap;
#endif
"""


@dataclass(frozen=True)
class TensorMap:
    """One tensor map: a grid of boxes over a tensor, with zeros beyond its ends.

    name: of the kernel's parameter.  tensor: which tensor's address it starts at.  dtype: of the elements.  extents: of each
    dimension, fastest first.  strides: bytes, of every dimension but the fastest.  box: elements a copy moves, by dimension.
    swizzle: bits of the shared-memory swizzle, 0 none, 1, 2, 3 for 32, 64, 128 bytes.  l2: what the L2 cache fetches at a time, 0
    none, 1, 2, 3 for 64, 128, 256 bytes.
    """

    name: str
    tensor: str
    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    l2: int = 0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TensorMap:
        """Rebuild from JSON; raises KeyError, TypeError or ValueError on malformed data."""
        extents, strides, box = (tuple(_size(n) for n in data[name]) for name in ("extents", "strides", "box"))
        name, tensor, dtype = (str(data[name]) for name in ("name", "tensor", "dtype"))
        return cls(name, tensor, dtype, extents, strides, box, _size(data["swizzle"]), _size(data["l2"])).checked()

    def checked(self) -> TensorMap:
        """Itself; ValueError when the driver would refuse it (CUDA driver API, cuTensorMapEncodeTiled)."""
        rank = len(self.extents)
        if self.dtype not in DTYPES or not 1 <= rank <= 5 or len(self.strides) != rank - 1 or len(self.box) != rank:
            raise ValueError(f"tensor map {self.name}: dtype, extents, strides and box do not fit each other")
        if any(s % 16 or not 0 < s < 2**40 for s in self.strides):
            raise ValueError(f"tensor map {self.name}: strides {self.strides} must be multiples of 16 bytes")
        if not all(1 <= n <= 256 for n in self.box) or not all(1 <= n <= 2**32 for n in self.extents):
            raise ValueError(f"tensor map {self.name}: box {self.box} or extents {self.extents} are out of range")
        row = self.box[0] * DTYPES[self.dtype].itemsize
        if row % 16 or self.swizzle not in _SWIZZLES or (self.swizzle and row > 16 << self.swizzle) or self.l2 not in range(4):
            raise ValueError(f"tensor map {self.name}: a row of {row} bytes does not fit swizzle={self.swizzle}, l2={self.l2}")
        return self

    def describe(self) -> str:
        """One line for the head of a source."""
        layout = f"{self.extents} strides={self.strides} box={self.box} swizzle={_SWIZZLES[self.swizzle]} l2={self.l2}"
        return f"tensor map {self.name}: {self.tensor} {self.dtype} {layout}"


def tensor_maps(func: Any) -> tuple[TensorMap, ...]:
    """The tensor maps that a PrimFunc encodes on its host side, by name; CompileError for one that is not understood."""
    import tvm
    import tvm_ffi

    calls: list[Any] = []

    def visit(call: Any) -> None:
        if getattr(call.op, "name", None) == "tirx.tvm_call_packed" and str(getattr(call.args[0], "value", "")) == ENCODE:
            calls.append(call)

    tvm_ffi.structural_walk(func.body, (tvm.ir.Call, visit))
    return tuple(sorted((_parsed(list(call.args)[1:]) for call in calls), key=lambda m: m.name))


def _parsed(args: list[Any]) -> TensorMap:
    try:
        name, dtype, rank = str(args[0].name), str(args[1].value), int(args[2])
        tensor = str(args[3].args[0].name)  # of tirx.buffer_data(tensor)
        numbers = [int(a) for a in args[4:]]
        parts = []
        for length in (rank, rank - 1, rank, rank):
            parts.append(tuple(numbers[:length]))
            del numbers[:length]
        extents, strides, box, steps = parts
        interleave, swizzle, l2, fill = numbers
        if interleave or fill or any(s != 1 for s in steps):
            raise ValueError("interleave, fill and element strides are not supported")
        return TensorMap(name, tensor, dtype, extents, strides, box, swizzle, l2).checked()
    except (AttributeError, TypeError, ValueError, KeyError) as e:
        raise CompileError(f"a tensor map is not understood: {e}") from e


class MapCache:
    """The encoded forms of one tensor map, by address: encoding takes longer than a launch."""

    def __init__(self, spec: TensorMap, encode: Callable[[TensorMap, int], bytes]) -> None:
        """Take what the map describes, and the function that encodes it for an address into 128 bytes."""
        self.spec = spec
        self._encode = encode
        self._known: OrderedDict[int, Any] = OrderedDict()

    def address(self, tensor: int) -> int:
        """Where the encoded map of a tensor at an address lies; valid until 64 other addresses were asked for."""
        found = self._known.get(tensor)
        if found is None:
            found = (ctypes.c_uint64 * (NBYTES // 8)).from_buffer_copy(self._encode(self.spec, tensor))
            self._known[tensor] = found
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(tensor)
        return ctypes.addressof(found)


def encode(driver: Any, spec: TensorMap, address: int) -> bytes:
    """The 128 bytes of a tensor map for a tensor at a device address, by the CUDA driver. RuntimeError when it refuses."""
    size = DTYPES[spec.dtype].itemsize
    kind = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_data_type(spec.dtype)}")
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    status, encoded = driver.cuTensorMapEncodeTiled(
        kind,
        len(spec.extents),
        address,
        [wide(n) for n in spec.extents],
        [wide(n) for n in (spec.strides or (spec.extents[0] * size,))],
        [narrow(n) for n in spec.box],
        [narrow(1) for _ in spec.box],
        driver.CUtensorMapInterleave(0),
        driver.CUtensorMapSwizzle(spec.swizzle),
        driver.CUtensorMapL2promotion(spec.l2),
        driver.CUtensorMapFloatOOBfill(0),
    )
    if int(status) != 0:
        raise RuntimeError(f"{spec.describe()} failed: {getattr(status, 'name', status)}")
    return ctypes.string_at(encoded.getPtr(), NBYTES)


def _data_type(dtype: str) -> str:
    """The driver's name of an element type; 8-bit floats move as bytes."""
    named = {"float16": "FLOAT16", "bfloat16": "BFLOAT16", "float32": "FLOAT32", "float64": "FLOAT64", "int32": "INT32"}
    return named.get(dtype, "UINT8")


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} must be an int ≥ 0")
    return value
