"""Tensor maps: the descriptors by which Hopper's TMA copies tiles between global and shared memory.

A kernel takes a map by value, as a parameter `const __grid_constant__ CUtensorMap`. Its program says on the host side what the
map describes, by TVM's own call

    T.call_packed("runtime.cuTensorMapEncodeTiled", map, dtype, rank, tensor.data, extents…, strides…, box…, steps…,
                  interleave, swizzle, l2, fill)

which `tensor_maps` reads; `MapCache` encodes the map for the address that a tensor has in a call. A map in im2col mode (a copy
moves the pixels of an image that consecutive pixels of a convolution see through one tap of its kernel) is said by

    T.call_packed("kronsched.cuTensorMapEncodeIm2col", map, dtype, rank, tensor.data, extents…, strides…, lower…, upper…,
                  channels, pixels, steps…, interleave, swizzle, l2, fill)

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
ENCODE_IM2COL = "kronsched.cuTensorMapEncodeIm2col"
NBYTES = 128
_CALLS = (ENCODE, ENCODE_IM2COL)
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

    Im2col mode (NHWC: extents are c, w, h, n), when `steps` is given: box is (channels, pixels); the pixels are taken one after
    another from the box of each image whose corners are `lower` and the image's end plus `upper`, `steps` apart, both (along w,
    along h).
    """

    name: str
    tensor: str
    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    l2: int = 0
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TensorMap:
        """Rebuild from JSON; raises KeyError, TypeError or ValueError on malformed data."""
        extents, strides, box = (tuple(_size(n) for n in data[name]) for name in ("extents", "strides", "box"))
        name, tensor, dtype = (str(data[name]) for name in ("name", "tensor", "dtype"))
        lower, upper = (tuple(_corner(n) for n in data.get(key, ())) for key in ("lower", "upper"))
        steps = tuple(_size(n) for n in data.get("steps", ()))
        swizzle, l2 = _size(data["swizzle"]), _size(data["l2"])
        return cls(name, tensor, dtype, extents, strides, box, swizzle, l2, lower, upper, steps).checked()

    def checked(self) -> TensorMap:
        """Itself; ValueError when the driver would refuse it (CUDA driver API, cuTensorMapEncodeTiled)."""
        rank = len(self.extents)
        sides = 2 if self.steps else rank
        if self.dtype not in DTYPES or not 1 <= rank <= 5 or len(self.strides) != rank - 1 or len(self.box) != sides:
            raise ValueError(f"tensor map {self.name}: dtype, extents, strides and box do not fit each other")
        self._check_im2col()
        if any(s % 16 or not 0 < s < 2**40 for s in self.strides):
            raise ValueError(f"tensor map {self.name}: strides {self.strides} must be multiples of 16 bytes")
        most = (256, 1024) if self.steps else (256,) * rank
        fits = all(1 <= n <= limit for n, limit in zip(self.box, most, strict=True))
        if not fits or not all(1 <= n <= 2**32 for n in self.extents):
            raise ValueError(f"tensor map {self.name}: box {self.box} or extents {self.extents} are out of range")
        row = self.box[0] * DTYPES[self.dtype].itemsize
        if row % 16 or self.swizzle not in _SWIZZLES or (self.swizzle and row > 16 << self.swizzle) or self.l2 not in range(4):
            raise ValueError(f"tensor map {self.name}: a row of {row} bytes does not fit swizzle={self.swizzle}, l2={self.l2}")
        return self

    def _check_im2col(self) -> None:
        """ValueError for corners and steps that the driver would refuse."""
        corners = (*self.lower, *self.upper)
        if not self.steps and not corners:
            return
        if self.swizzle and self.box[:1] and self.box[0] * DTYPES[self.dtype].itemsize != 16 << self.swizzle:
            raise ValueError(f"tensor map {self.name}: channels of a box {self.box} must fill the swizzle in im2col mode")
        fits = len(self.extents) == 4 and len(self.lower) == len(self.upper) == len(self.steps) == 2
        if not fits or not all(-128 <= n <= 127 for n in corners) or not all(1 <= n <= 8 for n in self.steps):
            raise ValueError(
                f"tensor map {self.name}: lower={self.lower}, upper={self.upper}, steps={self.steps} are out of range"
            )

    def describe(self) -> str:
        """One line for the head of a source."""
        layout = f"{self.extents} strides={self.strides} box={self.box} swizzle={_SWIZZLES[self.swizzle]} l2={self.l2}"
        layout += f" im2col lower={self.lower} upper={self.upper} steps={self.steps}" if self.steps else ""
        return f"tensor map {self.name}: {self.tensor} {self.dtype} {layout}"


