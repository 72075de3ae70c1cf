"""A chain of Kronecker-sparse factors on tensor cores, each factor with a config of its own: one launch behind the other (CUDA).

The schedules of ks_cuda_mma.py serve a chain with one config for all of its factors, which suits none of them where they differ
as much as the (6,64,256,1)(1,128,128,3) of a ViT-S/16. Here the knobs of factor i are those of a factor alone, named `mt_i`, …;
the launches overlap as there.

Read first: `EachFactor`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from kronsched.schedules.ks_cuda_mma import KSCudaMma, KSCudaMmaLast, KSTensorCore
from kronsched.schedules.ks_mma_cost import Plan
from kronsched.space import Config, Knob, SearchSpace
from kronsched.workloads.base import Workload
from kronsched.workloads.ks import KSMatmul

if TYPE_CHECKING:
    from kronsched.hardware import Device

MOST = 4
"""Factors, so that the space stays one that a search can cover."""


class EachFactor(KSTensorCore):
    """What both layouts share; `alone` is the schedule of one factor."""

    alone: ClassVar[KSTensorCore]

    def supports(self, workload: Workload, device: Device) -> str | None:
        """As the schedule of one factor says, for chains of 2 to `MOST` factors."""
        assert isinstance(workload, KSMatmul)
        if not 2 <= len(workload.patterns) <= MOST:
            return f"{len(workload.patterns)} factors: 2 to {MOST} are served"
        return super().supports(workload, device)

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """The knobs of each factor, `_i` behind their names. They are valid together where each factor's are."""
        spaces = [self.alone.space(one, device) for one in _factors(workload)]
        knobs = [Knob(f"{k.name}_{i}", k.values, k.help) for i, space in enumerate(spaces) for k in space.knobs]

        def check(config: Config) -> str | None:
            for i, space in enumerate(spaces):
                if (reason := space.invalid(_of_factor(config, i))) is not None:
                    return f"factor {i}: {reason}"
            return None

        return SearchSpace(self.name, knobs, check)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """The defaults of the factors alone."""
        configs = [self.alone.default_config(one, device) for one in _factors(workload)]
        return {f"{name}_{i}": value for i, config in enumerate(configs) for name, value in config.items()}

    def plans(self, workload: KSMatmul, device: Device, config: Config) -> list[Plan]:
        """See the base class."""
        return [self.plan(workload, pattern, _of_factor(config, i), device) for i, pattern in enumerate(workload.patterns)]


def _factors(workload: Workload) -> list[KSMatmul]:
    """The factors as workloads of their own."""
    assert isinstance(workload, KSMatmul)
    return [replace(workload.plain, pattern=pattern) for pattern in workload.patterns]


def _of_factor(config: Config, i: int) -> Config:
    """The knobs of factor i by their own names."""
    end = f"_{i}"
    return {name.removesuffix(end): value for name, value in config.items() if name.endswith(end)}


class KSCudaEach(EachFactor, KSCudaMma):
    """Chains in layout batch_first."""

    name: ClassVar[str] = "ks_cuda_each"
    alone: ClassVar[KSTensorCore] = KSCudaMma()


class KSCudaEachLast(EachFactor, KSCudaMmaLast):
    """Chains in layout batch_last."""

    name: ClassVar[str] = "ks_cuda_each_last"
    alone: ClassVar[KSTensorCore] = KSCudaMmaLast()
