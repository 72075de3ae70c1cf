"""Kron-Matmul of many small equal factors: the last ones by a chained kernel, the others in place on tensor cores.

A row that fits in no shared memory takes two passes or more. The last factors are a product of m·P^k shorter rows, each one
read once (kron_cuda_chain.py, kron_cuda_tf32.py); the first k are contracted on tiles of columns of the result.

    x ── chained kernel: rows of the last axes ── y ── tiles: the first axes × neighbouring columns ── y

Read first: `plan_head`; kron_mma_plan.py for the tiles.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.dtypes import DTYPES
from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.schedules.kron_chain_plan import SERVED
from kronsched.schedules.kron_cuda_chain import KronCudaChain, renamed
from kronsched.schedules.kron_cuda_mma import compute_capability, descend
from kronsched.schedules.kron_cuda_tf32 import KronCudaTf32
from kronsched.schedules.kron_mma_plan import LaunchPlan, group_sizes, merge_axes, plan_launches
from kronsched.schedules.kron_mma_space import fitting_knob, plan_features
from kronsched.space import Config, Knob, SearchSpace, load_knobs
from kronsched.workloads.base import Workload
from kronsched.workloads.kron import KronMatmul

if TYPE_CHECKING:
    from kronsched.hardware import Device

_CHAINED = ("last", "hints")
_HINTS: dict[str, dict[str, str]] = {
    "default": {},
    "stream": {"load": "stream", "store": "cs"},
    "wide": {"load": "wide"},
    "plain": {"load": "nc", "store": "wb"},
}

_WIDE: dict[str, Any] = {"tile": 8192, "threads": 512, "blocks": 1, "stages": 2}
"""Of the tiles of two axes of 16, faster than what the estimate prefers for 16-bit 16^6 on an H200."""


class KronCudaLong(Schedule):
    """KronMatmul of equal square factors of 2 to 32, more of them than one chained kernel contracts."""

    name: ClassVar[str] = "kron_cuda_long"
    family: ClassVar[str] = "kron"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.42

    def supports(self, workload: Workload, device: Device) -> str | None:
        """None where a chained kernel serves the last factors but not all of them."""
        assert isinstance(workload, KronMatmul)
        p, n = workload.factors[0][0], len(workload.factors)
        counts = [k for size, k in SERVED.get(workload.dtype, ()) if size == p]
        if any(pair != (p, p) for pair in workload.factors) or p > 32 or not counts or n <= max(counts):
            return "this schedule serves more equal square factors of 2 to 32 than a chained kernel does"
        if compute_capability(device.arch) < 80:
            return f"{device.arch}: mma.sync with bfloat16 and TF32 and cp.async need sm_80 or later"
        if not self._lengths(workload, device):
            return f"a row of the last factors does not fit in the shared memory of {device.name}"
        try:
            self.default_config(workload, device)
        except InvalidConfig as e:
            return str(e)
        return None

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/kron_cuda_long.toml, less the values that mean nothing for this workload."""
        assert isinstance(workload, KronMatmul)
        lengths = self._lengths(workload, device)
        head = KronMatmul(workload.m, workload.factors[: len(workload.factors) - min(lengths, default=1)], workload.dtype)
        knobs = [
            Knob(k.name, tuple(lengths), k.help) if k.name == "last" else k if k.name in _CHAINED else fitting_knob(k, head)
            for k in load_knobs(self.name)
        ]
        values = {knob.name: knob.values for knob in knobs}

        def check(config: Config) -> str | None:
            try:
                plans = plan_head(workload, config, device)
                schedule, tail, chained = self._chained(workload, config, device)
                why = schedule.space(tail, device).invalid(chained)
                if config["hints"] != "default" and chained == self._chained(workload, {**config, "hints": "default"}, device)[2]:
                    why = f"hints={config['hints']} has no effect here, hints=default is the same kernel"
            except InvalidConfig as e:
                return str(e)
            return why or self._idle(workload, plans, config, values)

        return SearchSpace(self.name, knobs, check)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """The longest chained kernel that leaves two axes or three to the tiles; those by `kron_cuda_mma.descend`."""
        assert isinstance(workload, KronMatmul)
        space = self.space(workload, device)
        values = {knob.name: knob.values for knob in space.knobs}
        n = len(workload.factors)
        order = sorted(values["last"], key=lambda k: (n - int(k) < 2, -int(k)))
        for last, columns in itertools.product(order, sorted(values["ctile"], reverse=True)):  # whole lines of memory first
            fixed = {**values, "last": (last,), "hints": ("default",), "ctile": (columns,)}

            def plans(config: Mapping[str, Any]) -> tuple[LaunchPlan, ...]:
                return plan_head(workload, config, device)

            best = descend(fixed, plans, workload.dtype, device)
            if best is None:
                continue
            wishes = [{**best, **_WIDE}] if workload.factors[0][0] == 16 and workload.dtype != "float32" else []
            for stages, fuse in itertools.product((best["stages"], *values["stages"]), (best["fuse"], *values["fuse"])):
                wishes.append({**best, "stages": stages, "fuse": fuse})
            for config in wishes:
                if all(v in values[k] for k, v in config.items()) and space.invalid(config) is None:
                    return config
        found = next(iter(space), None)
        if found is None:
            raise InvalidConfig(f"no config of {self.name} is valid for {workload.label} on {device.name}")
        return found.config

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """`kron_0` of the chained kernel, then one PrimFunc for each launch of the first axes, in place on y."""
        import tvm

        from kronsched.schedules.kron_mma_program import program

        assert isinstance(workload, KronMatmul)
        n, last = len(workload.factors), int(config["last"])
        schedule, tail, chained = self._chained(workload, config, device)
        inner = schedule.apply(tail, chained, device)
        names = {"x": "x", "y": "y", **{f"f{i}": f"f{n - last + i}" for i in range(last)}}
        funcs = {name.name_hint: renamed(func, names) for name, func in inner.mod.functions.items()}
        launches = [dataclasses.replace(launch, args=tuple(names[a] for a in launch.args)) for launch in inner.launches]
        size = workload.m * workload.k_in
        for i, plan in enumerate(plan_head(workload, config, device)):
            name = f"kron_head_{i}"
            funcs[name] = program(plan, workload.dtype, name, "y", "y", workload.factors[plan.first : plan.last], (size, size))
            launches.append(Launch(name, (*(f"f{j}" for j in range(plan.first, plan.last)), "y")))
        return Scheduled(tvm.IRModule(funcs), tuple(launches))

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Those of the launches of the first axes, plus the bytes and the time of the chained kernel."""
        assert isinstance(workload, KronMatmul)
        plans = plan_head(workload, config, device)
        features = dict(plan_features(plans, device))
        moved = 2.0 * workload.m * workload.k_in * DTYPES[workload.dtype].itemsize
        features["launches"] = len(plans) + 1.0
        features["roofline_us"] = (len(plans) + 1) * moved / device.bandwidth_gbs / 1e3
        features["last"] = float(config["last"])
        return features

    def _lengths(self, w: KronMatmul, device: Device) -> list[int]:
        """How many last factors a chained kernel may take."""
        p, n = w.factors[0][0], len(w.factors)
        found = []
        for size, k in SERVED.get(w.dtype, ()):
            if size == p and k < n:
                tail = KronMatmul(w.m * p ** (n - k), w.factors[n - k :], w.dtype)
                if KronCudaChain().supports(tail, device) is None:
                    found.append(k)
        return sorted(found)

    def _chained(self, w: KronMatmul, config: Config, device: Device) -> tuple[Schedule, KronMatmul, Config]:
        """The schedule of the last factors, their product and its config."""
        n, last = len(w.factors), int(config["last"])
        first = w.factors[: n - last]
        tail = KronMatmul(w.m * prod(p for p, _ in first), w.factors[n - last :], w.dtype)
        tf32 = KronCudaTf32()
        schedule: Schedule = tf32 if tf32.supports(tail, device) is None else KronCudaChain()
        return schedule, tail, {**schedule.default_config(tail, device), **_HINTS[str(config["hints"])]}

    def _idle(
        self, w: KronMatmul, plans: tuple[LaunchPlan, ...], config: Config, values: Mapping[str, tuple[Any, ...]]
    ) -> str | None:
        """One line naming a knob that repeats another config's kernels."""
        head = KronMatmul(w.m, w.factors[: len(w.factors) - int(config["last"])], w.dtype)
        n = len(merge_axes(head, int(config["merge"])))
        same = [v for v in values["fuse"] if group_sizes(n, int(v)) == group_sizes(n, int(config["fuse"]))]
        if config["fuse"] != same[0]:
            return f"fuse={config['fuse']} has no effect here, fuse={same[0]} is the same kernel"
        if all(len(p.axes) == 1 for p in plans) and config["order"] != values["order"][0]:
            return f"order={config['order']} has no effect here, order={values['order'][0]} is the same kernel"
        return None


def plan_head(w: KronMatmul, config: Config, device: Device) -> tuple[LaunchPlan, ...]:
    """The launches of the first axes. Raises InvalidConfig with one line."""
    n, last = len(w.factors), int(config["last"])
    head = KronMatmul(w.m, w.factors[: n - last], w.dtype)
    sizes = device.shared_per_block, device.shared_per_sm, device.units, device.registers_per_sm
    return plan_launches(head, config, *sizes, inner=prod(p for p, _ in w.factors[n - last :]))
