"""Kron-Matmul of equal small factors in one launch, chained through registers: a TIRx tile program.

A block holds whole rows of X in shared memory between a few register phases; each phase contracts one or two axes on data that a
warp holds in registers, and puts it back where it came from. X is read once and Y written once.

    global ── registers (2 axes) ── shared ── registers (1 or 2 axes) ── shared ── registers (1 or 2 axes) ── global
                    next rows' data on its way (prefetch)

float32 is plain FMA for P = 2, 4 and 8, and three TF32 products for P = 16 and 32, as exact as float32. 16-bit products go
through tensor cores with float32 sums and are rounded to storage between any two axes; factors of 2 and 4 are merged to 16 x 16
first, and rounded once more. Where the device can, a 16-bit launch starts while the one before it ends.

Rows of 16-bit types may also land in the place where they are exchanged, by bulk copies or cp.async (prefetch "bulk", "ring").

Read first: kron_chain_plan.py (which shapes, what must hold), kron_chain_half.py, kron_chain_fma.py and kron_chain_tf32.py (the
kernels; half16, half32 and tf32p32 are their variants, ring8, ring16 and ring32 those whose rows land in a ring),
kron_chain_layout.py (where things are).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.schedules.kron_chain_plan import (
    LANDS,
    RADIX,
    TF32_THREADS,
    ChainPlan,
    chain_features,
    chained_part,
    idle_knob,
    kernel_kind,
    plan_chain,
    why_not,
)
from kronsched.space import Config, Knob, SearchSpace, load_knobs
from kronsched.space.space import Value
from kronsched.workloads.base import Workload
from kronsched.workloads.kron import KronMatmul

if TYPE_CHECKING:
    from kronsched.hardware import Device


class KronCudaChain(Schedule):
    """One-launch KronMatmul for N equal square factors; see `supports` for the sizes."""

    name: ClassVar[str] = "kron_cuda_chain"
    family: ClassVar[str] = "kron"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.7

    def supports(self, workload: Workload, device: Device) -> str | None:
        """None for the sizes in `kron_chain_plan.SERVED` on sm_80 or later where a row fits in shared memory."""
        assert isinstance(workload, KronMatmul)
        return why_not(workload, device)

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/kron_cuda_chain.toml, less the values that no config of this shape may take."""
        assert isinstance(workload, KronMatmul)

        knobs = [_fitting(knob, workload) for knob in load_knobs(self.name)]
        values = {knob.name: knob.values for knob in knobs}

        def check(config: Config) -> str | None:
            try:
                plan = plan_chain(workload, config, device)
            except InvalidConfig as e:
                return str(e)
            return idle_knob(plan, config, values)

        return SearchSpace(self.name, knobs, check)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """Blocks of 64 to 512 threads; where there are more blocks than the GPU holds, a persistent grid that prefetches."""
        assert isinstance(workload, KronMatmul)
        space = self.space(workload, device)
        values = {knob.name: knob.values for knob in space.knobs}
        for wish in _wishes(workload, device, values):
            config = {k: v if v in values[k] else values[k][0] for k, v in wish.items()}
            for unroll in sorted(values["unroll"], key=lambda v: v != config["unroll"]):
                if space.invalid({**config, "unroll": unroll}) is None:
                    return {**config, "unroll": unroll}
        for candidate in space:
            return candidate.config
        raise InvalidConfig(f"no config of {self.name} is valid for {workload.label} on {device.name}")

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One PrimFunc, `kron_0`, and one for each factor of 64 before the last two."""
        import tvm

        from kronsched.schedules import kron_chain_head

        assert isinstance(workload, KronMatmul)
        plan, n = plan_chain(workload, config, device), len(workload.factors)
        heads = n - plan.n  # leading axes, contracted in place afterwards
        args = ("x", *(f"f{i}" for i in range(heads, n)), "y")
        names = dict(zip(("x", *(f"f{i}" for i in range(plan.n)), "y"), args, strict=True))
        funcs = {"kron_0": renamed(_kernel(plan), names).with_attr("global_symbol", "kron_0")}
        launches = [Launch("kron_0", args, overlap=plan.overlap)]
        for axis in reversed(range(heads)):
            name = f"kron_{heads - axis}"
            outer, inner = workload.m * plan.p**axis, plan.p ** (n - 1 - axis)
            func = renamed(kron_chain_head.head64(plan, outer, inner, device.units), {"f": f"f{axis}", "y": "y"})
            funcs[name] = func.with_attr("global_symbol", name)
            launches.append(Launch(name, (f"f{axis}", "y")))
        return Scheduled(tvm.IRModule(funcs), tuple(launches))

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Waves, occupancy, bytes through each memory level, bytes in flight, predicted roofline time."""
        assert isinstance(workload, KronMatmul)
        return chain_features(workload, plan_chain(workload, config, device), device)


