"""A chain of two Kronecker-sparse factors in one launch of TMA and wgmma (CUDA, sm_90a), 16-bit, batch-first.

The middle of 64 samples stays in shared memory. The weights of both factors stay there too where they fit; else they are streamed
through L2 for each tile of a block. The weights of a second factor with d > 1 are put in order by a launch before it, or by each
block.

    X (64, c1) of block i ─ W1 ─► middle (64, i·b1 + j) = (64, i2, k, l) ─ as (i2, l, k) in shared memory
    middle (64, c2) of (i2, l) ─ W2 ─► (64, j, l) ─ Y

`kronsched bench ks --suite vit` compares with the two factors one by one.

Read first: `KSCudaPairWgmma.apply`, then ks_pair_wgmma_plan.py and ks_pair_wgmma_kernel.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.schedules.ks_pair_wgmma_plan import ITEM, PANEL, ROWS, STEPS, WgmmaPairPlan, plan_wgmma_pair, why_not
from kronsched.schedules.ks_parts import launch_of, renamed
from kronsched.schedules.ks_sort import sort_kernel
from kronsched.space import Config, SearchSpace, load_knobs
from kronsched.workloads.base import TensorSpec, Workload
from kronsched.workloads.ks import KSMatmul

if TYPE_CHECKING:
    from kronsched.hardware import Device


_SMALLEST: Config = {
    "groups": 1, "split": "samples", "x_stages": 1, "w_stages": 2, "weights": "stream",
    "panels": 1, "copy": "threads", "min_blocks": 1,
}  # fmt: skip
"""Knobs that need the least shared memory and registers, but for the width of a run."""
_HEAVY = 2
"""Elements of weights for one of 64 samples of X and Y, above which the traffic of the weights matters most."""
_ENOUGH = {"x": 6, "stream": 4, "apart": 2, "resident": 0, "gather": 0}
"""Panels of X, and of weights by how they are held, in flight, beyond which nothing was gained on an H200."""
# Fitted to the three chains of a ViT-S/16 on an H200.
_LAUNCH_US = 1.2
_PACK_US = 1.6
_MEMORY = 1.07
_PRODUCTS = 0.74
_UNKNOWN_GFLOPS = 500_000.0
_LONE_ACTIVATION_US = 1.1e-6
"""A result of a warpgroup that is alone in its block takes so much longer than other schedules' (H200, gelu). Their estimates
leave activations out, and so do those of blocks of several warpgroups here."""


class KSCudaPairWgmma(Schedule):
    """Two factors, float16 and bfloat16 with float32 sums; the middle is rounded to 16 bits, as between two launches."""

    name: ClassVar[str] = "ks_cuda_pair_wgmma"
    family: ClassVar[str] = "ks"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.6

    def supports(self, workload: Workload, device: Device) -> str | None:
        """Chains of two 16-bit factors in batch_first, on Hopper, whose middle fits in shared memory."""
        assert isinstance(workload, KSMatmul)
        if (reason := why_not(workload, device)) is not None:
            return reason
        for block_j, store in itertools.product((16, 32, 64), (64, 128)):  # one of them makes whole staging panels
            try:
                plan_wgmma_pair(workload, {**_SMALLEST, "block_j": block_j, "store": store}, device)
            except InvalidConfig:
                continue
            return None
        return f"the middle of {workload.label} does not fit in the shared memory of {device.name}"

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/ks_cuda_pair_wgmma.toml."""
        assert isinstance(workload, KSMatmul)
        knobs = load_knobs(self.name)
        least = min(knob.values[0] for knob in knobs if knob.name == "w_stages")

        def check(config: Config) -> str | None:
            if config["weights"] in ("resident", "gather") and config["w_stages"] != least:
                return f"w_stages={config['w_stages']} has no effect here, w_stages={least} is the same kernel"
            try:
                plan_wgmma_pair(workload, config, device)
            except InvalidConfig as e:
                return str(e)
            return None

        return SearchSpace(self.name, knobs, check)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """The way to split and to hold weights that was best on an H200, with the least padding and the deepest rings."""
        assert isinstance(workload, KSMatmul)
        knobs = {knob.name: knob.values for knob in load_knobs(self.name)}
        for way in _ways(workload):
            best: tuple[tuple[float, ...], Config] | None = None
            stages = knobs["w_stages"][:1] if way["weights"] in ("resident", "gather") else knobs["w_stages"]
            for values in itertools.product(knobs["block_j"], knobs["store"], knobs["x_stages"], stages):
                found = zip(("block_j", "store", "x_stages", "w_stages"), values, strict=True)
                config = {**way, **dict(found), "panels": 1, "min_blocks": 1}
                try:
                    p = plan_wgmma_pair(workload, config, device)
                except InvalidConfig:
                    continue
                key = _preference(p)
                if best is None or key < best[0]:
                    best = key, config
            if best is not None:
                return best[1]
        raise InvalidConfig(f"the middle of {workload.label} does not fit in the shared memory of {device.name}")

    def expected_us(self, workload: Workload, config: Config, device: Device) -> float:
        """Memory's time and most of the products' time, one after the other."""
        assert isinstance(workload, KSMatmul)
        p = plan_wgmma_pair(workload, config, device)
        memory = workload.min_bytes / (device.bandwidth_gbs * 1e3)
        (a1, b1, _, _), (a2, _, c2, d2) = p.first, p.second
        products = a1 * b1 * p.first_chunks * STEPS + a2 * d2 * p.j_blocks * p.block_j * c2
        rate = device.peak_gflops.get(p.dtype, _UNKNOWN_GFLOPS) * 1e3  # flops a microsecond
        alone = workload.activation is not None and p.groups == 1
        activation = _LONE_ACTIVATION_US * workload.batch * workload.sizes[-1] if alone else 0.0
        return (
            _LAUNCH_US + _PACK_US * p.packs + _MEMORY * memory + _PRODUCTS * 2 * p.tiles * p.rows * products / rate + activation
        )

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """Scratch: packed weights p1, where the second factor has d > 1."""
        import tvm

        from kronsched.schedules.ks_pair_wgmma_kernel import pair_kernel

        assert isinstance(workload, KSMatmul)
        p = plan_wgmma_pair(workload, config, device)
        x, w0, w1, *more = workload.inputs
        funcs: dict[str, Any] = {}
        launches: list[Launch] = []
        scratch: list[TensorSpec] = []

        def add(name: str, func: Any, *tensors: TensorSpec) -> None:
            funcs[name] = renamed(func, *tensors).with_attr("global_symbol", name)
            launches.append(replace(launch_of(name, *tensors), overlap=True))

        if p.packs:
            a, b, c, d = p.second
            scratch.append(TensorSpec("p1", (a * b * c * d,), p.dtype))
            add("ks_pack_1", sort_kernel(a * b, c, d, p.dtype, merge=False), w1, scratch[0])
            w1 = scratch[0]
        add("ks_pair", pair_kernel(p, "ks_pair"), x, w0, w1, workload.output, *more)
        return Scheduled(tvm.IRModule(funcs), tuple(launches), tuple(scratch))

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Bytes of the busiest SM, samples of it, bytes in flight, shared memory."""
        assert isinstance(workload, KSMatmul)
        p = plan_wgmma_pair(workload, config, device)
        return {
            "busiest": _busiest(p, device),
            "samples": float(_turns(p, device) * p.rows),
            "x_in_flight": float(p.min_blocks * p.groups * p.x_stages * PANEL),
            "w_in_flight": float(p.min_blocks * p.rings[1].count * p.rings[1].size),
            "shared_kb": p.shared_bytes / 1024,
            "sums": float(p.sums),
        }


def _ways(w: KSMatmul) -> list[Config]:
    """Knobs to try one after the other.

    Weights stay in shared memory if they fit; where they outweigh 64 samples by far, each load of them serves many samples.
    """
    kept = "gather" if w.patterns[1][3] > 1 else "resident"
    alone: Config = {"groups": 1, "split": "samples", "weights": kept, "copy": "threads"}
    several = [{"groups": g, "split": "samples", "weights": "apart", "copy": "tma"} for g in (3, 2)]
    together = [{"groups": g, "split": "outputs", "weights": "stream", "copy": "tma"} for g in (2, 3)]
    heavy = sum(a * b * c * d for a, b, c, d in w.patterns) > _HEAVY * ROWS * (w.sizes[0] + w.sizes[-1])
    ways: list[Config] = [alone, *(several if heavy else []), *together, {**alone, "weights": "stream"}]
    return ways


def _preference(p: WgmmaPairPlan) -> tuple[float, ...]:
    """Less is better: padded outputs j, warpgroups without a run, shallow rings, narrow runs, short stores."""
    runs = p.second[0] * p.j_blocks
    depth = min(p.x_stages, _ENOUGH["x"]) + min(p.w_stages, _ENOUGH[p.weights])
    idle = -runs % p.groups if p.together else 0
    return float(p.j_blocks * p.block_j), float(idle), -float(depth), -float(p.block_j), -float(p.store), float(p.x_stages)


def _turns(p: WgmmaPairPlan, device: Device) -> int:
    """Tiles of the busiest SM."""
    return ceil(p.tiles / p.blocks) * ceil(p.blocks / device.units)


def _busiest(p: WgmmaPairPlan, device: Device) -> float:
    """Bytes that the busiest SM reads and writes through L2."""
    (a1, _, _, _), (a2, b2, _, d2) = p.first, p.second
    samples = p.rows * (p.first_panels * PANEL // ROWS + a2 * b2 * d2 * ITEM)
    weights = a1 * p.first_chunks * p.first[1] * 128 + (p.weight_panels - p.first_panels) * p.block_j * 128
    loads = ceil(p.blocks / device.units) if p.resident else _turns(p, device)
    return float(_turns(p, device) * samples + loads * weights)
