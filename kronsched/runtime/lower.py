"""Scheduled program -> source text and launch list, by TVM's own passes. No binary is made here.

Read first: `lower`. CUDA: each function of the module goes through TVM's pipeline on its own, which must yield one kernel; grid,
block, shared memory and parameter order are read from the host call TVM generates, the same one its own runtime would make.
CPU: the source is the scheduled TIR script, so that its digest does not depend on the machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kronsched.dtypes import DTYPES
from kronsched.errors import CompileError, InvalidConfig, KronschedError
from kronsched.runtime.manifest import LaunchSpec
from kronsched.runtime.tensor_map import DECLARATION, TensorMap, tensor_maps
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.space import Config
from kronsched.workloads.base import TensorSpec, Workload

if TYPE_CHECKING:
    import tvm

    from kronsched.hardware import Device

_LAUNCH_PARAMS = (
    "blockIdx.x",
    "blockIdx.y",
    "blockIdx.z",
    "threadIdx.x",
    "threadIdx.y",
    "threadIdx.z",
    "clusterCtaIdx.x",
    "tirx.use_dyn_shared_memory",
)


_SWITCH = "TVM_COMPILE_FORCE_FALLBACK"  # of TVM, not of kronsched: see cuda_fallback_module.h
_switch_lock = threading.Lock()


@dataclass(frozen=True)
class Lowered:
    """A scheduled program as source. `mod` holds what a CPU build compiles; it is None on CUDA, where the source is compiled."""

    source: str
    sha256: str
    launches: tuple[LaunchSpec, ...]
    scratch: tuple[TensorSpec, ...]
    mod: tvm.IRModule | None


def lower(workload: Workload, schedule: Schedule, config: Config, device: Device) -> Lowered:
    """Apply the schedule and lower it for the device's kind.

    Raises InvalidConfig when the schedule cannot be applied or breaks a device limit, CompileError when TVM cannot lower it.
    Both carry one line.
    """
    try:
        scheduled = schedule.apply(workload, config, device)
    except KronschedError:
        raise
    except Exception as e:  # TVM reports a primitive that does not apply by many exception types
        raise InvalidConfig(f"{schedule.name}: {first_line(e)}") from e
    _check_tensors(workload, scheduled)
    try:
        if device.kind == "cuda":
            with _passes(scheduled):
                return _lower_cuda(scheduled, device)
        return _lower_cpu(scheduled)
    except KronschedError:
        raise
    except Exception as e:
        raise CompileError(f"lowering of {schedule.name} failed: {first_line(e)}") from e


def first_line(error: BaseException) -> str:
    """The first informative line of a (often long) TVM or compiler message, at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines()]
    useful = [line for line in lines if any(c.isalnum() for c in line)]
    for line in useful:
        # TVM wraps schedule errors as "ScheduleError: An error occurred in ..." followed by the reason.
        if line.startswith("Error message:"):
            return line.removeprefix("Error message:").strip()[:300]
    return (useful[0] if useful else type(error).__name__)[:300]


def _check_tensors(workload: Workload, scheduled: Scheduled) -> None:
    known = {t.name for t in (*workload.inputs, workload.output, *scheduled.scratch)}
    written: set[str] = set()
    for launch in scheduled.launches:
        unknown = sorted(set(launch.args) - known)
        if unknown:
            raise CompileError(f"launch {launch.func} uses {unknown[0]!r}, which is no input, output or scratch tensor")
        written.update(launch.args)
    if workload.output.name not in written:
        raise CompileError(f"no launch takes the output {workload.output.name!r}")


def _function(mod: tvm.IRModule, launch: Launch) -> Any:
    """The PrimFunc of a launch, its parameters checked against the launch's argument names."""
    names = {g.name_hint for g in mod.get_global_vars()}
    if launch.func not in names:
        raise CompileError(f"launch {launch.func!r} is not a function of the scheduled module ({', '.join(sorted(names))})")
    func = mod[launch.func]
    params = tuple(str(p.name) for p in func.params)
    if params != launch.args:
        raise CompileError(f"launch {launch.func}: parameters {params} differ from its arguments {launch.args}")
    return func.with_attr("global_symbol", launch.func)


def _views(func: Any) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    shapes = tuple(tuple(int(n) for n in p.shape) for p in func.params)
    return shapes, tuple(str(p.dtype) for p in func.params)


# -- CPU ----------------------------------------------------------------------------------------------


def _lower_cpu(scheduled: Scheduled) -> Lowered:
    import tvm

    funcs, launches = {}, []
    for launch in scheduled.launches:
        func = _function(scheduled.mod, launch)
        shapes, dtypes = _views(func)
        funcs[launch.func] = _element_aligned(func)
        launches.append(LaunchSpec(f"__tvm_ffi_{launch.func}", launch.args, shapes, dtypes=dtypes))
    source = _with_launches("#", launches, scheduled, str(scheduled.mod.script()))
    return Lowered(source, _digest(source), tuple(launches), scheduled.scratch, tvm.IRModule(funcs))


