"""Kronecker-sparse matmul on a CPU from TensorIR by Schedule primitives, for LLVM. One function a factor of a chain.

    Y[n, i, j, l] = Σk X[n, i, k, l] · W[i, j, k, l]

    along   a vector holds        register tile                 weights
    "j"     neighbouring outputs  tile rows n × vectors         repacked to (i, l, k, j) in a first pass
    "l"     neighbouring l        tile rows n × `vectors` of j  as they are (16-bit ones are widened in a first pass)
    "n"     neighbouring samples  tile outputs j × vectors      as they are, one broadcast a product

A tile of sums stays in vector registers while k runs outside of it. Cores share blocks of samples and the independent (i, l).
Where a tile does not divide an extent, the last tile is moved back until it fits: outputs that two tiles share are computed
twice, with the same result, and every shape runs vectorised, unpadded and without a test in the inner loops.

Read first: `_program` (the TensorIR), `_schedule` (the primitives).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Schedule, Scheduled
from kronsched.schedules.kron_cpu_plan import register_count
from kronsched.schedules.ks_parts import checked_space, ending, factor_tensors, launch_of, renamed, without_unused
from kronsched.space import Config, Knob, SearchSpace, Value, load_knobs
from kronsched.workloads.base import TensorSpec, Workload
from kronsched.workloads.ks import KSMatmul, Pattern, pattern_in, pattern_out
from kronsched.workloads.ks_epilogue import Epilogue

if TYPE_CHECKING:
    import tvm

    from kronsched.hardware import Device

# A parallel region costs some microseconds: below _SERIAL_FLOPS one core is faster, above _PARALLEL_FLOPS it never is.
_SERIAL_FLOPS = 250_000
_PARALLEL_FLOPS = 4_000_000
_HINT = "pragma_loop_partition_hint"


@dataclass(frozen=True)
class FactorPlan:
    """One factor: how it is cut. tile_n, tile_j, tile_l: extents of the register tile; block: tiles of samples in a chunk."""

    pattern: Pattern
    batch: int
    along: str
    batch_first: bool
    lanes: int
    tile_n: int
    tile_j: int
    tile_l: int
    block: int

    @property
    def width(self) -> int:
        """Extent of the register tile along the vectorised dimension."""
        return {"j": self.tile_j, "l": self.tile_l, "n": self.tile_n}[self.along]

    @property
    def sums(self) -> int:
        """Vector registers that hold the sums of a tile."""
        return self.tile_n * self.tile_j * self.tile_l // self.width * ceil(self.width / self.lanes)

    @property
    def tiles(self) -> tuple[int, int, int]:
        """Number of tiles along samples, outputs j and l."""
        _, b, _, d = self.pattern
        return ceil(self.batch / self.tile_n), ceil(b / self.tile_j), ceil(d / self.tile_l)

    @property
    def chunks(self) -> int:
        """Independent pieces of the parallel loop."""
        return ceil(self.tiles[0] / self.block) * self.pattern[0] * self.tiles[2]


def plan_factors(w: KSMatmul, config: Config, device: Device) -> list[FactorPlan]:
    """The plan of each factor. Raises InvalidConfig for a config that cannot be used as it is."""
    along, tile, vectors = str(config["along"]), int(config["tile"]), int(config["vectors"])
    if (along == "n") == w.batch_first:
        raise InvalidConfig(f"along={along} is not for layout {w.layout}")
    lanes = max(1, device.vector_bytes // DTYPES[DTYPES[w.dtype].accumulate].itemsize)
    if DTYPES[w.dtype].is_complex and along != "j":  # two sums for each part of a result
        lanes = max(1, lanes // 2)
    plans = []
    for pattern in w.patterns:
        _, b, _, d = pattern
        if along == "j":
            tiles = (min(tile, w.batch), _width(lanes, vectors, b), 1)
        elif along == "l":
            tiles = (min(tile, w.batch), min(vectors, b), _width(lanes, 1, d))
        else:
            tiles = (_width(lanes, vectors, w.batch), min(tile, b), 1)
        block = ceil(min(int(config["block"]), w.batch) / tiles[0])
        plan = FactorPlan(pattern, w.batch, along, w.batch_first, lanes, *tiles, block)
        if plan.sums > register_count(device) - 2:
            raise InvalidConfig(f"a tile of {plan.sums} vectors of sums, the CPU has {register_count(device)} registers")
        plans.append(plan)
    return plans


def _width(lanes: int, vectors: int, extent: int) -> int:
    """At most `vectors` whole vectors that fit the extent, or a part of one."""
    return min(lanes * min(vectors, max(1, extent // lanes)), extent)


class KSCpu(Schedule):
    """Vectorised CPU schedule for KSMatmul, both layouts; float32, float64, and float16 and bfloat16 computed in float32."""

    name: ClassVar[str] = "ks_cpu"
    family: ClassVar[str] = "ks"
    device_kind: ClassVar[str] = "cpu"

    def supports(self, workload: Workload, device: Device) -> str | None:
        """Real dtypes; see ks_cpu_complex.py for others."""
        assert isinstance(workload, KSMatmul)
        return f"{workload.dtype} is not served" if DTYPES[workload.dtype].is_complex else None

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/ks_cpu.toml, less the values that make no difference at this shape."""
        assert isinstance(workload, KSMatmul)
        knobs = [Knob(k.name, _useful(k, workload), k.help) for k in load_knobs(self.name)]
        values = {k.name: k.values for k in knobs}
        return checked_space(self.name, knobs, lambda config: _canonical(workload, config, values, device))

    def default_config(self, workload: Workload, device: Device) -> Config:
        """Vectors along the contiguous dimension unless it is short; a tile of about half of the registers."""
        assert isinstance(workload, KSMatmul)
        lanes = device.vector_bytes // DTYPES[DTYPES[workload.dtype].accumulate].itemsize
        wide = sum(d >= lanes for *_, d in workload.patterns) * 2 > len(workload.patterns)
        values = {k.name: k.values for k in self.space(workload, device).knobs}
        wanted: dict[str, Any] = {
            "along": "n" if not workload.batch_first else "l" if wide else "j",
            "tile": 6 if register_count(device) > 16 else 4,
            "vectors": 2,
            "block": 64,
            "parallel": workload.flops > _SERIAL_FLOPS,
        }
        config = {name: _nearest(listed, wanted[name]) for name, listed in values.items()}
        return _canonical(workload, config, values, device)

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One PrimFunc and one launch a factor; intermediates of a chain are scratch, kept in the dtype of the sums."""
        import tvm

        assert isinstance(workload, KSMatmul)
        plans = plan_factors(workload, config, device)
        acc = DTYPES[workload.dtype].accumulate
        funcs, launches, scratch = {}, [], []
        for i, (plan, tensors) in enumerate(zip(plans, factor_tensors(workload, acc), strict=True)):
            epilogue, more = ending(workload, i)
            func = renamed(self._program(plan, *tensors, acc, epilogue), *tensors, *more)
            sch = _schedule(func, plan, bool(config["parallel"]))
            funcs[f"ks_{i}"] = sch.mod["main"].with_attr("global_symbol", f"ks_{i}")
            launches.append(launch_of(f"ks_{i}", *tensors, *more))
            scratch.append(tensors[-1])
        return Scheduled(tvm.IRModule(funcs), tuple(launches), tuple(scratch[:-1]))

    def _program(
        self, plan: FactorPlan, source: TensorSpec, weight: TensorSpec, target: TensorSpec, acc: str, epilogue: Epilogue
    ) -> tvm.tirx.PrimFunc:
        """The TensorIR of one factor, before any primitive."""
        return _program(plan, source, weight, target, acc, epilogue)

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Parallel chunks, lane use, register tile, traffic and instructions of the plans."""
        assert isinstance(workload, KSMatmul)
        plans = plan_factors(workload, config, device)
        item = DTYPES[DTYPES[workload.dtype].accumulate].itemsize
        fma = loads = moved = 0.0
        for p in plans:
            a, b, c, d = p.pattern
            tiles = a * p.tiles[0] * p.tiles[1] * p.tiles[2]
            fma += tiles * p.sums * c
            across = p.tile_n if p.along != "n" else p.tile_j
            loads += tiles * c * (p.sums / across + across)
            moved += item * (p.batch * (pattern_in(p.pattern) + pattern_out(p.pattern)) + a * b * c * d)
        chunks, units = max(p.chunks for p in plans), device.units if config["parallel"] else 1
        return {
            "factors": float(len(plans)),
            "vector_fma": fma,
            "vector_loads": loads,
            "lane_use": workload.flops / (2.0 * fma * plans[0].lanes),
            "sums": float(max(p.sums for p in plans)),
            "traffic_mb": moved / 1e6,
            "intensity": workload.flops / moved,
            "chunks": float(chunks),
            "balance": chunks / units / ceil(chunks / units),
            "cache_kb": max((p.tile_n * p.block + b * p.tile_l) * c * item for p in plans for _, b, c, _ in [p.pattern]) / 1024,
        }