def _kernel(plan: ChainPlan) -> Any:
    from kronsched.schedules import (
        kron_chain_fma,
        kron_chain_half,
        kron_chain_half16,
        kron_chain_half32,
        kron_chain_half64,
        kron_chain_ring8,
        kron_chain_ring16,
        kron_chain_ring32,
        kron_chain_tf32,
        kron_chain_tf32p32,
    )

    if plan.kernel == "tf32":
        return kron_chain_tf32.chain16_tf32(plan) if plan.p == 16 else kron_chain_tf32p32.chain32_tf32(plan)
    if plan.prefetch in LANDS:
        return {8: kron_chain_ring8.ring8, 32: kron_chain_ring32.ring32}.get(plan.p, kron_chain_ring16.ring16)(plan)
    if plan.kernel == "fma":
        return kron_chain_fma.chain_fma(plan)
    kernels = {
        2: kron_chain_half16.chain16,
        4: kron_chain_half16.chain16,
        8: kron_chain_half.chain8,
        16: kron_chain_half16.chain16,
        32: kron_chain_half32.chain32,
        64: kron_chain_half64.chain64,
    }
    return kernels[plan.p](plan)


def renamed(func: Any, names: Mapping[str, str]) -> Any:
    """The function with its parameters renamed; those that have no new name are not used by its body and are left out."""
    import tvm
    import tvm_ffi
    from tvm import tirx

    params = [p for p in func.params if str(p.name) in names]
    func = tirx.PrimFunc(params, func.body, func.ret_type, func.attrs)
    new = [tirx.decl_buffer(p.shape, p.dtype, name=names[str(p.name)], scope=p.scope()) for p in params]

    def swap(var: Any) -> Any:
        return next((after for before, after in zip(params, new, strict=True) if var.same_as(before)), var)

    return tvm_ffi.structural_map(func, (tvm.ir.Var, swap), order="post") if any(k != v for k, v in names.items()) else func


def _fitting(knob: Knob, w: KronMatmul) -> Knob:
    """The knob with the values that may be valid for this workload (the first one where none is)."""
    p = w.factors[0][0]
    kind = kernel_kind(p, w.dtype)
    lanes = w.k_in // RADIX
    allowed = {
        ("rows", kind): lambda v: v <= chained_part(w).m,
        ("l2", "half"): lambda v: not isinstance(v, str) or p != 64,
        ("l2", "fma"): lambda v: not isinstance(v, str),
        ("l2", "tf32"): lambda v: not isinstance(v, str),
        ("group", "half"): lambda v: v == 2,
        ("group", "tf32"): lambda v: v == 2,
        ("prefetch", "half"): lambda v: v not in LANDS or (p != 64 and w.k_in > 512),
        ("prefetch", "fma"): lambda v: v != "registers" and v not in LANDS,
        ("prefetch", "tf32"): lambda v: v in ("none", "registers"),
        ("threads", "fma"): lambda v: v * 2 % lanes == 0,
        ("threads", "tf32"): lambda v: v in TF32_THREADS[p],
        ("per_sm", "tf32"): lambda v: v == 1,
    }
    values: tuple[Value, ...] = tuple(filter(allowed.get((knob.name, kind), lambda v: True), knob.values))
    return Knob(knob.name, values or knob.values[:1], knob.help)