def _element_aligned(func: Any) -> Any:
    """The function with parameters that need only element alignment.

    TVM assumes 64-byte aligned buffers and emits aligned vector loads, which crash on a numpy array or a view that is not; on
    aligned data, unaligned loads cost the same.
    """
    import tvm
    import tvm_ffi
    from tvm import tirx

    replaced = []
    for p in func.params:
        dtype = DTYPES.get(str(p.dtype))
        align = dtype.itemsize if dtype is not None else 1
        new = tirx.decl_buffer(p.shape, p.dtype, name=p.name, scope=p.scope(), data_alignment=align)
        replaced.append((p, new))

    def swap(var: Any) -> Any:
        for old, new in replaced:
            if var.same_as(old):
                return new
        return var

    return tvm_ffi.structural_map(func, (tvm.ir.Var, swap), order="post")


# -- CUDA ---------------------------------------------------------------------------------------------


def _lower_cuda(scheduled: Scheduled, device: Device) -> Lowered:
    import tvm

    target = device.tvm_target()
    kernels: dict[str, tuple[Any, LaunchSpec]] = {}
    launches = []
    for launch in scheduled.launches:
        if launch.func not in kernels:
            kernels[launch.func] = _lower_kernel(_function(scheduled.mod, launch), launch, target)
        spec = kernels[launch.func][1]
        check_limits(spec, device)
        _check_hopper(spec, device)
        launches.append(spec)
    # One device module, hence one source and one cubin, in order of first launch.
    module = tvm.IRModule({spec.symbol: func for func, spec in kernels.values()})
    with _source_only():
        code = str(tvm.get_global_func("target.build.cuda")(module, target).inspect_source())
    if any(spec.overlap for spec in launches) and "griddepcontrol.wait" not in code:
        raise CompileError("a launch with overlap never waits for the kernel before it (griddepcontrol.wait)")
    if any(spec.maps for spec in launches):
        code = DECLARATION + code
    source = _with_launches("//", launches, scheduled, code)
    return Lowered(source, _digest(source), tuple(launches), scheduled.scratch, None)


def _passes(scheduled: Scheduled) -> contextlib.AbstractContextManager[Any]:
    """TVM's passes with the options that the program asks for."""
    import tvm

    config = dict(scheduled.pass_config)
    return tvm.transform.PassContext(config=config) if config else contextlib.nullcontext()


@contextlib.contextmanager
def _source_only() -> Iterator[None]:
    """Keep TVM from compiling the source it generates.

    Where there is a GPU, TVM's code generator also compiles: 1.5 s a candidate for a binary that nobody asks for, as kronsched
    compiles the source itself. This switch, read at each call, makes it keep the source alone, as it does without a GPU.
    """
    with _switch_lock:
        before = os.environ.get(_SWITCH)
        os.environ[_SWITCH] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_SWITCH]
            else:
                os.environ[_SWITCH] = before


def _lower_kernel(func: Any, launch: Launch, target: Any) -> tuple[Any, LaunchSpec]:
    import tvm
    from tvm import tirx

    # `tvm.tirx.build` the attribute is a function that hides the module of the same name.
    split = importlib.import_module("tvm.tirx.build").split_host_device_mods
    shapes, dtypes = _views(func)
    # s_tir programs take the default pipeline; TIRx tile programs need LowerTIRx.
    is_s_tir = bool((func.attrs or {}).get("s_tir", False))
    pipeline, _, finalize = tirx.get_default_tir_pipeline(target) if is_s_tir else tirx.get_tir_pipeline("tirx")
    bound = tirx.transform.BindTarget(target.with_host(tvm.target.Target("llvm")))(tvm.IRModule({launch.func: func}))
    host, device_mods = split(pipeline(bound))
    kernels = [f for mod in device_mods.values() for f in finalize()(mod).functions.values()]
    if len(kernels) != 1:
        raise CompileError(f"launch {launch.func} lowers to {len(kernels)} kernels, exactly one is needed")
    kernel = kernels[0]
    symbol = str(kernel.attrs["global_symbol"])
    maps = {m.name: m for m in tensor_maps(func)}
    args = _kernel_args(kernel, launch, maps)
    by_name = dict(zip(launch.args, zip(shapes, dtypes, strict=True), strict=True))
    by_name.update((name, by_name[m.tensor]) for name, m in maps.items())
    extents = _launch_extents(host, symbol, len(args))
    spec = LaunchSpec(
        symbol=symbol,
        args=args,
        shapes=tuple(by_name[a][0] for a in args),
        grid=(extents.get("blockIdx.x", 1), extents.get("blockIdx.y", 1), extents.get("blockIdx.z", 1)),
        block=(extents.get("threadIdx.x", 1), extents.get("threadIdx.y", 1), extents.get("threadIdx.z", 1)),
        shared_bytes=extents.get("tirx.use_dyn_shared_memory", 0),
        dtypes=tuple(by_name[a][1] for a in args),
        overlap=launch.overlap,
        maps=tuple(maps[a] for a in args if a in maps),
        cluster=extents.get("clusterCtaIdx.x", 1),
    )
    return kernel, spec


