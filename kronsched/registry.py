"""Where families, schedules and search strategies are looked up, built in or from outside the package.

Adding a built-in part is one line in `_BUILTIN`. Outside parts come from one call (`register_family`,
`register_schedule`, `register_strategy`) or an entry point in the group "kronsched.families",
"kronsched.schedules" or "kronsched.strategies".
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from kronsched.errors import ArgumentError, choose

if TYPE_CHECKING:
    from kronsched.hardware import Device
    from kronsched.schedules.base import Schedule
    from kronsched.search.base import SearchStrategy
    from kronsched.workloads.base import Workload

_BUILTIN: dict[str, dict[str, str]] = {
    "families": {
        "kron": "kronsched.workloads.kron:KronMatmul",
        "ks": "kronsched.workloads.ks:KSMatmul",
        "ks_wgrad": "kronsched.workloads.ks_wgrad:KSWeightGrad",
        "gemm": "kronsched.workloads.gemm:Gemm",
        "conv2d": "kronsched.workloads.conv2d:Conv2d",
    },
    "schedules": {
        "conv2d_cpu": "kronsched.schedules.conv2d_cpu:Conv2dCpu",
        "conv2d_cuda_simt": "kronsched.schedules.conv2d_cuda_simt:Conv2dCudaSimt",
        "gemm_dense_cpu": "kronsched.schedules.gemm_dense_cpu:GemmDenseCpu",
        "gemm_dense_cuda_mma": "kronsched.schedules.gemm_dense_mma:GemmDenseMma",
        "gemm_int4_cuda": "kronsched.schedules.gemm_int4_cuda:GemmInt4Cuda",
        "gemm_int4_wgmma": "kronsched.schedules.gemm_int4_wgmma:GemmInt4Wgmma",
        "gemm_dense_wgmma": "kronsched.schedules.gemm_dense_wgmma:GemmDenseWgmma",
        "conv2d_cuda_tma": "kronsched.schedules.conv2d_cuda_tma:Conv2dCudaTma",
        "conv2d_cuda_window": "kronsched.schedules.conv2d_cuda_window:Conv2dCudaWindow",
        "conv2d_cuda_wgmma": "kronsched.schedules.conv2d_cuda_wgmma:Conv2dCudaWgmma",
        "conv2d_int4_wgmma": "kronsched.schedules.conv2d_int4_wgmma:Conv2dInt4Wgmma",
        "conv2d_cuda_int4": "kronsched.schedules.conv2d_cuda_int4:Conv2dCudaInt4",
        "conv2d_cuda_mma": "kronsched.schedules.conv2d_cuda_mma:Conv2dCudaMma",
        "gemm_w4a16_cuda": "kronsched.schedules.gemm_w4a16_cuda:GemmW4A16Cuda",
        "gemm_w4a16_wgmma": "kronsched.schedules.gemm_w4a16_wgmma:GemmW4A16Wgmma",
        "gemm_w4a16_cpu": "kronsched.schedules.gemm_w4a16_cpu:GemmW4A16Cpu",
        "kron_cuda_wgmma": "kronsched.schedules.kron_cuda_wgmma:KronCudaWgmma",
        "kron_cuda_simt": "kronsched.schedules.kron_cuda_simt:KronCudaSimt",
        "kron_cuda_chain": "kronsched.schedules.kron_cuda_chain:KronCudaChain",
        "kron_cuda_slab": "kronsched.schedules.kron_cuda_slab:KronCudaSlab",
        "kron_cuda_mma": "kronsched.schedules.kron_cuda_mma:KronCudaMma",
        "kron_cuda_tf32": "kronsched.schedules.kron_cuda_tf32:KronCudaTf32",
        "kron_cuda_long": "kronsched.schedules.kron_cuda_long:KronCudaLong",
        "kron_cpu": "kronsched.schedules.kron_cpu:KronCpu",
        "ks_cpu": "kronsched.schedules.ks_cpu:KSCpu",
        "ks_cpu_complex": "kronsched.schedules.ks_cpu_complex:KSCpuComplex",
        "ks_cuda_complex": "kronsched.schedules.ks_cuda_complex:KSCudaComplex",
        "ks_cuda_simt": "kronsched.schedules.ks_cuda_simt:KSCudaSimt",
        "ks_cuda_tma": "kronsched.schedules.ks_cuda_tma:KSCudaTma",
        "ks_cuda_tma_last": "kronsched.schedules.ks_cuda_tma_last:KSCudaTmaLast",
        "ks_cuda_sorted": "kronsched.schedules.ks_cuda_mma:KSCudaSorted",
        "ks_cuda_mma": "kronsched.schedules.ks_cuda_mma:KSCudaMma",
        "ks_cuda_pair": "kronsched.schedules.ks_cuda_pair:KSCudaPair",
        "ks_cuda_pair_wgmma": "kronsched.schedules.ks_cuda_pair_wgmma:KSCudaPairWgmma",
        "ks_cuda_mma_last": "kronsched.schedules.ks_cuda_mma:KSCudaMmaLast",
        "ks_wgrad_cpu": "kronsched.schedules.ks_wgrad_cpu:KSWgradCpu",
        "ks_wgrad_simt": "kronsched.schedules.ks_wgrad_simt:KSWgradSimt",
        "ks_wgrad_mma": "kronsched.schedules.ks_wgrad_mma:KSWgradMma",
        "ks_cuda_each": "kronsched.schedules.ks_cuda_each:KSCudaEach",
        "ks_cuda_each_last": "kronsched.schedules.ks_cuda_each:KSCudaEachLast",
    },
    "strategies": {
        "distinctive": "kronsched.search.distinctive:Distinctive",
        "annealing": "kronsched.search.annealing:Annealing",
        "evolutionary": "kronsched.search.evolutionary:Evolutionary",
        "random": "kronsched.search.random:Random",
        "exhaustive": "kronsched.search.exhaustive:Exhaustive",
    },
}
_outside: dict[str, dict[str, type[Any]]] = {kind: {} for kind in _BUILTIN}


def _names(kind: str) -> list[str]:
    found = entry_points(group=f"kronsched.{kind}")
    return sorted({*_BUILTIN[kind], *_outside[kind], *(e.name for e in found)})


def _get(kind: str, name: str) -> type[Any]:
    if name in _outside[kind]:
        return _outside[kind][name]
    if name in _BUILTIN[kind]:
        module, attribute = _BUILTIN[kind][name].split(":")
        cls: type[Any] = getattr(importlib.import_module(module), attribute)
        return cls
    for entry in entry_points(group=f"kronsched.{kind}", name=name):
        return entry.load()  # type: ignore[no-any-return]
    raise choose({"families": "family", "schedules": "space", "strategies": "strategy"}[kind], name, _names(kind))


def _register(kind: str, name: object, cls: type[Any]) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise ArgumentError(f"name={name!r} of {cls.__name__} is not allowed: use letters, digits and underscores")
    if name in _BUILTIN[kind]:
        raise ArgumentError(f"name={name!r} of {cls.__name__} is already taken by a built-in part")
    _outside[kind][name] = cls


def register_family(cls: type[Workload]) -> type[Workload]:
    """Make a workload family known under `cls.family`. Usable as a class decorator."""
    _register("families", getattr(cls, "family", None), cls)
    return cls


def register_schedule(cls: type[Schedule]) -> type[Schedule]:
    """Make a schedule known under `cls.name`. Usable as a class decorator."""
    _register("schedules", getattr(cls, "name", None), cls)
    return cls


def register_strategy(cls: type[SearchStrategy]) -> type[SearchStrategy]:
    """Make a search strategy known under `cls.name`. Usable as a class decorator."""
    _register("strategies", getattr(cls, "name", None), cls)
    return cls


def family_names() -> list[str]:
    """Names of all known families."""
    return _names("families")


def strategy_names() -> list[str]:
    """Names of all known search strategies."""
    return _names("strategies")


def family(name: str) -> type[Workload]:
    """The workload class of a family; `ArgumentError` lists the known names."""
    return _get("families", name)


def strategy(name: str) -> type[SearchStrategy]:
    """The class of a search strategy; `ArgumentError` lists the known names."""
    return _get("strategies", name)


def schedule(name: str) -> Schedule:
    """A schedule by name (the name of its search space)."""
    instance: Schedule = _get("schedules", name)()
    return instance


def schedules_for(workload: Workload, device: Device) -> list[Schedule]:
    """The schedules that can serve a workload on a device, in order of name."""
    found = []
    for name in _names("schedules"):
        cls = _get("schedules", name)
        if cls.family == workload.family and cls.device_kind == device.kind:
            instance = cls()
            if instance.supports(workload, device) is None:
                found.append(instance)
    return found


def not_served(workload: Workload, device: Device) -> str:
    """One line for when `schedules_for` finds none, with what the schedules for such a device say."""
    names: dict[str, list[str]] = {}
    for schedule in schedules_of(workload.family):
        if schedule.device_kind == device.kind:
            reason = str(schedule.supports(workload, device)).removeprefix(schedule.name).strip()
            names.setdefault(reason, []).append(schedule.name)
    line = f"{workload.label}: no schedule of this version serves it on {device.name} ({device.kind})"
    return "; ".join([line, *(f"{', '.join(found)}: {reason}" for reason, found in names.items())])


def schedules_of(family: str) -> list[Schedule]:
    """All schedules of a family, whatever they serve, in order of name."""
    classes = (_get("schedules", name) for name in _names("schedules"))
    return [cls() for cls in classes if cls.family == family]


def workload_from_dict(data: Mapping[str, Any]) -> Workload:
    """Rebuild a workload from its `to_dict` form (a record's `workload` field)."""
    if not isinstance(data, Mapping) or not isinstance(data.get("family"), str):
        raise ArgumentError(f"workload={data!r} is not allowed: an object with a string field 'family' is needed")
    return family(data["family"]).from_fields(data)
