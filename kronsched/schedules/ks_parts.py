"""What the KSMatmul schedules share: the tensors of a chain and of its epilogue, spaces without repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Launch
from kronsched.space import Config, Knob, SearchSpace
from kronsched.workloads.base import TensorSpec
from kronsched.workloads.ks import KSMatmul, pattern_out
from kronsched.workloads.ks_epilogue import EPILOGUE, NONE, Epilogue


def factor_tensors(w: KSMatmul, scratch_dtype: str) -> Iterator[tuple[TensorSpec, TensorSpec, TensorSpec]]:
    """(source, weight, target) of each factor; all targets but the last are scratch tensors t0, t1, … laid out like x."""
    source = w.inputs[0]
    for i, (pattern, weight) in enumerate(zip(w.patterns, w.inputs[1 : 1 + len(w.patterns)], strict=True)):
        target = w.output
        if i < len(w.patterns) - 1:
            size = pattern_out(pattern)
            target = TensorSpec(f"t{i}", (w.batch, size) if w.batch_first else (size, w.batch), scratch_dtype)
        yield source, weight, target
        source = target


def ending(w: KSMatmul, factor: int) -> tuple[Epilogue, tuple[TensorSpec, ...]]:
    """What follows a factor of a chain, and the inputs that it takes: of the last factor, the workload's epilogue."""
    if factor < len(w.patterns) - 1:
        return NONE, ()
    return w.epilogue, w.inputs[1 + len(w.patterns) :]


def without_unused(func: Any, epilogue: Epilogue) -> Any:
    """The PrimFunc without those of its last two parameters, bias and residual, that the epilogue does not take."""
    from tvm import tirx

    *first, bias, residual = func.params
    kept = [p for name, p in zip(EPILOGUE, (bias, residual), strict=True) if name in epilogue.tensors]
    return tirx.PrimFunc([*first, *kept], func.body, func.ret_type, func.attrs)


def checked_space(name: str, knobs: Sequence[Knob], canonical: Callable[[Config], Config]) -> SearchSpace:
    """A space whose valid configs are those that `canonical` returns unchanged: no kernel twice. It may raise InvalidConfig."""

    def check(config: Config) -> str | None:
        try:
            same = canonical(config)
        except InvalidConfig as e:
            return str(e)
        idle = next((k for k, v in same.items() if config[k] != v), None)
        return None if idle is None else f"{idle}={config[idle]} has no effect here, {idle}={same[idle]} is the same kernel"

    return SearchSpace(name, knobs, check)


def launch_of(name: str, *tensors: TensorSpec) -> Launch:
    """The launch of a function over tensors."""
    return Launch(name, tuple(t.name for t in tensors))


def renamed(func: Any, *tensors: TensorSpec) -> Any:
    """The PrimFunc with its parameters named like the tensors (a function written in TVMScript has fixed names)."""
    import tvm
    import tvm_ffi
    from tvm import tirx

    names = (t.name for t in tensors)
    new = [(p, tirx.decl_buffer(p.shape, p.dtype, name=name)) for p, name in zip(func.params, names, strict=True)]

    def swap(var: Any) -> Any:
        return next((to for old, to in new if var.same_as(old)), var)

    return tvm_ffi.structural_map(func, (tvm.ir.Var, swap), order="post")