def _kernel_args(kernel: Any, launch: Launch, maps: Mapping[str, TensorMap]) -> tuple[str, ...]:
    """Names of tensors and tensor maps in the kernel's parameter order: TVM sorts parameters by name and drops unused ones."""
    args = []
    for param in kernel.params:
        name = str(param.name).removesuffix("_ptr")
        if name in args or (name not in launch.args and name not in maps):
            raise CompileError(f"launch {launch.func}: kernel parameter {param.name!r} is not one of {', '.join(launch.args)}")
        args.append(name)
    return tuple(args)


def _launch_extents(host: Any, symbol: str, n_args: int) -> dict[str, int]:
    """Grid, block and dynamic shared memory from the host side's `call_ffi_kernel(symbol, args…, extents…)`."""
    import tvm
    import tvm_ffi

    calls: list[Any] = []

    def visit(call: Any) -> None:
        if getattr(call.op, "name", None) == "tirx.call_ffi_kernel" and str(call.args[0].value) == symbol:
            calls.append(call)

    for func in host.functions.values():
        tvm_ffi.structural_walk(func.body, (tvm.ir.Call, visit))
    if len(calls) != 1:
        raise CompileError(f"kernel {symbol} is launched {len(calls)} times by one function, exactly one launch is needed")
    names = [str(p) for p in calls[0].attrs.launch_params]
    values = list(calls[0].args)[1 + n_args :]
    if len(names) != len(values):
        raise CompileError(f"kernel {symbol}: {len(values)} launch values for {len(names)} launch parameters")
    extents = {}
    for name, value in zip(names, values, strict=True):
        if name not in _LAUNCH_PARAMS:
            raise CompileError(f"kernel {symbol}: launch parameter {name!r} is not supported")
        if not hasattr(value, "value"):
            raise CompileError(f"kernel {symbol}: {name}={value} is not a constant")
        extents[name] = int(value.value)
    return extents


def check_limits(launch: LaunchSpec, device: Device, static_shared: int = 0) -> None:
    """Raise InvalidConfig when a launch breaks a limit of the device."""
    shared, available = launch.shared_bytes + static_shared, device.shared_per_block
    if shared > available:
        raise InvalidConfig(f"{launch.symbol}: {shared} bytes of shared memory, {device.name} has {available} a block")
    if launch.threads > device.max_threads_per_block:
        allowed = device.max_threads_per_block
        raise InvalidConfig(f"{launch.symbol}: {launch.threads} threads a block, {device.name} allows {allowed}")
    if launch.grid[0] > 2**31 - 1 or launch.grid[1] > 65535 or launch.grid[2] > 65535:
        raise InvalidConfig(f"{launch.symbol}: grid {launch.grid} is beyond CUDA's limit (2^31-1, 65535, 65535)")


def _check_hopper(launch: LaunchSpec, device: Device) -> None:
    newer = int("".join(c for c in device.arch if c.isdigit())) >= 90
    if launch.overlap and not newer:
        raise InvalidConfig(f"{launch.symbol}: overlapping launches need sm_90 or newer, {device.name} is {device.arch}")
    if launch.cluster > 1 and not newer:
        raise InvalidConfig(f"{launch.symbol}: clusters of blocks need sm_90 or newer, {device.name} is {device.arch}")
    if launch.grid[0] % launch.cluster:
        raise InvalidConfig(f"{launch.symbol}: {launch.grid[0]} blocks are no whole number of clusters of {launch.cluster}")


def _with_launches(comment: str, launches: Sequence[LaunchSpec], scheduled: Scheduled, code: str) -> str:
    """The code under a comment on how it is launched, which the digest must cover: it is not all in the code."""
    lines = []
    for spec in launches:
        geometry = f" grid={spec.grid} block={spec.block} dynamic_shared={spec.shared_bytes}" if comment == "//" else ""
        geometry += " overlap" if spec.overlap else ""
        geometry += f" cluster={spec.cluster}" if spec.cluster > 1 else ""
        lines.append(f"{comment} launch {spec.symbol}({', '.join(spec.args)}){geometry}")
        lines += [f"{comment}   {m.describe()}" for m in spec.maps]
    lines += [f"{comment} scratch {t.name} {t.shape} {t.dtype}" for t in scheduled.scratch]
    return "\n".join((*lines, code.strip())) + "\n"


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()