# (P, N): rows, threads, blocks an SM, prefetch where blocks outnumber what the GPU holds ("walk": a persistent grid that does
# not), load, store, unroll, group. The fastest found on an H200 for 1024 rows of X; fewer blocks where an SM has less memory.
_HALF: dict[tuple[int, int], tuple[Value, ...]] = {
    (8, 3): (8, 256, 4, "split", "nc", "wb", 4, 2),
    (8, 4): (1, 256, 8, "none", "wide", "cs", 1, 2),
    (8, 5): (1, 512, 1, "registers", "wide", "wb", 4, 2),
    (16, 3): (2, 64, 8, "split", "nc", "wb", 4, 2),
    (16, 4): (1, 512, 1, "walk", "wide", "wb", 2, 2),
    (32, 3): (1, 512, 1, "registers", "nc", "wb", 1, 2),
    (4, 6): (1, 32, 12, "none", "nc", "wb", 2, 2),
    (4, 7): (1, 128, 4, "none", "wide", "wb", 2, 2),
    (2, 12): (1, 32, 12, "none", "nc", "wb", 2, 2),
    (2, 13): (1, 64, 6, "none", "nc", "wb", 2, 2),
    (64, 2): (4, 128, 2, "registers", "nc", "wb", 4, 2),
}
# (P, N): threads, blocks an SM, prefetch, l2, store, unroll, where there are enough rows to walk over. Ditto.
_WALK: dict[tuple[int, int], tuple[Value, ...]] = {
    (8, 4): (256, 4, "ring", "first", "cs", 1),
    (8, 5): (512, 1, "registers", "first", "wb", 4),
    (16, 4): (512, 1, "bulk", "first", "wb", 2),
    (32, 3): (512, 1, "registers", True, "wb", 1),
    (4, 7): (128, 2, "ring", "first", "wb", 2),
}
_FLOAT32: dict[tuple[int, int], tuple[Value, ...]] = {
    (8, 4): (1, 64, 8, "none", "wide", "cs", 4, 8),
    (4, 7): (1, 256, 1, "split", "wide", "wb", 1, 8),
    (8, 5): (1, 256, 1, "async", "nc", "wb", 1, 8),
    (16, 4): (1, 256, 1, "registers", "wide", "cs", 1, 2),
    (32, 3): (1, 512, 1, "registers", "nc", "wb", 1, 2),
}
_ANY: dict[tuple[int, int], tuple[Value, ...]] = {
    (4, 6): (1, 64, 8, "async", "nc", "wb", 1, 2),
    (4, 7): (1, 128, 2, "async", "nc", "wb", 1, 8),
    (2, 12): (1, 64, 4, "async", "nc", "wb", 1, 8),
    (2, 13): (2, 256, 2, "none", "nc", "cs", 4, 8),
}


def _wishes(w: KronMatmul, device: Device, values: Mapping[str, tuple[Value, ...]]) -> Iterator[dict[str, Value]]:
    """Default configs in order of preference; the first valid one is taken."""
    w = chained_part(w)
    shape = w.factors[0][0], len(w.factors)
    table = {**_ANY, **(_FLOAT32 if w.dtype == "float32" else _HALF)}
    if shape == (64, 2) and w.m <= 8 * device.units:
        table[shape] = (8, 256, 1, "none", "nc", "wb", 4, 2)  # one block an SM holds all
    if w.dtype != "float32" and shape in _WALK:
        knobs = dict(zip(("threads", "per_sm", "prefetch", "l2", "store", "unroll"), _WALK[shape], strict=True))
        yield {**knobs, "rows": 1, "persistent": True, "load": "nc", "group": 2}
    rows, threads, most = (int(v) for v in table[shape][:3])
    prefetch, *hints = table[shape][3:]
    while rows > 1 and (rows > w.m or 2 * w.m < device.units * rows):  # few rows: spread them over the multiprocessors
        rows, threads = rows // 2, threads // 2
    for per_sm in sorted((int(v) for v in values["per_sm"] if int(v) <= most), reverse=True):
        base: dict[str, Value] = {"rows": rows, "threads": threads, "per_sm": per_sm}
        base.update(zip(("load", "store", "unroll", "group"), hints, strict=True))
        if w.m > device.units * per_sm * rows and prefetch != "none":
            yield {**base, "persistent": True, "prefetch": "none" if prefetch == "walk" else prefetch, "l2": False}
        yield {**base, "persistent": False, "prefetch": "none", "l2": False}
