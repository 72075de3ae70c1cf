"""The work decompositions of the SplitK paper (arXiv 2402.00025) in our own schedule, as peers.

    dataparallel_paper   one block of 16 rows × 32 columns an output tile, the whole of k in one walk
    splitk_paper         the same tiles, k split over 4 blocks (8 on Hopper, as the paper found best)

They differ from the paper's Triton kernels in what the schedule always does: weights in fragment order, the cheaper dequantise,
and a sum of partial results in order instead of atomics. So they are faster than its kernels, and show what tiling and search
add to the decomposition; they are shown for information. Where the schedule has no such config at a shape, the nearest one that
keeps the split is taken.

Read first: `paper_config`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from kronsched.bench.peers.base import PeerUnavailable, for_information
from kronsched.bench.peers.w4a16_weights import gemm_of

if TYPE_CHECKING:
    import torch

    from kronsched.hardware import Device
    from kronsched.measure.crew import Crew
    from kronsched.runtime.module import TunedModule
    from kronsched.space import Config
    from kronsched.workloads.base import Workload
    from kronsched.workloads.gemm import Gemm

SPACE = "gemm_w4a16_cuda"
_TILES: Mapping[str, Any] = {"strips": 1, "warps_n": 2, "warps_k": 1, "mtile": 2, "stages": 2, "x_load": "late", "batch": 1}
"""16 rows × 32 columns, warps side by side along n, a ring of two stages."""
SPLITS = {"dataparallel_paper": False, "splitk_paper": True}
"""Whether a peer splits k."""
BUILD_TIMEOUT_S = 120.0
PREBUILD_TIMEOUT_S = 300.0
_ORDER = ("split_k", "mtile", "warps_k", "strips", "warps_n", "stages")
"""Which knobs matter most, where a shape does not allow all of them."""


@for_information
def dataparallel_paper(workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The paper's baseline: one block an output tile."""
    return _peer(workload, inputs, split=False)


@for_information
def splitk_paper(workload: Workload, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The paper's SplitK: several blocks an output tile."""
    return _peer(workload, inputs, split=True)


def paper_config(w: Gemm, device: Device, split: bool) -> Config:
    """The config of `SPACE` nearest to the paper's; PeerUnavailable when none has its split."""
    from kronsched import registry

    schedule = registry.schedule(SPACE)
    if (reason := schedule.supports(w, device)) is not None:
        raise PeerUnavailable(reason)
    space = schedule.space(w, device)
    values = {knob.name: knob.values for knob in space.knobs}
    factor = 1 if not split else 8 if device.arch.startswith("sm_90") else 4
    wish = {**schedule.default_config(w, device), **_TILES, "split_k": factor}
    splits = [v for v in values["split_k"] if (v != 1) == split]
    nearest = [sorted(splits if name == "split_k" else values[name], key=partial(_apart, wish[name])) for name in _ORDER]
    for choice in product(*nearest):
        config = {**wish, **dict(zip(_ORDER, choice, strict=True))}
        if space.invalid(config) is None:
            return config
    raise PeerUnavailable(f"no config of {SPACE} for {w.label} has {'k split' if split else 'k in one piece'}")


def _apart(wish: int, value: int) -> int:
    return abs(value - wish)


def prebuild(workloads: Sequence[Workload], names: Sequence[str], device: Device, crew: Crew) -> None:
    """Fill the artefact cache with the kernels of the named peers by all builders at once; what fails is a note of its row."""
    from kronsched.runtime.cache import get_or_build

    jobs = []
    for w in workloads if device.kind == "cuda" else ():
        for name in names:
            if name in SPLITS and getattr(w, "b_dtype", "") == "int4" and getattr(w, "a_dtype", "") != "int4":
                with suppress(PeerUnavailable):
                    jobs.append((w, SPACE, paper_config(gemm_of(w), device, SPLITS[name]), device))
    if jobs:
        builders, _ = crew.workers()
        wait([builders.schedule(get_or_build, *job, timeout=BUILD_TIMEOUT_S) for job in jobs], timeout=PREBUILD_TIMEOUT_S)


def _peer(workload: Workload, inputs: Sequence[torch.Tensor], split: bool) -> Callable[[], torch.Tensor]:
    if not inputs[0].is_cuda:
        raise PeerUnavailable("the paper's decompositions are for a GPU")
    module = _module(gemm_of(workload), inputs[0].device.index or 0, split)

    def call() -> torch.Tensor:
        y: torch.Tensor = module(*inputs)
        return y

    return call


def _module(w: Gemm, index: int, split: bool) -> TunedModule:
    """The kernel, built once for all copies of the inputs."""
    from kronsched.hardware import resolve_target
    from kronsched.runtime.cache import get_or_build
    from kronsched.runtime.module import TunedModule

    key = (w.key, index, split)
    if key not in _built:
        device = resolve_target(f"cuda:{index}")
        _built.clear()
        artefact = get_or_build(w, SPACE, paper_config(w, device, split), device)
        _built[key] = TunedModule.from_artefact(artefact, device_index=index)
    return _built[key]


_built: dict[tuple[str, int, bool], TunedModule] = {}
"""The kernel of the shape at hand only: a suite never comes back to one."""
