"""4-bit weights and many rows: dequantise, then multiply with torch's library. From how many rows on is a matter of record.

A fused kernel reads the weights once a tile of rows, so for many rows a dense product is faster, although the weights are
written out first. Where that begins depends on GPU and shape and is measured (`measure`), stored (`save`) and looked up
(`crossover`): in `w4a16_library.json` of the user's log folder, then in the shipped ones. Without a record for the device the
library is not used.

The weights are rounded to 16 bits before this product, as everybody's dequantised weights are, while the fused kernels scale
exact integers: its results are less exact by about that rounding (tests/nn/test_w4a16_cuda.py bounds it).

Read first: `LibraryProduct`, `crossover`. The kernel that dequantises is in kronsched/schedules/dequantise_cuda.py.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock
from torch import Tensor
from torch.nn.functional import linear

from kronsched.errors import RecordError
from kronsched.records import database
from kronsched.runtime.cache import get_or_build
from kronsched.runtime.executable import load_executable
from kronsched.schedules.dequantise_cuda import DequantiseCuda
from kronsched.workloads.dequantise import Dequantise
from kronsched.workloads.gemm import MAX_ELEMENTS

if TYPE_CHECKING:
    from kronsched.hardware import Device
    from kronsched.runtime.executable import Executable
    from kronsched.workloads.gemm import Gemm

FILE = "w4a16_library.json"
ROWS = (32, 64, 96, 128, 256, 512, 1024)
"""Numbers of rows that `measure` tries."""
_SETS = 4  # copies of the weights, so that small ones do not all come from cache


class LibraryProduct:
    """Y = X W by a dense product, for the weights of one workload on one device. Nothing is kept between calls."""

    def __init__(self, one: Gemm, device: Device) -> None:
        """Nothing is built yet. one: the workload with m=1."""
        self._one, self._device = one, device
        self._dequantise = Dequantise.of(one)

    def prepare(self) -> None:
        """Build and load what calls need."""
        if self._has_kernel:
            _ = self._kernel

    def dense(self, weights: Sequence[Tensor]) -> Tensor:
        """The weights (n_packed, k_packed), packed order and padding included; on a CPU in float32."""
        inputs = list(weights[: len(self._dequantise.inputs)])
        if self._device.kind == "cpu":
            return self._dequantise.values(*inputs)
        dtype = weights[1].dtype
        if not self._has_kernel:
            return self._dequantise.values(*inputs).to(dtype)
        out = torch.empty(self._dequantise.output.shape, dtype=dtype, device=weights[0].device)
        self._kernel([_aligned(t) for t in inputs], out)
        return out

    def __call__(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Y (m, n) of x (m, k) and the flat tensors of the weights, without autograd; sums in float32."""
        n, k = self._one.n, self._one.k
        dense = self.dense(weights)[:n]
        rows = x.to(dense.dtype)
        if self._one.act_order:
            perm = weights[-1]
            rows = torch.where(perm >= 0, rows.index_select(1, perm.clamp(min=0).long()), rows.new_zeros(()))
        else:
            dense = dense[:, :k]
        with _sums_in_float32(x):
            return linear(rows, dense).to(x.dtype)

    def gradient(self, grad: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The gradient of x (m, k) from that of Y (m, n)."""
        n, k = self._one.n, self._one.k
        dense = self.dense(weights)[:n]
        with _sums_in_float32(grad):
            rows = (grad.to(dense.dtype) @ dense).to(grad.dtype)
        if not self._one.act_order:
            return rows[:, :k].contiguous()
        perm = weights[-1].long()
        return rows.new_zeros((len(rows), k + 1)).index_copy_(1, torch.where(perm >= 0, perm, k), rows)[:, :k].contiguous()

    @property
    def _has_kernel(self) -> bool:
        """Whether the kernel's 32-bit indices reach all weights, on a GPU."""
        return self._device.kind == "cuda" and self._dequantise.output.size <= MAX_ELEMENTS

    @cached_property
    def _kernel(self) -> Executable:
        artefact = get_or_build(self._dequantise, DequantiseCuda(), {}, self._device)
        return load_executable(artefact, self._device.index or 0)


def _aligned(t: Tensor) -> Tensor:
    """A contiguous tensor that starts on 16 bytes, as the kernel loads so many at once."""
    return t if t.is_contiguous() and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


@contextlib.contextmanager
def _sums_in_float32(x: Tensor) -> Iterator[None]:
    """No partial sums in 16 bits inside cuBLAS, which torch allows it by default; the setting is restored."""
    settings = torch.backends.cuda.matmul
    name = f"allow_{'fp16' if x.dtype == torch.float16 else 'bf16'}_reduced_precision_reduction"
    before = getattr(settings, name) if x.is_cuda else False
    if not before:
        yield
        return
    setattr(settings, name, False)
    try:
        yield
    finally:
        setattr(settings, name, before)


# -- from how many rows on -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Crossover:
    """What was measured for one shape of weights on one model of device.

    rows: the library is used from so many rows on; None when it was slower at every number of rows tried.  times: by the number
    of rows tried, (microseconds of the kernels, microseconds of the library with dequantising).
    """

    device: str
    n: int
    k: int
    a_dtype: str
    group_size: int
    zero_point: str
    act_order: bool
    rows: int | None
    times: Mapping[int, tuple[float, float]]

    @classmethod
    def from_dict(cls, data: Any) -> Crossover:
        """The inverse of `asdict` after JSON; RecordError for anything else."""
        try:
            times = {int(m): (float(ours), float(theirs)) for m, (ours, theirs) in data["times"].items()}
            rows = None if data["rows"] is None else int(data["rows"])
            n, k, group_size = (int(data[name]) for name in ("n", "k", "group_size"))
            device, a_dtype, zero_point = (str(data[name]) for name in ("device", "a_dtype", "zero_point"))
            if n < 1 or k < 1 or (rows is not None and rows < 1):
                raise ValueError("sizes below 1")
            return cls(device, n, k, a_dtype, group_size, zero_point, bool(data["act_order"]), rows, times)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise RecordError(f"no record of a crossover: {type(error).__name__}: {error}") from None


def crossover(one: Gemm, device: Device) -> Crossover | None:
    """The record for weights on a device: theirs, else that of the most similar kind, and of the nearest shape among these."""

    def distance(c: Crossover) -> tuple[int, float]:
        kinds = ("a_dtype", "zero_point", "act_order", "group_size")
        different = sum(getattr(c, name) != getattr(one, name) for name in kinds)
        return different, abs(log2(c.n / one.n)) + abs(log2(c.k / one.k))

    fitting: dict[tuple[Any, ...], Crossover] = {}
    for c in recorded():
        if c.device == device.name:
            fitting.setdefault(_key(c), c)
    return min(fitting.values(), key=distance, default=None)


def recorded(folders: Sequence[Path] | None = None) -> list[Crossover]:
    """Every record, the user's first. What cannot be read is passed over."""
    found = []
    for folder in database.search_dirs() if folders is None else folders:
        for path in sorted(folder.rglob(FILE)):
            found += _read(path)
    return found


def save(record: Crossover, path: Path | None = None) -> Path:
    """Put a record into a file (the user's by default), in place of an older one for the same weights and device."""
    path = database.user_dir() / FILE if path is None else path
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        kept = [c for c in _read(path) if _key(c) != _key(record)]
        lines = ",\n".join(" " + json.dumps(asdict(c)) for c in [*kept, record])
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8") as file:
            file.write(f"[\n{lines}\n]\n")
        Path(file.name).chmod(0o644)
        Path(file.name).replace(path)
    return path


def _read(path: Path) -> list[Crossover]:
    found = []
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        for entry in content if isinstance(content, list) else []:
            with contextlib.suppress(RecordError):
                found.append(Crossover.from_dict(entry))
    return found


def _key(c: Crossover) -> tuple[Any, ...]:
    return (c.device, c.n, c.k, c.a_dtype, c.group_size, c.zero_point, c.act_order)


def measure(
    one: Gemm,
    device: Device,
    kernels: Callable[[Tensor, list[Tensor]], Tensor],
    library: Callable[[Tensor, list[Tensor]], Tensor],
    rows: Sequence[int] = ROWS,
) -> Crossover:
    """Time both ways at each number of rows. kernels, library: (x, flat weights) -> y."""
    from kronsched.measure.baseline import time_callable

    times: dict[int, tuple[float, float]] = {}
    for m in sorted(set(rows)):
        sets = [replace(one, m=m).make_inputs(seed, device.torch_device) for seed in range(_SETS)]
        pair = []
        for way in (kernels, library):
            calls = [lambda way=way, x=x, w=w: way(x, w) for x, *w in sets]
            calls[0]()  # builds, and sets up the library
            pair.append(time_callable(calls, device))
        times[m] = (pair[0], pair[1])
    return Crossover(
        device.name, one.n, one.k, one.a_dtype, one.group_size, one.zero_point, one.act_order, first_faster(times), times
    )


def first_faster(times: Mapping[int, tuple[float, float]]) -> int | None:
    """The smallest number of rows from which on the library was faster at every one tried."""
    first = None
    for m in sorted(times, reverse=True):
        ours, library = times[m]
        if library >= ours:
            break
        first = m
    return first
