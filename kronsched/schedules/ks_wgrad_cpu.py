"""The weight gradient of a Kronecker-sparse product on a CPU from TensorIR by Schedule primitives, for LLVM.

    along   a vector holds        register tile
    "k"     neighbouring k        tile outputs j × vectors of k
    "l"     neighbouring l        tile outputs j × `vectors` of k
    "n"     neighbouring samples  tile outputs j × `vectors` of k, one sum a sample; added up at the end

A tile of sums stays in vector registers while the samples run outside of it; cores share the tiles. Where a tile does not divide
an extent, the last tile is moved back until it fits: what two tiles share is computed twice, with the same result.

Read first: `_program` (the TensorIR), `_schedule` (the primitives).
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
from kronsched.schedules.kron_cpu_plan import register_count
from kronsched.schedules.ks_mma_space import canonical_config
from kronsched.schedules.ks_parts import checked_space
from kronsched.space import Config, Knob, SearchSpace, Value, load_knobs
from kronsched.workloads.base import Workload
from kronsched.workloads.ks import Pattern
from kronsched.workloads.ks_wgrad import KSWeightGrad

if TYPE_CHECKING:
    from kronsched.hardware import Device

_SERIAL_FLOPS = 250_000


@dataclass(frozen=True)
class CpuPlan:
    """Extents of the register tile along j, k, l, and of the samples that one vector of sums takes (batch last)."""

    pattern: Pattern
    batch: int
    first: bool
    along: str
    lanes: int
    tile_j: int
    tile_k: int
    tile_l: int
    tile_n: int
    parallel: bool

    @property
    def vector(self) -> int:
        """Extent of the vectorised dimension."""
        return {"k": self.tile_k, "l": self.tile_l, "n": self.tile_n}[self.along]

    @property
    def sums(self) -> int:
        """Vector registers that hold sums."""
        return self.tile_j * self.tile_k * self.tile_l * self.tile_n // self.vector * ceil(self.vector / self.lanes)

    @property
    def tiles(self) -> tuple[int, int, int]:
        """Tiles along j, k, l."""
        _, b, c, d = self.pattern
        return ceil(b / self.tile_j), ceil(c / self.tile_k), ceil(d / self.tile_l)


def plan_cpu(w: KSWeightGrad, config: Config, device: Device) -> CpuPlan:
    """The plan of a config. Raises InvalidConfig with one line."""
    along, tile, vectors = str(config["along"]), int(config["tile"]), int(config["vectors"])
    if (along == "n") == w.batch_first:
        raise InvalidConfig(f"along={along} is not for layout {w.layout}")
    _, b, c, d = w.pattern
    lanes = max(1, device.vector_bytes // DTYPES[DTYPES[w.dtype].accumulate].itemsize)
    whole = min(lanes * min(vectors, max(1, c // lanes)), c)
    tile_k = whole if along == "k" else min(vectors, c)
    tile_l = min(lanes, d) if along == "l" else 1
    tile_n = min(lanes, w.batch) if along == "n" else 1
    p = CpuPlan(w.pattern, w.batch, w.batch_first, along, lanes, min(tile, b), tile_k, tile_l, tile_n, bool(config["parallel"]))
    if p.sums > register_count(device) - 2:
        raise InvalidConfig(f"a tile of {p.sums} vectors of sums, the CPU has {register_count(device)} registers")
    return p


class KSWgradCpu(Schedule):
    """Vectorised CPU schedule for KSWeightGrad; float32, float64, and float16 and bfloat16 computed in float32."""

    name: ClassVar[str] = "ks_wgrad_cpu"
    family: ClassVar[str] = "ks_wgrad"
    device_kind: ClassVar[str] = "cpu"

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/ks_wgrad_cpu.toml, less the values that make no difference at this shape."""
        assert isinstance(workload, KSWeightGrad)
        knobs = [Knob(k.name, _useful(k, workload), k.help) for k in load_knobs(self.name)]
        values = {k.name: k.values for k in knobs}
        return checked_space(
            self.name, knobs, lambda config: canonical_config(config, values, partial(self._plans, workload, device))
        )

    def default_config(self, workload: Workload, device: Device) -> Config:
        """Vectors along the contiguous dimension unless it is short; a tile of at most half of the registers."""
        assert isinstance(workload, KSWeightGrad)
        values: dict[str, tuple[Value, ...]] = {k.name: k.values for k in self.space(workload, device).knobs}
        wide = workload.pattern[3] * DTYPES[DTYPES[workload.dtype].accumulate].itemsize >= device.vector_bytes
        along = "n" if not workload.batch_first else "l" if wide and "l" in values["along"] else "k"
        half = register_count(device) // 2
        wanted = {"tile": half // 2 if half <= 8 else 4, "vectors": 2}
        config: dict[str, Value] = {"along": along, "parallel": workload.flops > _SERIAL_FLOPS}
        config.update({n: max((v for v in values[n] if int(v) <= most), default=values[n][0]) for n, most in wanted.items()})
        config = {name: config[name] for name in values}
        return canonical_config(config, values, partial(self._plans, workload, device))

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One PrimFunc and one launch."""
        assert isinstance(workload, KSWeightGrad)
        plan = plan_cpu(workload, config, device)
        sch = _schedule(_program(plan, workload.dtype), plan)
        return Scheduled(sch.mod, (Launch("main", ("g", "x", "dw")),))

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Tiles, registers, lane use, loads."""
        assert isinstance(workload, KSWeightGrad)
        p = plan_cpu(workload, config, device)
        a, tiles = p.pattern[0], p.tiles
        count = a * tiles[0] * tiles[1] * tiles[2]
        steps = count * p.batch / p.tile_n
        across = p.tile_j * p.tile_k * p.tile_l * p.tile_n // p.vector
        return {
            "tiles": float(count),
            "sums": float(p.sums),
            "vector_fma": steps * p.sums,
            "vector_loads": steps * (p.tile_j + p.sums / p.tile_j),
            "lane_use": workload.flops / (2.0 * steps * p.sums * p.lanes),
            "across": float(across),
            "cores": float(device.units if p.parallel else 1),
            "balance": count / (ceil(count / device.units) * device.units) if p.parallel else 1.0,
        }

    def _plans(self, workload: KSWeightGrad, device: Device, config: Config) -> list[CpuPlan]:
        return [plan_cpu(workload, config, device)]


def _useful(knob: Knob, w: KSWeightGrad) -> tuple[Value, ...]:
    """The knob's values that can matter at this shape, the first one always among them."""
    _, b, c, d = w.pattern
    if knob.name == "along":
        if not w.batch_first:
            return ("n",)
        return ("k", "l") if d > 1 else ("k",)
    limit = {"tile": b, "vectors": c}
    return tuple(v for v in knob.values if knob.name not in limit or int(v) <= limit[knob.name]) or knob.values[:1]


# -- the program ----------------------------------------------------------------------------------------


def _program(p: CpuPlan, dtype: str) -> Any:
    """The TensorIR. s: sums of a tile, one for each of `tile_n` samples; dw: their sums and what whole vectors leave over."""
    from tvm.script import tirx as T

    a, b, c, d = p.pattern
    acc, n, first, lanes = DTYPES[dtype].accumulate, p.batch, p.first, p.tile_n
    tiles_j, tiles_k, tiles_l = p.tiles
    g_shape, x_shape = ((n, a, b, d), (n, a, c, d)) if first else ((a, b, d, n), (a, c, d, n))
    s_shape = (a, tiles_l, tiles_j, tiles_k, p.tile_j, p.tile_k, p.tile_l, lanes)

    def begin(tile: Any, size: int, extent: int) -> Any:
        return T.min(tile * size, extent - size) if extent % size else tile * size

    def at(tensor: Any, sample: Any, i: Any, f: Any, m: Any) -> Any:
        return T.Cast(acc, tensor[sample, i, f, m] if first else tensor[i, f, m, sample])

    def total(s: Any, g: Any, x: Any, place: tuple[Any, ...], i: Any, j: Any, k: Any, m: Any) -> Any:
        value = s[(*place, 0)]
        for lane in range(1, lanes):
            value = value + s[(*place, lane)]
        for sample in range(n // lanes * lanes, n):
            value = value + at(g, sample, i, j, m) * at(x, sample, i, k, m)
        return T.Cast(dtype, value)

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def main(
        g: T.Buffer(g_shape, dtype),  # type: ignore[valid-type]
        x: T.Buffer(x_shape, dtype),  # type: ignore[valid-type]
        dw: T.Buffer((a, b, c, d), dtype),  # type: ignore[valid-type]
    ) -> None:
        s = T.sblock_alloc_buffer(s_shape, acc)
        for i, tl, tj, tk, uj, uk, ul, un, r in T.grid(*s_shape, n // lanes):
            with T.sblock("s"):
                vi, vl, vj, vk, wj, wk, wl, wn, vr = T.axis.remap("SSSSSSSSR", [i, tl, tj, tk, uj, uk, ul, un, r])
                with T.init():
                    s[vi, vl, vj, vk, wj, wk, wl, wn] = T.Cast(acc, 0)
                m = T.meta_var(begin(vl, p.tile_l, d) + wl)
                s[vi, vl, vj, vk, wj, wk, wl, wn] = s[vi, vl, vj, vk, wj, wk, wl, wn] + at(
                    g, vr * lanes + wn, vi, begin(vj, p.tile_j, b) + wj, m
                ) * at(x, vr * lanes + wn, vi, begin(vk, p.tile_k, c) + wk, m)
        for i, tl, tj, tk, uj, uk, ul in T.grid(*s_shape[:-1]):
            with T.sblock("dw"):
                vi, vl, vj, vk, wj, wk, wl = T.axis.remap("SSSSSSS", [i, tl, tj, tk, uj, uk, ul])
                j = T.meta_var(begin(vj, p.tile_j, b) + wj)
                k = T.meta_var(begin(vk, p.tile_k, c) + wk)
                m = T.meta_var(begin(vl, p.tile_l, d) + wl)
                dw[vi, j, k, m] = total(s, g, x, (vi, vl, vj, vk, wj, wk, wl), vi, j, k, m)

    return main


# -- the primitives -------------------------------------------------------------------------------------


def _schedule(func: Any, p: CpuPlan) -> Any:
    """Tiles are shared by cores; in a tile the samples run outside of unrolled loops, the vectorised one innermost."""
    import tvm
    from tvm import s_tir

    sch = s_tir.Schedule(tvm.IRModule({"main": func}))
    *outer, _, _, _ = sch.get_loops("dw")
    tiles = sch.fuse(*outer)
    if p.parallel:
        sch.parallel(tiles)
    sch.set_scope("s", 0, "local")
    sch.compute_at("s", tiles, preserve_unit_loops=True)
    *tile, r = sch.get_loops("s")[-5:]
    vector = tile["jkln".index(p.along)]
    rest = [loop for loop in tile if loop is not vector]
    sch.reorder(r, *rest, vector)
    for loop in rest:
        sch.unroll(loop)
    (sch.vectorize if p.vector > 1 else sch.unroll)(vector)
    sch.decompose_reduction("s", r)
    for loop in sch.get_loops("dw")[-3:]:
        sch.unroll(loop)
    return sch
