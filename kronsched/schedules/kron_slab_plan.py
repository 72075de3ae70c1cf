"""How the 16-bit Kron-Matmul of large factors is cut up: pure arithmetic, no TVM. Schedule, constraints and features read it.

The first launch contracts the last two axes, a slab of P x P at a time, from x to y, or the last three (P = 64, a cluster of
blocks to a row of 64^3); each further launch one axis before them, in place on y, P values of it by P columns at a time.
Groups of one (P = 64) or two (P = 128) warpgroups take slabs.

Read first: `SlabLaunch`, `CubeLaunch`, `plan_slabs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, Any

from kronsched.errors import InvalidConfig
from kronsched.space import Config
from kronsched.workloads.kron import KronMatmul

if TYPE_CHECKING:
    from kronsched.hardware import Device

SIZES = (64, 128)
"""P = Q that are served."""
DTYPES = ("float16", "bfloat16")
ATOM = 64
"""Columns of a swizzled panel: 128 bytes."""
WARP_BYTES = 16 * 128
"""Shared memory in which a warp turns 16 rows of 64 sums into lines."""


_NEEDS = "it needs two or more square factors of 64 or of 128, or adjacent ones whose products are three of 64"
BLOCKS = 8
"""Blocks of a cluster that hold a row of 64^3, slabs of each."""
STAGED_BYTES = 65 * 1024
"""Shared memory in which a block leaves what the others of its cluster get of a row, 8 KB each, a little apart."""


@dataclass(frozen=True)
class CubeLaunch:
    """The kernel of the last three axes of 64.

    rows: of 64^3 elements.  clusters: of `BLOCKS` blocks, launched.  Else as in `SlabLaunch`.
    """

    axes: tuple[int, ...]
    dtype: str
    rows: int
    clusters: int
    load: str
    store: str

    @property
    def threads(self) -> int:
        """Threads a block: two warpgroups that send, two that receive."""
        return 4 * 128

    @property
    def promotion(self) -> int:
        """What a tensor map makes L2 fetch at a time, in the numbers of tensor maps: 128 or 256 bytes."""
        return 3 if self.load == "wide" else 2

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: factors, its share of a row, what it leaves for others, what they sent, mbarriers."""
        return (3 + 2 * BLOCKS) * 64 * 64 * 2 + STAGED_BYTES + 6 * 8


