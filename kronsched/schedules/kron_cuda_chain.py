"""Kron-Matmul of equal small factors in one launch, chained through registers: a TIRx tile program.

A block holds whole rows of X in shared memory between a few register phases; each phase contracts one or two axes on data that a
warp holds in registers, and puts it back where it came from. X is read once and Y written once.

    global ── registers (2 axes) ── shared ── registers (1 or 2 axes) ── shared ── registers (1 or 2 axes) ── global
                    next rows' data on its way (prefetch)

16-bit types go through tensor cores with float32 sums and are rounded to storage between any two axes; float32 is plain FMA.

Read first: kron_chain_plan.py (which shapes, what must hold), kron_chain_half.py and kron_chain_fma.py (the kernels),
kron_chain_layout.py (where things are).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.schedules.kron_chain_plan import RADIX, ChainPlan, chain_features, idle_knob, plan_chain, why_not
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
            for unroll in values["unroll"] if workload.dtype == "float32" else reversed(values["unroll"]):
                if space.invalid({**config, "unroll": unroll}) is None:
                    return {**config, "unroll": unroll}
        for candidate in space:
            return candidate.config
        raise InvalidConfig(f"no config of {self.name} is valid for {workload.label} on {device.name}")

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One PrimFunc, `kron_0`."""
        import tvm

        assert isinstance(workload, KronMatmul)
        plan = plan_chain(workload, config, device)
        args = ("x", *(f"f{i}" for i in range(plan.n)), "y")
        func = _restricted(_kernel(plan), args).with_attr("global_symbol", "kron_0")
        return Scheduled(tvm.IRModule({"kron_0": func}), (Launch("kron_0", args),))

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Waves, occupancy, bytes through each memory level, bytes in flight, predicted roofline time."""
        assert isinstance(workload, KronMatmul)
        return chain_features(workload, plan_chain(workload, config, device), device)


def _kernel(plan: ChainPlan) -> Any:
    from kronsched.schedules import kron_chain_fma, kron_chain_half, kron_chain_half16

    if plan.dtype == "float32":
        return kron_chain_fma.chain_fma(plan)
    return kron_chain_half.chain8(plan) if plan.p == 8 else kron_chain_half16.chain16(plan)


def _restricted(func: Any, names: tuple[str, ...]) -> Any:
    """The function without the parameters (of factors that this N has not) that its body does not use."""
    from tvm import tirx

    params = [p for p in func.params if str(p.name) in names]
    return tirx.PrimFunc(params, func.body, func.ret_type, func.attrs)


def _fitting(knob: Knob, w: KronMatmul) -> Knob:
    """The knob with the values that may be valid for this workload (the first one where none is)."""
    values: tuple[Value, ...] = knob.values
    if knob.name == "rows":
        values = tuple(v for v in values if int(v) <= w.m)
    elif knob.name == "group" and w.dtype != "float32":
        values = values[:1]
    elif knob.name == "prefetch" and w.dtype == "float32":
        values = tuple(v for v in values if v != "registers")
    elif knob.name == "threads" and w.dtype == "float32":
        lanes = w.k_in // RADIX
        values = tuple(v for v in values if int(v) % lanes == 0)
    return Knob(knob.name, values or knob.values[:1], knob.help)


# (P, N): rows, threads, blocks an SM, group of the default config; fewer blocks where an SM has less shared memory.
_HALF = {
    (8, 3): (8, 256, 4, 2), (8, 4): (1, 128, 8, 2), (8, 5): (1, 256, 2, 2), (16, 3): (1, 64, 8, 2), (16, 4): (1, 512, 1, 2),
}  # fmt: skip
_FLOAT32 = {
    (8, 4): (1, 64, 6, 2), (8, 5): (1, 512, 1, 4), (4, 6): (1, 64, 8, 2), (4, 7): (1, 256, 2, 8), (2, 12): (1, 64, 4, 8),
    (2, 13): (1, 128, 3, 8),
}  # fmt: skip
# Prefetches in order of preference, where blocks outnumber what the GPU holds. A prefetch of 4^7 would spill registers.
_AHEAD: dict[str, tuple[str, ...]] = {"float32": ("async",), "float16": ("split", "async"), "bfloat16": ("split", "async")}


def _wishes(w: KronMatmul, device: Device, values: Mapping[str, tuple[Value, ...]]) -> Iterator[dict[str, Value]]:
    """Default configs in order of preference; the first valid one is taken."""
    p, n = w.factors[0][0], len(w.factors)
    rows, threads, most, group = (_FLOAT32 if w.dtype == "float32" else _HALF)[p, n]
    while rows > w.m:
        rows, threads = rows // 2, threads // 2
    for per_sm in sorted((int(v) for v in values["per_sm"] if int(v) <= most), reverse=True):
        base: dict[str, Value] = {"rows": rows, "threads": threads, "per_sm": per_sm, "load": "nc", "store": "wb"}
        if w.m > device.units * per_sm * rows and (p, n) != (4, 7):
            for prefetch in _AHEAD[w.dtype]:
                yield {**base, "persistent": True, "prefetch": prefetch, "group": group}
        yield {**base, "persistent": False, "prefetch": "none", "group": 8 if (p, n) == (8, 5) else group}