def _useful(knob: Knob, w: KSMatmul) -> tuple[Value, ...]:
    """The knob's values that can matter at this shape, the first one always among them."""
    most_b = max(b for _, b, _, _ in w.patterns)
    if knob.name == "along":
        if not w.batch_first:
            return ("n",)
        return ("j", "l") if max(d for *_, d in w.patterns) > 1 else ("j",)
    if knob.name == "parallel":
        return (True,) if w.flops > _PARALLEL_FLOPS else knob.values
    limit = {"tile": w.batch if w.batch_first else most_b, "vectors": most_b if w.batch_first else w.batch, "block": w.batch}
    return tuple(v for v in knob.values if int(v) <= limit[knob.name]) or knob.values[:1]


def _canonical(w: KSMatmul, config: Config, values: Mapping[str, tuple[Value, ...]], device: Device) -> dict[str, Value]:
    """The config with each knob at the first listed value that gives the same plans."""
    out, plans = dict(config), plan_factors(w, config, device)
    for name in ("tile", "vectors", "block"):
        same = (v for v in values[name] if v == out[name] or _plans_or_none(w, {**out, name: v}, device) == plans)
        out[name] = next(same, out[name])
    return out


def _plans_or_none(w: KSMatmul, config: Config, device: Device) -> list[FactorPlan] | None:
    try:
        return plan_factors(w, config, device)
    except InvalidConfig:
        return None


