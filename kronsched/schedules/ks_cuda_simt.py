"""Kronecker-sparse matmul on CUDA cores, from TensorIR by Schedule primitives. One launch a factor of a chain.

    block (i, tile of n, tile of j, tile of l)
      for each bk steps of k:   x ── shared (n, k, l)      w ── shared (k, j, l)
        thread (n, j, l):       rn × rj sums in registers += x · w
      sums ── y

Output-stationary: a sum is written once. Lanes run along (j, l) in batch_first, which are neighbours in y, and along n in
batch_last. Tiles are padded inside the block and guarded at both ends in global memory, so every size is served, and every dtype.

Read first: `_program` (the TensorIR), `_schedule` (the primitives), `plan_tiles`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.hardware import floor_us
from kronsched.schedules.base import Schedule, Scheduled
from kronsched.schedules.ks_parts import checked_space, ending, factor_tensors, launch_of, renamed, without_unused
from kronsched.space import Config, Knob, SearchSpace, Value, load_knobs
from kronsched.workloads.base import TensorSpec, Workload
from kronsched.workloads.ks import KSMatmul, Pattern, pattern_in, pattern_out
from kronsched.workloads.ks_epilogue import Epilogue, activated

if TYPE_CHECKING:
    import tvm

    from kronsched.hardware import Device

_KNOBS = ("tn", "tj", "tl", "rn", "rj", "bk", "pad", "unroll")
_MAX_SUMS = 64
_START_US, _TRIP_US = 3.0, 0.6
"""A launch; one round of fetching and multiplying bk steps of k, which wait for each other. From unshipped try-outs."""
_AXES = ("threadIdx.z", "threadIdx.y", "threadIdx.x")


@dataclass(frozen=True)
class TilePlan:
    """One launch: threads along n, j, l; sums a thread along n, j; steps of k a stage; padding of the weights' rows."""

    pattern: Pattern
    batch: int
    batch_first: bool
    item: int
    tn: int
    tj: int
    tl: int
    rn: int
    rj: int
    bk: int
    pad: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.tn * self.tj * self.tl

    @property
    def tile(self) -> tuple[int, int, int]:
        """Extents of a block's outputs along n, j, l."""
        return self.tn * self.rn, self.tj * self.rj, self.tl

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        a, b, _, d = self.pattern
        n, j, m = self.tile
        return ceil(self.batch / n) * a * ceil(b / j) * ceil(d / m)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the two tiles."""
        n, j, m = self.tile
        return self.item * self.bk * (n * m + j * m + self.pad)


def plan_tiles(w: KSMatmul, config: Config, device: Device) -> list[TilePlan]:
    """The plan of each factor: knobs, cut to the extents. Raises InvalidConfig for a config that cannot be built."""
    tn, tj, tl, rn, rj, bk, pad, _ = (int(config[k]) for k in _KNOBS)
    item = DTYPES[w.dtype].itemsize
    plans = []
    for pattern in w.patterns:
        _, b, c, d = pattern
        tn_, tj_, tl_ = min(tn, w.batch), min(tj, b), min(tl, d)
        rn_, rj_ = min(rn, ceil(w.batch / tn_)), min(rj, ceil(b / tj_))
        # TVM 0.27 loses a shared buffer of 4 bytes or less when it merges buffers: take more steps of k then.
        least = 4 // (item * tl_ * min(tn_ * rn_, tj_ * rj_)) + 1
        plan = TilePlan(pattern, w.batch, w.batch_first, item, tn_, tj_, tl_, rn_, rj_, max(least, min(bk, c)), pad)
        if plan.threads > device.max_threads_per_block:
            raise InvalidConfig(f"{plan.threads} threads a block, {device.name} allows {device.max_threads_per_block}")
        if rn_ * rj_ > _MAX_SUMS:
            raise InvalidConfig(f"{rn_ * rj_} sums a thread, at most {_MAX_SUMS} are allowed")
        if plan.shared_bytes > device.shared_per_block:
            raise InvalidConfig(
                f"{plan.shared_bytes} bytes of shared memory, {device.name} has {device.shared_per_block} a block"
            )
        plans.append(plan)
    return plans


class KSCudaSimt(Schedule):
    """SIMT schedule for KSMatmul, both layouts; float32, float64, float16 and bfloat16."""

    name: ClassVar[str] = "ks_cuda_simt"
    family: ClassVar[str] = "ks"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.1

    def supports(self, workload: Workload, device: Device) -> str | None:
        """Real dtypes; see ks_cuda_complex.py for others."""
        assert isinstance(workload, KSMatmul)
        return f"{workload.dtype} is not served" if DTYPES[workload.dtype].is_complex else None

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/ks_cuda_simt.toml, less the values that mean nothing at this shape."""
        assert isinstance(workload, KSMatmul)
        knobs = [_fitting(k, workload) for k in load_knobs(self.name)]
        values = {k.name: k.values for k in knobs}
        return checked_space(self.name, knobs, lambda config: _canonical(workload, config, values, device))

    def default_config(self, workload: Workload, device: Device) -> Config:
        """256 threads with 4 × 4 sums each; lanes along l and j (batch_first) or along n (batch_last)."""
        assert isinstance(workload, KSMatmul)
        values = {k.name: k.values for k in self.space(workload, device).knobs}
        most_d = max(d for *_, d in workload.patterns)
        tl = 1
        if workload.batch_first:
            tl = max(int(v) for v in values["tl"] if int(v) <= min(16, most_d))
        tj = max(8, 32 // tl) if workload.batch_first else 8
        across = [min(tl, d) * min(tj, b) for _, b, _, d in workload.patterns]
        tn = min(256 // min(across), device.max_threads_per_block // max(across))
        wanted = {"tl": tl, "tj": tj, "tn": tn, "rn": 4, "rj": 4, "bk": 16, "pad": 1, "unroll": 256}
        config = {name: _nearest(listed, wanted[name]) for name, listed in values.items()}
        return _canonical(workload, config, values, device)

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One PrimFunc and one launch a factor; scratch tensors between them."""
        import tvm

        assert isinstance(workload, KSMatmul)
        funcs, launches, scratch = {}, [], []
        plans = plan_tiles(workload, config, device)
        for i, (plan, tensors) in enumerate(zip(plans, factor_tensors(workload, workload.dtype), strict=True)):
            epilogue, more = ending(workload, i)
            func = renamed(self._program(plan, *tensors, epilogue), *tensors, *more)
            sch = _schedule(func, plan, int(config["unroll"]), DTYPES[workload.dtype].is_complex)
            funcs[f"ks_{i}"] = sch.mod["main"].with_attr("global_symbol", f"ks_{i}")
            launches.append(launch_of(f"ks_{i}", *tensors, *more))
            scratch.append(tensors[-1])
        return Scheduled(tvm.IRModule(funcs), tuple(launches), tuple(scratch[:-1]))

    def _program(
        self, plan: TilePlan, source: TensorSpec, weight: TensorSpec, target: TensorSpec, epilogue: Epilogue
    ) -> tvm.tirx.PrimFunc:
        """The TensorIR of a launch, before any primitive."""
        return _program(plan, source, weight, target, epilogue)

    def expected_us(self, workload: Workload, config: Config, device: Device) -> float | None:
        """A share of the roofline, and what few samples take even so: the rounds along k. None without a roofline."""
        assert isinstance(workload, KSMatmul)
        if not (device.bandwidth_gbs > 0 and "float32" in device.peak_gflops):
            return None
        rounds = sum(ceil(p.pattern[2] / p.bk) for p in plan_tiles(workload, config, device))
        return floor_us(workload, device) / self.untuned_share + _START_US + _TRIP_US * rounds

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Launches, waves, occupancy, bytes through each memory level, predicted roofline time."""
        assert isinstance(workload, KSMatmul)
        return tile_features(workload, plan_tiles(workload, config, device), device)


def tile_features(w: KSMatmul, plans: list[TilePlan], device: Device) -> dict[str, float]:
    """Features of a config's launches; times in µs, sizes in the unit of their names."""
    moved = shared = padded = time_us = 0.0
    for p in plans:
        a, b, c, d = p.pattern
        n, j, m = p.tile
        steps = ceil(c / p.bk)
        traffic = p.blocks * steps * p.bk * (n + j) * m * p.item + p.batch * pattern_out(p.pattern) * p.item
        once = p.item * (p.batch * (pattern_in(p.pattern) + pattern_out(p.pattern)) + a * b * c * d)
        work = (8.0 if DTYPES[w.dtype].is_complex else 2.0) * p.blocks * n * j * m * steps * p.bk
        moved, padded = moved + traffic, padded + work
        shared += p.blocks * p.threads * steps * p.bk * (p.rn + p.rj) * p.item
        peak = device.peak_gflops["float64" if w.compute_dtype == "float64" else "float32"]
        time_us += max(once / device.bandwidth_gbs, work / peak) / 1e3
    main = max(plans, key=lambda p: p.blocks * p.threads)
    per_sm = max(1, min(device.shared_per_sm // (main.shared_bytes + 1024), device.max_threads_per_sm // main.threads, 32))
    waves = main.blocks / (device.units * per_sm)
    a, b, c, d = main.pattern
    run_in = main.tl if main.tl < d else d * min(main.bk, c)
    run_out = main.tl if main.tl < d else d * min(main.tj, b)
    if not main.batch_first:
        run_in = run_out = main.tn
    return {
        "launches": float(len(plans)),
        "global_mb": moved / 1e6,
        "shared_mb": shared / 1e6,
        "roofline_us": time_us,
        "intensity": w.flops / moved,
        "useful": w.flops / padded,
        "shared_kb": main.shared_bytes / 1024,
        "blocks": float(main.blocks),
        "threads": float(main.threads),
        "blocks_per_sm": float(per_sm),
        "threads_per_sm": float(per_sm * main.threads),
        "waves": waves,
        "wave_efficiency": waves / ceil(waves),
        "sums": float(main.rn * main.rj),
        "coalesced_in": float(min(128, run_in * main.item)),
        "coalesced_out": float(min(128, run_out * main.item)),
    }


def _fitting(knob: Knob, w: KSMatmul) -> Knob:
    """The knob with the values that can matter at this shape, the first one always among them."""
    limit = {
        "tn": w.batch,
        "tj": max(b for _, b, _, _ in w.patterns),
        "tl": max(d for *_, d in w.patterns),
        "bk": 2 * max(c for _, _, c, _ in w.patterns) - 1,
    }
    kept = tuple(v for v in knob.values if int(v) <= limit.get(knob.name, int(v)))
    return Knob(knob.name, kept or knob.values[:1], knob.help)


def _canonical(w: KSMatmul, config: Config, values: Mapping[str, tuple[Value, ...]], device: Device) -> dict[str, Value]:
    """The config with each knob at the first listed value that gives the same plans."""
    out, plans = dict(config), plan_tiles(w, config, device)
    for name in ("tn", "tj", "tl", "rn", "rj", "bk"):
        for value in values[name]:
            try:
                same = value == out[name] or plan_tiles(w, {**out, name: value}, device) == plans
            except InvalidConfig:
                continue
            if same:
                out[name] = value
                break
    return out


def _nearest(values: tuple[Value, ...], want: int) -> Value:
    """The largest listed number that is at most `want`, else the smallest."""
    return max((v for v in values if int(v) <= want), default=min(values, key=int))


# -- the program ----------------------------------------------------------------------------------------


def _program(p: TilePlan, source: TensorSpec, weight: TensorSpec, target: TensorSpec, epilogue: Epilogue) -> Any:
    """The TensorIR of a launch. xs and ws: block-padded copies with zeros beyond the edges; s: sums by tile, register, thread."""
    from tvm.script import tirx as T

    a, b, c, d = p.pattern
    dtype, acc = source.dtype, DTYPES[source.dtype].accumulate
    n, first = p.batch, p.batch_first
    tile_n, tile_j, tile_l = p.tile
    tiles_n, tiles_j, tiles_l, steps = ceil(n / tile_n), ceil(b / tile_j), ceil(d / tile_l), ceil(c / p.bk)
    size_n, size_j, size_l, size_k = tiles_n * tile_n, tiles_j * tile_j, tiles_l * tile_l, steps * p.bk
    x_shape, y_shape = ((n, a, c, d), (n, a, b, d)) if first else ((a, c, d, n), (a, b, d, n))
    xs_shape = (size_n, a, size_k, size_l) if first else (a, size_k, size_l, size_n)
    s_shape = (tiles_n, a, tiles_j, tiles_l, p.tn, p.tj, tile_l, p.rn, p.rj)

    def at(tensor: Any, sample: Any, i: Any, j: Any, m: Any) -> Any:
        return tensor[sample, i, j, m] if first else tensor[i, j, m, sample]

    def inside(*edges: tuple[Any, int, int]) -> Any:
        """Whether each index is below its extent, tested only where the padded size exceeds it."""
        test = T.bool(True)
        for index, extent, size in edges:
            test = T.And(test, index < extent) if size > extent else test
        return test

    def end(value: Any, bias: Any, residual: Any, *place: Any) -> Any:
        """A sum on its way to y: place (sample, i, j, l)."""
        if epilogue.bias:
            value = value + T.Cast(acc, bias[place[1:]])
        value = activated(epilogue.activation, value, acc)
        return T.Cast(dtype, value + T.Cast(acc, at(residual, *place)) if epilogue.residual else value)

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def main(
        x: T.Buffer(x_shape, dtype),  # type: ignore[valid-type]
        w: T.Buffer((a, b, c, d), dtype),  # type: ignore[valid-type]
        y: T.Buffer(y_shape, dtype),  # type: ignore[valid-type]
        bias: T.Buffer((a, b, d), dtype),  # type: ignore[valid-type]
        residual: T.Buffer(y_shape, dtype),  # type: ignore[valid-type]
    ) -> None:
        xs = T.sblock_alloc_buffer(xs_shape, dtype)
        ws = T.sblock_alloc_buffer((a, size_k, size_j, size_l), dtype)
        s = T.sblock_alloc_buffer(s_shape, acc)
        if first:
            for h, i, k, m in T.grid(size_n, a, size_k, size_l):
                with T.sblock("xs"):
                    vn, vi, vk, vl = T.axis.remap("SSSS", [h, i, k, m])
                    xs[vn, vi, vk, vl] = T.if_then_else(
                        inside((vn, n, size_n), (vk, c, size_k), (vl, d, size_l)), x[vn, vi, vk, vl], T.Cast(dtype, 0)
                    )
        else:
            for i, k, m, h in T.grid(a, size_k, size_l, size_n):
                with T.sblock("xs"):
                    vi, vk, vl, vn = T.axis.remap("SSSS", [i, k, m, h])
                    xs[vi, vk, vl, vn] = T.if_then_else(
                        inside((vn, n, size_n), (vk, c, size_k), (vl, d, size_l)), x[vi, vk, vl, vn], T.Cast(dtype, 0)
                    )
        for i, k, j, m in T.grid(a, size_k, size_j, size_l):
            with T.sblock("ws"):
                vi, vk, vj, vl = T.axis.remap("SSSS", [i, k, j, m])
                ws[vi, vk, vj, vl] = T.if_then_else(
                    inside((vj, b, size_j), (vk, c, size_k), (vl, d, size_l)), w[vi, vj, vk, vl], T.Cast(dtype, 0)
                )
        for bn, i, bj, bl, tn, tj, tl, rn, rj, k in T.grid(*s_shape, size_k):
            with T.sblock("s"):
                vbn, vi, vbj, vbl, vtn, vtj, vtl, vrn, vrj, vk = T.axis.remap(
                    "SSSSSSSSSR", [bn, i, bj, bl, tn, tj, tl, rn, rj, k]
                )
                with T.init():
                    s[vbn, vi, vbj, vbl, vtn, vtj, vtl, vrn, vrj] = T.Cast(acc, 0)
                s[vbn, vi, vbj, vbl, vtn, vtj, vtl, vrn, vrj] = s[vbn, vi, vbj, vbl, vtn, vtj, vtl, vrn, vrj] + T.Cast(
                    acc, at(xs, vbn * tile_n + vrn * p.tn + vtn, vi, vk, vbl * tile_l + vtl)
                ) * T.Cast(acc, ws[vi, vk, vbj * tile_j + vrj * p.tj + vtj, vbl * tile_l + vtl])
        for bn, i, bj, bl, tn, tj, tl, rn, rj in T.grid(*s_shape):
            with T.sblock("y"):
                vbn, vi, vbj, vbl, vtn, vtj, vtl, vrn, vrj = T.axis.remap("SSSSSSSSS", [bn, i, bj, bl, tn, tj, tl, rn, rj])
                vn = T.meta_var(vbn * tile_n + vrn * p.tn + vtn)
                vj = T.meta_var(vbj * tile_j + vrj * p.tj + vtj)
                vl = T.meta_var(vbl * tile_l + vtl)
                value = T.meta_var(s[vbn, vi, vbj, vbl, vtn, vtj, vtl, vrn, vrj])
                if inside((vn, n, size_n), (vj, b, size_j), (vl, d, size_l)):
                    if first:
                        y[vn, vi, vj, vl] = end(value, bias, residual, vn, vi, vj, vl)
                    else:
                        y[vi, vj, vl, vn] = end(value, bias, residual, vn, vi, vj, vl)

    return without_unused(main, epilogue)


# -- the primitives -------------------------------------------------------------------------------------


def _schedule(func: Any, p: TilePlan, unroll: int, pairs: bool) -> Any:
    """Bind blocks and threads; then sums under a thread, copies under a step of k. pairs: buffers have a last dimension of 2."""
    import tvm
    from tvm import s_tir

    sch = s_tir.Schedule(tvm.IRModule({"main": func}))
    parts = 2 if pairs else 1
    loops = sch.get_loops("y")
    block, (tn, tj, tl), each = loops[:4], loops[4:7], loops[7:]
    lanes = (tn, tj, tl) if p.batch_first else (tj, tl, tn)
    sch.reorder(*block, *lanes, *each)
    sch.bind(sch.fuse(*block), "blockIdx.x")
    for loop, axis in zip(lanes, _AXES, strict=True):
        sch.bind(loop, axis)
    for loop in each[:2]:
        _unroll(sch, loop, unroll)
    for part in each[2:]:
        sch.vectorize(part)
    for name, scope in (("s", "local"), ("xs", "shared.dyn"), ("ws", "shared.dyn")):
        sch.set_scope(name, 0, scope)
    sch.compute_at("s", lanes[-1], preserve_unit_loops=True)
    *tile, k = sch.get_loops("s")[4:]
    ko, ki = sch.split(k, [None, p.bk])
    sch.reorder(ko, ki, *tile)
    for copy in ("xs", "ws"):
        sch.compute_at(copy, ko, preserve_unit_loops=True)
        dims = sch.get_loops(copy)[5:]
        if copy == "ws":  # read along k and l, which are neighbours in w; written along j
            sch.reorder(dims[2], dims[1])
            dims = sch.get_loops(copy)[5:]
        extents = (p.tn, p.tj, p.tl) if p.batch_first else (p.tj, p.tl, p.tn)
        _, *threads = sch.split(sch.fuse(*dims[:4]), [None, *extents])
        for part in dims[4:]:
            sch.vectorize(part)
        for loop, axis in zip(threads, _AXES, strict=True):
            sch.bind(loop, axis)
    if p.pad:
        sch.storage_align("ws", 0, 1, parts * p.tile[1] * p.tile[2], parts * p.pad)
    sch.decompose_reduction("s", ko)
    for loop in (ki, *tile[-len(each) :]):
        _unroll(sch, loop, unroll)
    return sch


def _unroll(sch: Any, loop: Any, steps: int) -> None:
    """Ask for `#pragma unroll` in the source instead of exploding the loop in the IR."""
    if steps and 1 < int(sch.get(loop).extent) <= steps:
        sch.annotate(loop, "pragma_auto_unroll_max_step", steps)
        sch.annotate(loop, "pragma_unroll_explicit", 0)
