"""W4A16 Gemm on a CPU from TensorIR by Schedule primitives, for LLVM.

    xp: x in float32, in packed order
    parallel ── column block ── chunk of k ──┬── wd: weights of the chunk dequantised to float32, in cache
                                             └── acc: tiles of rows × columns, vectors along columns, k inside
             └─ y: rounded

Padding is computed on (it is zero) and only left out when y is written, so every inner loop is whole.

Read first: `_schedule`; `w4_stages` in kronsched/workloads/gemm.py for the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.quant.layout import TILE_N
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.space import Config, Knob, SearchSpace, load_knobs
from kronsched.workloads.base import Workload
from kronsched.workloads.gemm import Gemm, w4_stages

if TYPE_CHECKING:
    from kronsched.hardware import Device

_SERIAL_FLOPS = 1_000_000  # a parallel region costs some microseconds
_ACCUMULATORS = 12  # vector registers for sums: 16 on x86 before AVX-512, less operands


class GemmW4A16Cpu(Schedule):
    """Dequantise a cache block, then multiply it, in float32; float16 and bfloat16 x."""

    name: ClassVar[str] = "gemm_w4a16_cpu"
    family: ClassVar[str] = "gemm"
    device_kind: ClassVar[str] = "cpu"

    def supports(self, workload: Workload, device: Device) -> str | None:
        """None for 4-bit weights."""
        assert isinstance(workload, Gemm)
        return f"{self.name} takes 4-bit weights, not dense ones" if workload.is_dense else None

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/gemm_w4a16_cpu.toml, less the values that mean nothing at this shape."""
        assert isinstance(workload, Gemm)
        lanes = device.vector_bytes // 4

        def check(config: Config) -> str | None:
            vectors = int(config["rows"]) * max(1, int(config["columns"]) // lanes)
            if vectors > _ACCUMULATORS:
                tile = f"rows={config['rows']} × columns={config['columns']}"
                return f"{tile} needs {vectors} vector registers, {_ACCUMULATORS} at most"
            return None

        return SearchSpace(self.name, [_fitting(knob, workload) for knob in load_knobs(self.name)], check)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """Chunks of 128 rows of k, four rows a tile where there are as many."""
        assert isinstance(workload, Gemm)
        space = self.space(workload, device)
        values: dict[str, tuple[Any, ...]] = {k.name: k.values for k in space.knobs}
        wish = {
            "rows": max(v for v in values["rows"] if v <= 4),
            "columns": 16,
            "chunk": 128,
            "blocks": 1,
            "parallel": workload.flops > _SERIAL_FLOPS or True not in values["parallel"],
        }
        config = {name: wish[name] if wish[name] in listed else listed[0] for name, listed in values.items()}
        if space.invalid(config) is not None:
            config["rows"] = values["rows"][0]
        return config

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One PrimFunc and one launch; intermediates are allocated inside."""
        assert isinstance(workload, Gemm)
        sch = _schedule(workload, config)
        return Scheduled(sch.mod, (Launch("main", (*(t.name for t in workload.inputs), workload.output.name)),))

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Parallel blocks, tile sizes, cache footprint and roofline time."""
        assert isinstance(workload, Gemm)
        columns = TILE_N * int(config["blocks"])
        blocks = -(-workload.layout.n_packed // columns)
        rate = device.peak_gflops.get("float32", 100.0)
        return {
            "blocks": float(blocks),
            "waves": blocks / device.units if config["parallel"] else float(blocks),
            "cache_kb": (int(config["chunk"]) + workload.m) * columns * 4 / 1024,
            "vectors": int(config["rows"]) * max(1.0, int(config["columns"]) * 4 / device.vector_bytes),
            "rows_per_dequantise": float(workload.m),
            "roofline_us": max(workload.min_bytes / device.bandwidth_gbs, workload.flops / rate) / 1e3,
        }


def _fitting(knob: Knob, w: Gemm) -> Knob:
    """The knob with the values that divide this shape (the first one where none does)."""
    layout = w.layout
    values: tuple[Any, ...] = knob.values
    if knob.name == "rows":
        values = tuple(v for v in values if w.m % v == 0)
    elif knob.name == "chunk":
        values = tuple(v for v in values if layout.k_packed % v == 0)
    elif knob.name == "blocks":
        values = tuple(v for v in values if layout.words[0] % v == 0)
    elif knob.name == "parallel" and layout.words[0] == 1:
        values = (False,)
    return Knob(knob.name, values or knob.values[:1], knob.help)


def _schedule(w: Gemm, config: Config) -> Any:
    """Apply the primitives, from y back to x."""
    import tvm
    from tvm import s_tir, te

    placeholders, stages = w4_stages(w)
    func = te.create_prim_func([*placeholders, stages[-1]])
    sch = s_tir.Schedule(tvm.IRModule({"main": func}))
    xp, wd, acc, y = (sch.get_sblock(name) for name in ("xp", "wd", "acc", "y"))
    rows, columns = int(config["rows"]), int(config["columns"])

    i, j = sch.get_loops(y)
    block, inside = sch.split(j, [None, TILE_N * int(config["blocks"])])
    sch.reorder(block, i, inside)
    if config["parallel"]:
        sch.parallel(block)
    sch.compute_at(acc, block, preserve_unit_loops=True)
    i, j, k = sch.get_loops(acc)[-3:]
    io, ii = sch.split(i, [None, rows])
    jo, ji = sch.split(j, [None, columns])
    ko, ki = sch.split(k, [None, int(config["chunk"])])
    sch.reorder(ko, io, jo, ki, ii, ji)
    sch.unroll(ii)
    sch.vectorize(ji)
    sch.compute_at(wd, ko, preserve_unit_loops=True)
    k, j = sch.get_loops(wd)[-2:]
    sch.reorder(k, j)
    jo, ji = sch.split(j, [None, 8])  # columns g = 0 … 7 of a strip: one shift for all
    sch.vectorize(ji)
    sch.decompose_reduction(acc, ko)
    sch.vectorize(sch.split(sch.fuse(*sch.get_loops(xp)), [None, 8])[1])
    return sch