def _nearest(values: tuple[Value, ...], want: Any) -> Value:
    """`want` when listed, else the largest listed number below it, else the first value."""
    if want in values:
        return next(v for v in values if v == want)
    below = [v for v in values if isinstance(v, int) and isinstance(want, int) and v <= want]
    return max(below, default=values[0])


# -- the program ----------------------------------------------------------------------------------------


def _program(p: FactorPlan, source: TensorSpec, weight: TensorSpec, target: TensorSpec, acc: str, epilogue: Epilogue) -> Any:
    """The TensorIR of one factor and what follows it. g: weights as they are read; s: sums of a tile; y: the output."""
    from tvm.script import tirx as T

    from kronsched.schedules.ks_cpu_epilogue import activated_fast

    a, b, c, d = p.pattern
    n, first, packed = p.batch, p.batch_first, p.along == "j"
    widened = not packed and weight.dtype != acc
    tiles_n, tiles_j, tiles_l = p.tiles
    x_shape, y_shape = ((n, a, c, d), (n, a, b, d)) if first else ((a, c, d, n), (a, b, d, n))
    g_shape = (a, d, c, b) if packed else (a, b, c, d) if widened else (1, 1, 1, 1)

    def begin(tile: Any, size: int, extent: int) -> Any:
        return T.min(tile * size, extent - size) if extent % size else tile * size

    def near(wn: Any, wj: Any) -> Any:
        return wn if p.along == "n" else wj

    def far(wn: Any, wj: Any) -> Any:
        return wj if p.along == "n" else wn

    # The vectorised dimension is the last one of the sums (but for ones), else they do not stay in registers.
    s_shape = (tiles_n, a, tiles_l, tiles_j, far(p.tile_n, p.tile_j), near(p.tile_n, p.tile_j), p.tile_l)

    def at(tensor: Any, sample: Any, i: Any, j: Any, m: Any) -> Any:
        return tensor[sample, i, j, m] if first else tensor[i, j, m, sample]

    def factor(g: Any, w: Any, i: Any, j: Any, k: Any, m: Any) -> Any:
        return g[i, m, k, j] if packed else g[i, j, k, m] if widened else w[i, j, k, m]

    def end(value: Any, bias: Any, residual: Any, *place: Any) -> Any:
        """A sum on its way to y: place (sample, i, j, l)."""
        if epilogue.bias:
            value = value + T.Cast(acc, bias[place[1:]])
        value = activated_fast(epilogue.activation, value, acc)
        return T.Cast(target.dtype, value + T.Cast(acc, at(residual, *place)) if epilogue.residual else value)

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def main(
        x: T.Buffer(x_shape, source.dtype),  # type: ignore[valid-type]
        w: T.Buffer((a, b, c, d), weight.dtype),  # type: ignore[valid-type]
        y: T.Buffer(y_shape, target.dtype),  # type: ignore[valid-type]
        bias: T.Buffer((a, b, d), target.dtype),  # type: ignore[valid-type]
        residual: T.Buffer(y_shape, target.dtype),  # type: ignore[valid-type]
    ) -> None:
        s = T.sblock_alloc_buffer(s_shape, acc)
        g = T.sblock_alloc_buffer(g_shape, acc)
        if packed:
            for i, m, k, j in T.grid(a, d, c, b):
                with T.sblock("g"):
                    vi, vm, vk, vj = T.axis.remap("SSSS", [i, m, k, j])
                    g[vi, vm, vk, vj] = T.Cast(acc, w[vi, vj, vk, vm])
        if widened:
            for i, j, k, m in T.grid(a, b, c, d):
                with T.sblock("g"):
                    vi, vj, vk, vm = T.axis.remap("SSSS", [i, j, k, m])
                    g[vi, vj, vk, vm] = T.Cast(acc, w[vi, vj, vk, vm])
        for tn, i, tl, tj, un, uj, ul, k in T.grid(tiles_n, a, tiles_l, tiles_j, p.tile_n, p.tile_j, p.tile_l, c):
            with T.sblock("s"):
                vn, vi, vl, vj, wn, wj, wl, vk = T.axis.remap("SSSSSSSR", [tn, i, tl, tj, un, uj, ul, k])
                with T.init():
                    s[vn, vi, vl, vj, far(wn, wj), near(wn, wj), wl] = T.Cast(acc, 0)
                s[vn, vi, vl, vj, far(wn, wj), near(wn, wj), wl] = s[vn, vi, vl, vj, far(wn, wj), near(wn, wj), wl] + T.Cast(
                    acc, at(x, begin(vn, p.tile_n, n) + wn, vi, vk, begin(vl, p.tile_l, d) + wl)
                ) * factor(g, w, vi, begin(vj, p.tile_j, b) + wj, vk, begin(vl, p.tile_l, d) + wl)
        for tn, i, tl, tj, un, uj, ul in T.grid(tiles_n, a, tiles_l, tiles_j, p.tile_n, p.tile_j, p.tile_l):
            with T.sblock("y"):
                vn, vi, vl, vj, wn, wj, wl = T.axis.remap("SSSSSSS", [tn, i, tl, tj, un, uj, ul])
                value = T.meta_var(s[vn, vi, vl, vj, far(wn, wj), near(wn, wj), wl])
                sample = T.meta_var(begin(vn, p.tile_n, n) + wn)
                j = T.meta_var(begin(vj, p.tile_j, b) + wj)
                m = T.meta_var(begin(vl, p.tile_l, d) + wl)
                if first:
                    y[sample, vi, j, m] = end(value, bias, residual, sample, vi, j, m)
                else:
                    y[vi, j, m, sample] = end(value, bias, residual, sample, vi, j, m)

    return without_unused(main, epilogue)