def tensor_maps(func: Any) -> tuple[TensorMap, ...]:
    """The tensor maps that a PrimFunc encodes on its host side, by name; CompileError for one that is not understood."""
    import tvm
    import tvm_ffi

    calls: list[Any] = []

    def visit(call: Any) -> None:
        if getattr(call.op, "name", None) == "tirx.tvm_call_packed" and str(getattr(call.args[0], "value", "")) in _CALLS:
            calls.append(call)

    tvm_ffi.structural_walk(func.body, (tvm.ir.Call, visit))
    return tuple(sorted((_parsed(list(call.args)) for call in calls), key=lambda m: m.name))


def _parsed(args: list[Any]) -> TensorMap:
    try:
        im2col = str(args.pop(0).value) == ENCODE_IM2COL
        name, dtype, rank = str(args[0].name), str(args[1].value), int(args[2])
        tensor = str(args[3].args[0].name)  # of tirx.buffer_data(tensor)
        numbers = [int(a) for a in args[4:]]
        parts = []
        for length in (rank, rank - 1, rank - 2, rank - 2, 2, rank) if im2col else (rank, rank - 1, rank, rank):
            parts.append(tuple(numbers[:length]))
            del numbers[:length]
        interleave, swizzle, l2, fill = numbers
        (extents, strides), (box, steps) = parts[:2], parts[-2:]
        if interleave or fill or steps[0] != 1 or steps[-1] != 1 or not (im2col or all(s == 1 for s in steps)):
            raise ValueError("interleave, fill and element strides are not supported")
        corners = (parts[2], parts[3], steps[1:-1]) if im2col else ()
        return TensorMap(name, tensor, dtype, extents, strides, box, swizzle, l2, *corners).checked()
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
    rank = len(spec.extents)
    extents, strides = [wide(n) for n in spec.extents], [wide(n) for n in (spec.strides or (spec.extents[0] * size,))]
    how = (
        driver.CUtensorMapInterleave(0),
        driver.CUtensorMapSwizzle(spec.swizzle),
        driver.CUtensorMapL2promotion(spec.l2),
        driver.CUtensorMapFloatOOBfill(0),
    )
    steps = [narrow(n) for n in (1, *(spec.steps or (1,) * (rank - 2)), 1)][:rank]
    if spec.steps:
        window = (list(spec.lower), list(spec.upper), *spec.box)
        status, encoded = driver.cuTensorMapEncodeIm2col(kind, rank, address, extents, strides, *window, steps, *how)
    else:
        box = [narrow(n) for n in spec.box]
        status, encoded = driver.cuTensorMapEncodeTiled(kind, rank, address, extents, strides, box, steps, *how)
    if int(status) != 0:
        raise RuntimeError(f"{spec.describe()} failed: {getattr(status, 'name', status)}")
    return ctypes.string_at(encoded.getPtr(), NBYTES)


def _data_type(dtype: str) -> str:
    """The driver's name of an element type; 8-bit floats move as bytes."""
    named = {"float16": "FLOAT16", "bfloat16": "BFLOAT16", "float32": "FLOAT32", "float64": "FLOAT64", "int32": "INT32"}
    return named.get(dtype, "UINT8")


def _corner(value: Any) -> int:
    return -_size(-value) if isinstance(value, int) and value < 0 else _size(value)


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} must be an int ≥ 0")
    return value
