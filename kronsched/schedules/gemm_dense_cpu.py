"""Dense Gemm on a CPU from TensorIR by Schedule primitives, for LLVM.

    xp: x in float32 (int8: int32)
    parallel ── block of columns ── chunk of k ──┬── wt: rows of w of the chunk, widened and turned to (k, n), in cache
                                                 └── acc: tiles of rows × columns, vectors along columns, k inside
             └─ y: scaled, rounded

n and k are padded with zeros to whole blocks and chunks, so that every inner loop is whole; padding is left out when y is
written.

Read first: `_schedule`, `_stages`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.dtypes import DTYPES
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.space import Config, Knob, SearchSpace, load_knobs
from kronsched.workloads.base import Workload
from kronsched.workloads.conv2d import FOUR_BIT
from kronsched.workloads.gemm import Gemm
from kronsched.workloads.gemm_dense import dense_inputs, results, widen

if TYPE_CHECKING:
    from kronsched.hardware import Device

BLOCK_N = 64
_SERIAL_FLOPS = 1_000_000  # a parallel region costs some microseconds
_ACCUMULATORS = 12  # vector registers for sums: 16 on x86 before AVX-512, less operands


class GemmDenseCpu(Schedule):
    """Widen and turn a cache block of w, then multiply it, in float32 (int8: int32); every dtype."""

    name: ClassVar[str] = "gemm_dense_cpu"
    family: ClassVar[str] = "gemm"
    device_kind: ClassVar[str] = "cpu"

    def supports(self, workload: Workload, device: Device) -> str | None:
        """None for dense weights."""
        assert isinstance(workload, Gemm)
        return None if workload.is_dense else f"b_dtype={workload.b_dtype}: {self.name} multiplies dense matrices"

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/gemm_dense_cpu.toml, less the values that mean nothing at this shape."""
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
        """Chunks of at most 256 of k, four rows a tile where there are as many."""
        assert isinstance(workload, Gemm)
        space = self.space(workload, device)
        values: dict[str, tuple[Any, ...]] = {k.name: k.values for k in space.knobs}
        wish = {
            "rows": max(v for v in values["rows"] if v <= 4),
            "columns": 16,
            "chunk": max((v for v in values["chunk"] if v <= 256), default=values["chunk"][0]),
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
        columns = BLOCK_N * int(config["blocks"])
        blocks = -(-workload.n // columns)
        rate = device.peak_gflops.get("float32", 100.0)
        return {
            "blocks": float(blocks),
            "waves": blocks / device.units if config["parallel"] else float(blocks),
            "cache_kb": (int(config["chunk"]) + workload.m) * columns * 4 / 1024,
            "vectors": int(config["rows"]) * max(1.0, int(config["columns"]) * 4 / device.vector_bytes),
            "rows_per_turn": float(workload.m),
            "padded_share": 1 - workload.n * workload.k / (blocks * columns * _padded_k(workload, config)),
            "roofline_us": max(workload.min_bytes / device.bandwidth_gbs, workload.flops / rate) / 1e3,
        }


def _padded_k(w: Gemm, config: Config) -> int:
    chunk = int(config["chunk"])
    return -(-w.k // chunk) * chunk


def _fitting(knob: Knob, w: Gemm) -> Knob:
    """The knob with the values that can matter at this shape (the first one where none does)."""
    values: tuple[Any, ...] = knob.values
    if knob.name == "rows":
        values = tuple(v for v in values if w.m % v == 0)
    elif knob.name == "chunk":
        values = tuple(v for v in values if v < 2 * w.k)
    elif knob.name == "blocks":
        values = tuple(v for v in values if BLOCK_N * v < 2 * w.n)
    elif knob.name == "parallel" and w.n <= BLOCK_N:
        values = (False,)
    return Knob(knob.name, values or knob.values[:1], knob.help)


def _stages(w: Gemm, config: Config) -> tuple[list[Any], Any]:
    """(placeholders, y) of the te program with stages xp (m, k), wt (k, n), acc (m, n), y; k and n padded but for y."""
    from tvm import te, tirx

    placeholders = {t.name: te.placeholder(t.shape, name=t.name, dtype=t.dtype) for t in dense_inputs(w)}
    x, weight = placeholders["x"], placeholders["w"]
    columns = BLOCK_N * int(config["blocks"])
    k_padded, n_padded = _padded_k(w, config), -(-w.n // columns) * columns
    zero = tirx.const(0, DTYPES[w.a_dtype].accumulate)

    def inside(value: Any, *conditions: Any) -> Any:
        known = [c for c in conditions if c is not None]
        return tirx.if_then_else(tirx.all(*known), value, zero) if known else value

    def k_limit(k: Any) -> Any:
        return None if k_padded == w.k else k < w.k

    xp = te.compute((w.m, k_padded), lambda i, k: inside(widen(w, x, i, k), k_limit(k)), name="xp")
    turned = te.compute(
        (k_padded, n_padded),
        lambda k, j: inside(widen(w, weight, j, k), k_limit(k), None if n_padded == w.n else j < w.n),
        name="wt",
    )
    kk = te.reduce_axis((0, k_padded), name="kk")
    acc = te.compute((w.m, n_padded), lambda i, j: te.sum(xp[i, kk] * turned[kk, j], axis=kk), name="acc")
    return list(placeholders.values()), results(w, acc, placeholders)


def _schedule(w: Gemm, config: Config) -> Any:
    """Apply the primitives, from y back to x."""
    import tvm
    from tvm import s_tir, te

    placeholders, result = _stages(w, config)
    sch = s_tir.Schedule(tvm.IRModule({"main": te.create_prim_func([*placeholders, result])}))
    wt, acc, y = (sch.get_sblock(name) for name in ("wt", "acc", "y"))
    rows, columns = int(config["rows"]), int(config["columns"])

    i, j = sch.get_loops(y)
    packed = 2 if w.out_dtype in FOUR_BIT else 1  # columns of an element of y
    block, inner = sch.split(j, [None, BLOCK_N * int(config["blocks"]) // packed])
    sch.reorder(block, i, inner)
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
    sch.compute_at(wt, ko, preserve_unit_loops=True)
    sch.decompose_reduction(acc, ko)
    return sch