# -- the primitives -------------------------------------------------------------------------------------


def _schedule(func: Any, p: FactorPlan, parallel: bool) -> Any:
    """Order the loops over tiles, then put the sums of a tile under the tile."""
    import tvm
    from tvm import s_tir

    sch = s_tir.Schedule(tvm.IRModule({"main": func}))
    tn, i, tl, tj, *tile = sch.get_loops("y")
    block, tn = sch.split(tn, [None, p.block])
    sch.reorder(block, i, tl, tj, tn)
    loops = [sch.fuse(block, i, tl)]
    if any(str(sch.get(one).name_hint) == "g" for one in sch.get_child_blocks(sch.get_sblock("root"))):
        *outer, inner = sch.get_loops("g")
        loops.append(sch.fuse(*outer))
        _vectorise(sch, inner, p.lanes)
    for loop in loops if parallel else []:
        sch.parallel(loop)
    _unroll_and_vectorise(sch, tile, p)
    sch.set_scope("s", 0, "local")
    sch.compute_at("s", tn, preserve_unit_loops=True)
    *tile, k = sch.get_loops("s")[-len(tile) - 1 :]
    sch.reorder(k, *tile)
    _unroll_and_vectorise(sch, tile, p)
    sch.decompose_reduction("s", k)
    return sch


def _unroll_and_vectorise(sch: Any, tile: list[Any], p: FactorPlan) -> None:
    """Unroll the loops of a register tile (n, j, l and, of complex numbers, part), the vectorised one innermost."""
    vector = tile["njl".index(p.along)]
    sch.reorder(*(loop for loop in tile if loop is not vector), vector)
    for loop in tile:
        if loop is not vector:
            sch.unroll(loop)
    (sch.vectorize if p.width > 1 else sch.unroll)(vector)


def _vectorise(sch: Any, loop: Any, lanes: int) -> None:
    """Vectorise a copy loop of any extent."""
    outer, inner = sch.split(loop, [None, lanes])
    for part in (outer, inner):
        sch.annotate(part, _HINT, 1)
    if lanes > 1:
        sch.vectorize(inner)