@dataclass(frozen=True)
class SlabLaunch:
    """One kernel.

    axes: the axes it contracts, in order.  p: their size.  dtype: of the data.  inner: elements from one value of its first axis
    to the next.  slabs: of P x P elements.  groups: that a block works on at a time.  stages: slabs of a group in shared memory.
    per_sm: blocks an SM.  grid: blocks launched.  load: how data is copied.  store: cache hint.  ahead: a product of the next
    slab is in flight while sums are stored.  prefetch: the first slabs are brought to L2 before the launch before has ended.
    """

    axes: tuple[int, ...]
    p: int
    dtype: str
    inner: int
    slabs: int
    groups: int
    stages: int
    per_sm: int
    grid: int
    load: str
    store: str
    ahead: bool
    prefetch: bool

    @property
    def pair(self) -> bool:
        """Whether it contracts two axes."""
        return len(self.axes) == 2

    @property
    def group_threads(self) -> int:
        """Threads of a group: a warpgroup takes 64 rows of sums."""
        return 128 * (self.p // 64)

    @property
    def threads(self) -> int:
        """Threads a block."""
        return self.groups * self.group_threads

    @property
    def slab_bytes(self) -> int:
        """Bytes of a slab, and of a factor."""
        return self.p * self.p * 2

    @property
    def data(self) -> int:
        """Where the groups' slabs begin in shared memory: after the factors."""
        return len(self.axes) * self.slab_bytes

    @property
    def turns(self) -> int:
        """Where the warps' lines begin in shared memory."""
        return self.data + self.groups * self.stages * self.slab_bytes

    @property
    def once(self) -> bool:
        """Whether every slab has a place in shared memory of its own: sums are turned there."""
        return self.stages * self.grid * self.groups >= self.slabs

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.barriers + (self.groups * self.stages * 8 if self.load == "tma" else 0)

    @property
    def barriers(self) -> int:
        """Where the mbarriers begin in shared memory, of each slab in it."""
        return self.turns + (0 if self.once else self.threads // 32 * WARP_BYTES)


def merged(w: KronMatmul) -> tuple[KronMatmul, tuple[tuple[int, ...], ...]] | None:
    """The product with equal square factors of 64 or 128, and the axes that make up each; None when there is no such.

    Adjacent factors are multiplied out only to three of 64, which take one launch: a shorter row fits in shared memory as it is,
    and longer ones take no fewer launches.
    """
    for p in SIZES:
        groups: list[tuple[int, ...]] = [()]
        for axis in range(len(w.factors)):
            if groups[-1] and prod(w.factors[i][0] for i in groups[-1]) >= p:
                groups.append(())
            groups[-1] += (axis,)
        whole = all(a == b for a, b in w.factors) and all(prod(w.factors[i][0] for i in g) == p for g in groups)
        if whole and (2 <= len(groups) == len(w.factors) or (p, len(groups)) == (64, 3)):
            return KronMatmul(w.m, ((p, p),) * len(groups), w.dtype), tuple(groups)
    return None


def whole_factors(w: KronMatmul) -> tuple[KronMatmul, tuple[tuple[int, ...], ...]]:
    """`merged` of a workload that is served."""
    found = merged(w)
    if found is None:
        raise InvalidConfig(_NEEDS)
    return found


def plan_slabs(w: KronMatmul, config: Config, device: Device) -> tuple[SlabLaunch | CubeLaunch, ...]:
    """The launches of a config, first executed first. Raises InvalidConfig with one line."""
    w, _ = whole_factors(w)
    n, fuse = len(w.factors), int(config["fuse"])
    rest = [_launch(w, (axis,), config, device) for axis in reversed(range(n - fuse))]
    _refuse_idle(config, bool(rest))
    if fuse == 2:
        return _launch(w, (n - 2, n - 1), config, device), *rest
    return _cube(w, config, device), *rest


def _refuse_idle(config: Config, more: bool) -> None:
    """Raise InvalidConfig for a knob that has no effect and is not at its first value. more: launches of one axis follow."""
    cluster = ["ahead", "prefetch"] if more else ["ahead", "prefetch", "groups", "stages", "per_sm"]
    idle = ["spare"] if config["fuse"] == 2 else cluster
    first = {"spare": 0, "ahead": False, "prefetch": False, "groups": 1, "stages": 1, "per_sm": 1}
    for knob in idle:
        if config[knob] != first[knob]:
            raise InvalidConfig(f"{knob}={config[knob]} has no effect here, {knob}={first[knob]} is the same kernel")


def _cube(w: KronMatmul, config: Mapping[str, Any], device: Device) -> CubeLaunch:
    """The launch of the last three axes by clusters."""
    n, p = len(w.factors), w.factors[0][0]
    if p != 64 or n < 3:
        raise InvalidConfig(f"fuse=3: a cluster contracts three factors of 64, here are {n} of {p}")
    rows = w.m * p ** (n - 3)
    clusters = max(1, min(rows, device.units // BLOCKS - int(config["spare"])))
    if n == 3 and config["load"] == "tma":
        raise InvalidConfig('fuse=3, load="tma": it always copies by TMA, load="cg" is the same kernel')
    launch = CubeLaunch((n - 3, n - 2, n - 1), w.dtype, rows, clusters, str(config["load"]), str(config["store"]))
    if launch.shared_bytes > device.shared_per_block:
        raise InvalidConfig(
            f"a block needs {launch.shared_bytes} bytes of shared memory, the device has {device.shared_per_block}"
        )
    return launch


def _launch(w: KronMatmul, axes: tuple[int, ...], config: Mapping[str, Any], device: Device) -> SlabLaunch:
    groups, stages, per_sm = int(config["groups"]), int(config["stages"]), int(config["per_sm"])
    p = w.factors[0][0]
    inner = prod(size for size, _ in w.factors[axes[0] + 1 :])
    slabs = w.m * w.k_in // (p * p)
    blocks = ceil(slabs / groups)
    grid = min(blocks, device.units * per_sm)
    hints = str(config["load"]), str(config["store"])
    pair = len(axes) == 2
    ahead, prefetch = bool(config["ahead"]) and pair, bool(config["prefetch"]) and pair
    launch = SlabLaunch(axes, p, w.dtype, inner, slabs, groups, stages, per_sm, grid, *hints, ahead, prefetch)
    _check(launch, device)
    if len(axes) == 2 and (stages - 1) * grid * groups >= slabs > 1 and stages > 1:
        raise InvalidConfig(f"stages={stages}: a group has at most {ceil(slabs / (grid * groups))} slabs, fewer stages do")
    if ahead and slabs <= grid * groups:
        raise InvalidConfig("ahead: a group has one slab")
    if groups > 1 and groups > slabs:
        raise InvalidConfig(f"groups={groups}: there are {slabs} slabs")
    return launch


def _check(launch: SlabLaunch, device: Device) -> None:
    """Raise InvalidConfig when a block, or as many as an SM must hold, need more than there is."""
    per_sm = launch.per_sm
    least = {64: 80, 128: 128}[launch.p] + launch.ahead * launch.p // 2  # with fewer, ptxas runs one product after the other
    if launch.threads > device.max_threads_per_block or launch.threads * per_sm * least > device.registers_per_sm:
        raise InvalidConfig(f"groups={launch.groups}, per_sm={per_sm}: a thread would have fewer than {least} registers")
    if launch.shared_bytes > device.shared_per_block:
        raise InvalidConfig(
            f"a block needs {launch.shared_bytes} bytes of shared memory, the device has {device.shared_per_block}"
        )
    if (launch.shared_bytes + 1024) * per_sm > device.shared_per_sm:
        raise InvalidConfig(f"{per_sm} blocks of {launch.shared_bytes} bytes exceed the shared memory of an SM")


def why_not(w: KronMatmul, device: Device) -> str | None:
    """None when the schedule serves the workload on the device, else one line."""
    if w.dtype not in DTYPES:
        return f"dtype={w.dtype}: it serves {' and '.join(DTYPES)}"
    if device.arch != "sm_90a":
        return f"{device.arch}: wgmma needs sm_90a"
    return None if merged(w) else _NEEDS


def slab_features(w: KronMatmul, launches: tuple[SlabLaunch | CubeLaunch, ...], device: Device) -> dict[str, float]:
    """Waves, occupancy, bytes through each memory level, predicted roofline time (µs)."""
    w, _ = whole_factors(w)
    elements, p = w.m * w.k_in, w.factors[0][0]
    rate = device.peak_gflops.get(w.dtype, 4e5)
    traffic = 4.0 * elements
    time = sum(max(traffic / device.bandwidth_gbs, 2.0 * elements * p * len(x.axes) / rate) / 1e3 for x in launches)
    main = launches[-1]
    if isinstance(main, CubeLaunch):
        blocks, per_sm, slabs, held = main.clusters * BLOCKS, 1, main.rows * BLOCKS**2, BLOCKS
    else:
        blocks, per_sm, slabs, held = main.grid, main.per_sm, main.slabs, main.groups * main.stages
    at_once = main.groups if isinstance(main, SlabLaunch) else BLOCKS
    waves = slabs / (min(blocks, device.units * per_sm) * at_once)
    return {
        "launches": float(len(launches)),
        "global_mb": traffic * len(launches) / 1e6,
        "roofline_us": time,
        "intensity": float(w.flops) / (traffic * len(launches)),
        "shared_kb": main.shared_bytes / 1024,
        "blocks": float(blocks),
        "waves": waves,
        "wave_efficiency": waves / ceil(waves),
        "threads_per_sm": float(main.threads * per_sm),
        "bytes_in_flight": float(per_sm * held * p * p * 2),
    }
