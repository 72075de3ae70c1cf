"""The weight gradient of a Kronecker-sparse product on CUDA cores: every size, dtype and layout (TIRx).

    block (i, tile of l, tile of j, tile of k; slice of the samples)
      for each bn samples:   gradient of y ── shared (n, j, l)      x ── shared (n, k, l)
        thread (j, k, l):    rj × rk sums in registers
      partial sums ── scratch ── added up by a second launch (ks_wgrad_sum.py)

Read first: `SimtPlan`, `_Kernel.emit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.schedules.ks_mma_limits import can_overlap
from kronsched.schedules.ks_mma_space import canonical_config, fitting_knobs
from kronsched.schedules.ks_parts import checked_space
from kronsched.schedules.ks_wgrad_cost import scratch_us
from kronsched.schedules.ks_wgrad_plan import slices
from kronsched.space import Config, SearchSpace, Value, load_knobs
from kronsched.workloads.base import TensorSpec, Workload
from kronsched.workloads.ks import Pattern
from kronsched.workloads.ks_wgrad import KSWeightGrad

if TYPE_CHECKING:
    from kronsched.hardware import Device

_KNOBS = ("tj", "tk", "tl", "rj", "rk", "bn", "waves")
_MOST_SUMS = {4: 64, 8: 32}
_MOST_THREADS = 512


@dataclass(frozen=True)
class SimtPlan:
    """One kernel: threads along j, k, l; sums of a thread along j, k; samples of a stage; slices of the samples."""

    pattern: Pattern
    batch: int
    dtype: str
    first: bool
    tj: int
    tk: int
    tl: int
    rj: int
    rk: int
    bn: int
    splits: int = 1

    @property
    def acc(self) -> str:
        """The dtype of sums and of shared memory."""
        return DTYPES[self.dtype].accumulate

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.tj * self.tk * self.tl

    @property
    def extents(self) -> tuple[int, int]:
        """Extents of a block along j and k."""
        return self.tj * self.rj, self.tk * self.rk

    @property
    def tiles(self) -> tuple[int, int, int, int]:
        """Tiles along i, l, j, k."""
        a, b, c, d = self.pattern
        jb, kb = self.extents
        return a, ceil(d / self.tl), ceil(b / jb), ceil(c / kb)

    @property
    def tile_count(self) -> int:
        """Tiles of all."""
        a, nl, nj, nk = self.tiles
        return a * nl * nj * nk

    @property
    def chunks(self) -> int:
        """Stages that all samples take."""
        return ceil(self.batch / self.bn)

    @property
    def elements(self) -> int:
        """Partial sums of a slice, those of padding too."""
        return self.tile_count * self.threads * self.rj * self.rk

    def pitch(self, side: int) -> int:
        """Elements from a sample of a stage to the next: odd, so that neighbouring samples are in different banks."""
        return self.extents[side] * self.tl | 1

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return DTYPES[self.acc].itemsize * self.bn * (self.pitch(0) + self.pitch(1))

    def split_tile(self, tile: Any) -> tuple[Any, Any, Any, Any]:
        """(i, first l, first j, first k) of a tile."""
        _, nl, nj, nk = self.tiles
        jb, kb = self.extents
        return tile // (nk * nj * nl), tile // (nk * nj) % nl * self.tl, tile // nk % nj * jb, tile % nk * kb

    def thread_at(self, tx: Any) -> tuple[Any, Any, Any]:
        """Where a thread is along j, k and l."""
        return tx // (self.tl * self.tk), tx // self.tl % self.tk, tx % self.tl

    def place(self, e: Any) -> tuple[Any, Any, Any, Any]:
        """(i, j, k, l) of partial sum number e of a slice; beyond the pattern for padding."""
        sums = self.rj * self.rk
        j, k, m = self.thread_at(e % self.threads)
        r = e // self.threads % sums
        i, l0, j0, k0 = self.split_tile(e // (self.threads * sums))
        return i, j0 + j + r // self.rk * self.tj, k0 + k + r % self.rk * self.tk, l0 + m


def plan_simt(w: KSWeightGrad, config: Config, device: Device) -> SimtPlan:
    """The plan of a config, cut to the extents. Raises InvalidConfig with one line."""
    tj, tk, tl, rj, rk, bn, waves = (int(config[name]) for name in _KNOBS)
    _, b, c, d = w.pattern
    tj, tk, tl = min(tj, b), min(tk, c), min(tl, d)
    rj, rk = min(rj, ceil(b / tj)), min(rk, ceil(c / tk))
    p = SimtPlan(w.pattern, w.batch, w.dtype, w.batch_first, tj, tk, tl, rj, rk, min(bn, w.batch))
    if p.threads > min(_MOST_THREADS, device.max_threads_per_block):
        raise InvalidConfig(f"{p.threads} threads a block")
    most = _MOST_SUMS[DTYPES[p.acc].itemsize]
    if rj * rk > most:
        raise InvalidConfig(f"{rj * rk} sums a thread, at most {most} are allowed")
    if p.shared_bytes > device.shared_per_block:
        raise InvalidConfig(f"{p.shared_bytes} bytes of shared memory, {device.name} has {device.shared_per_block} a block")
    splits = slices(p.batch, p.chunks, p.tile_count, p.elements, device.units * waves)
    return SimtPlan(w.pattern, w.batch, w.dtype, w.batch_first, tj, tk, tl, rj, rk, p.bn, splits)


class KSWgradSimt(Schedule):
    """SIMT schedule for KSWeightGrad: float32, float64, float16 and bfloat16, both layouts."""

    name: ClassVar[str] = "ks_wgrad_simt"
    family: ClassVar[str] = "ks_wgrad"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.1

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/ks_wgrad_simt.toml, less the values that mean nothing at this shape."""
        assert isinstance(workload, KSWeightGrad)
        _, b, c, d = workload.pattern
        knobs = fitting_knobs(load_knobs(self.name), {"tj": b, "tk": c, "tl": d, "rj": b, "rk": c})
        values = {k.name: k.values for k in knobs}
        return checked_space(
            self.name, knobs, lambda config: canonical_config(config, values, partial(self._plans, workload, device))
        )

    def default_config(self, workload: Workload, device: Device) -> Config:
        """256 threads, l first, and 4 × 4 sums; four blocks for each multiprocessor."""
        assert isinstance(workload, KSWeightGrad)
        values: dict[str, tuple[Value, ...]] = {k.name: k.values for k in self.space(workload, device).knobs}
        tl = _at_most(values["tl"], 16)
        across = _at_most(values["tk"], 16 if tl < 8 else 4)
        wanted = {"tl": tl, "tk": across, "tj": max(1, 256 // (tl * across)), "rj": 4, "rk": 4, "bn": 16, "waves": 4}
        config: dict[str, Value] = {name: _at_most(listed, wanted[name]) for name, listed in values.items()}
        return canonical_config(config, values, partial(self._plans, workload, device))

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """Two launches: partial sums of slices of the samples, and their sums. Scratch: p."""
        import tvm

        from kronsched.schedules.ks_wgrad_sum import sum_kernel

        assert isinstance(workload, KSWeightGrad)
        p, overlap = plan_simt(workload, config, device), can_overlap(device)
        last = sum_kernel(p.pattern, p.dtype, p.acc, p.splits, p.elements, p.place, overlap)
        launches = Launch("ks_wgrad", ("g", "x", "p"), overlap), Launch("ks_wgrad_sum", ("p", "dw"), overlap)
        scratch = TensorSpec("p", (p.splits * p.elements,), p.acc)
        return Scheduled(tvm.IRModule({"ks_wgrad": _kernel(p, overlap), "ks_wgrad_sum": last}), launches, (scratch,))

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Traffic, waves, useful share, a roofline time (µs)."""
        assert isinstance(workload, KSWeightGrad)
        p = plan_simt(workload, config, device)
        jb, kb = p.extents
        item = DTYPES[p.dtype].itemsize
        work = 2.0 * p.batch * p.tile_count * jb * kb * p.tl
        read = p.batch * p.tile_count * p.tl * (jb + kb) * item
        peak = device.peak_gflops["float64" if p.dtype == "float64" else "float32"]
        return {
            "l2_mb": read / 1e6,
            "shared_mb": p.tile_count * p.threads * p.batch * (p.rj + p.rk) * DTYPES[p.acc].itemsize / 1e6,
            "scratch_us": scratch_us(p, device, DTYPES[p.acc].itemsize),
            "roofline_us": max(workload.min_bytes / device.bandwidth_gbs, work / peak) / 1e3,
            "useful": workload.flops / work,
            "blocks": float(p.tile_count * p.splits),
            "waves": p.tile_count * p.splits / device.units,
            "threads": float(p.threads),
            "sums": float(p.rj * p.rk),
            "shared_kb": p.shared_bytes / 1024,
            "splits": float(p.splits),
        }

    def _plans(self, workload: KSWeightGrad, device: Device, config: Config) -> list[SimtPlan]:
        return [plan_simt(workload, config, device)]


def _at_most(values: tuple[Value, ...], want: int) -> int:
    """The largest listed number up to `want`, else the smallest."""
    listed = sorted(int(v) for v in values)
    return max((v for v in listed if v <= want), default=listed[0])


# -- the program ----------------------------------------------------------------------------------------


def _kernel(plan: SimtPlan, overlap: bool) -> Any:
    """The PrimFunc over the flat g (gradient of y), x and the partial sums p."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    a, b, c, d = plan.pattern
    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name("ks_wgrad")
            g = I.arg("g", I.buffer((plan.batch * a * b * d,), plan.dtype))
            x = I.arg("x", I.buffer((plan.batch * a * c * d,), plan.dtype))
            p = I.arg("p", I.buffer((plan.splits * plan.elements,), plan.acc))
            I.device_entry()
            _Kernel(plan, (g, x), p).emit(overlap)
        return builder.get()


class _Kernel:
    """A kernel under construction. A "side" is 0 for the gradient, with j, or 1 for x, with k."""

    def __init__(self, plan: SimtPlan, sources: tuple[Any, Any], p: Any) -> None:
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as I

        self.plan, self.sources, self.p = plan, sources, p
        name, bind = IRBuilder.name, I.Bind
        self.cta = name("cta", I.cta_id([plan.tile_count * plan.splits]))
        self.tx = name("tx", I.thread_id([plan.threads]))
        i, l0, *first = plan.split_tile(self.cta % plan.tile_count)
        self.i, self.l0, self.first_of = name("i", bind(i)), name("l0", bind(l0)), [bind(f) for f in first]
        part = self.cta // plan.tile_count
        self.chunk0 = name("chunk0", bind(part * plan.chunks // plan.splits))
        self.count = name("count", bind((part + 1) * plan.chunks // plan.splits - self.chunk0))
        *self.at, self.m = (bind(t) for t in plan.thread_at(self.tx))
        self.shared = name(
            "sm", I.alloc_buffer((plan.bn * (plan.pitch(0) + plan.pitch(1)),), plan.acc, scope="shared.dyn", align=128)
        )
        self.sums = name("sums", I.alloc_local([plan.rj * plan.rk], plan.acc))
        self.held = [name(f"held{s}", I.alloc_local([(plan.rj, plan.rk)[s]], plan.acc)) for s in range(2)]

    def emit(self, overlap: bool) -> None:
        """The body."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        plan = self.plan
        for q in range(plan.rj * plan.rk):
            I.buffer_store(self.sums, T.Cast(plan.acc, 0), [q])
        if overlap:
            I.evaluate(T.ptx.griddepcontrol.wait())
        with I.serial(0, self.count) as it:
            for side in range(2):
                self._fetch(side, self.chunk0 + it)
            I.evaluate(T.cuda.cta_sync())
            with I.serial(0, plan.bn) as n:
                self._multiply(n)
            I.evaluate(T.cuda.cta_sync())
        if overlap:
            I.evaluate(T.ptx.griddepcontrol.launch_dependents())
        for q in range(plan.rj * plan.rk):
            I.buffer_store(self.p, self.sums[q], [(self.cta * (plan.rj * plan.rk) + q) * plan.threads + self.tx])

    def _fetch(self, side: int, chunk: Any) -> None:
        """The samples of a chunk into shared memory, widened; zeros beyond the ends."""
        from tvm.script import tirx as T
        from tvm.tirx.script.builder import ir as I

        plan = self.plan
        a, d, extent = plan.pattern[0], plan.pattern[3], plan.pattern[1 + side]
        features = plan.extents[side] * plan.tl
        start = plan.bn * plan.pitch(0) * side
        with I.serial(0, ceil(plan.bn * features / plan.threads)) as e:
            at = I.Bind(e * plan.threads + self.tx)
            row, f = (at // features, at % features) if plan.first else (at % plan.bn, at // plan.bn)
            j, m, n = I.Bind(self.first_of[side] + f // plan.tl), I.Bind(self.l0 + f % plan.tl), I.Bind(chunk * plan.bn + row)
            feature = (self.i * extent + j) * d + m
            place = n * (a * extent * d) + feature if plan.first else feature * plan.batch + n
            fine = I.Bind(T.And(T.And(j < extent, m < d), n < plan.batch))
            with I.If(at < plan.bn * features), I.Then():
                value = self.sources[side][T.Select(fine, place, 0)]
                I.buffer_store(
                    self.shared,
                    T.Select(fine, T.Cast(plan.acc, value), T.Cast(plan.acc, 0)),
                    [start + row * plan.pitch(side) + f],
                )

    def _multiply(self, n: Any) -> None:
        """One sample: the thread's outer product."""
        from tvm.tirx.script.builder import ir as I

        plan = self.plan
        for side, (across, count) in enumerate(((plan.tj, plan.rj), (plan.tk, plan.rk))):
            start = plan.bn * plan.pitch(0) * side + n * plan.pitch(side) + self.m
            for r in range(count):
                I.buffer_store(self.held[side], self.shared[start + (self.at[side] + r * across) * plan.tl], [r])
        for q in range(plan.rj * plan.rk):
            I.buffer_store(self.sums, self.sums[q] + self.held[0][q // plan.rk] * self.held[1][q % plan.rk], [q])
