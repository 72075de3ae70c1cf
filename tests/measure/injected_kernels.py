"""A toy workload, y = 2 x, and schedules whose kernels misbehave in every way the measurer must survive.

Worker processes import this module: it stands for a user's own.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import ClassVar

from kronsched.errors import InvalidConfig
from kronsched.hardware import Device
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.space import Candidate, Config, Knob, SearchSpace
from kronsched.workloads.base import TensorSpec, Workload

CPU = """
@T.prim_func(s_tir=True)
def main(x: T.Buffer(({n},), "{dtype}"), y: T.Buffer(({n},), "{dtype}")):
    for i in range({n}):
        y[i] = x[i] * T.{dtype}(2)
    {body}
"""
CUDA = """
@T.prim_func(s_tir=True)
def main(x: T.Buffer(({n},), "{dtype}"), y: T.Buffer(({n},), "{dtype}")):
    for b in T.thread_binding({n} // 64, thread="blockIdx.x"):
        for t in T.thread_binding(64, thread="threadIdx.x"):
            y[b * 64 + t] = x[b * 64 + t] * T.{dtype}(2)
            {body}
"""
UNWRITTEN = "for i in range({n} - 3):\n        y[i] = x[i] * T.{dtype}(2)"
ENDLESS = "while y[0] < T.{dtype}(1e30):\n        y[0] = x[0]"
BODIES = {
    "good": "y[0] = x[0] * T.{dtype}(2)",
    "good_again": "y[0] = x[0] * T.{dtype}(2)",  # the same source as "good"
    "good_otherwise": "y[1] = x[1] * T.{dtype}(2)",
    "wrong": "y[3] = x[3] * T.{dtype}(3)",
    "beyond": "y[{n}] = T.{dtype}(0)",
    "before": "y[-1] = T.{dtype}(0)",
    "beyond_input": "y[5] = x[5] * T.{dtype}(2) + x[{n}] * T.{dtype}(1e-30)",
    "changes_input": "x[2] = T.{dtype}(0)",
    "flaky": 'y[0] = y[0] * (T.{dtype}(1) + T.Cast("{dtype}", T.call_extern("int32", "rand") % 64) * T.{dtype}(1e-7))',
    "abort": 'T.evaluate(T.call_extern("int32", "abort"))',
    "segfault": "y[T.int64(1) << T.int64(44)] = T.{dtype}(0)",
    "endless": "while y[0] == y[0]:\n        y[0] = x[0] + T.{dtype}(1)",
    "no_compile": 'T.evaluate(T.tvm_storage_sync("shared"))',
    "no_load": 'T.evaluate(T.call_extern("int32", "kronsched_test_no_such_function"))',
}


@dataclass(frozen=True)
class Double(Workload):
    """y (n,) = 2 x (n,), float32 or int32."""

    family: ClassVar[str] = "test_double"

    n: int
    dtype: str = "float32"

    @property
    def inputs(self):
        return (TensorSpec("x", (self.n,), self.dtype),)

    @property
    def output(self):
        return TensorSpec("y", (self.n,), self.dtype)

    @property
    def flops(self):
        return self.n

    @property
    def label(self):
        return f"double {self.n}"

    def reference(self, *inputs):
        return 2 * inputs[0].double()

    def make_inputs(self, seed, device="cpu"):
        import torch

        if self.dtype == "float32":
            return super().make_inputs(seed, device)
        gen = torch.Generator(device=device).manual_seed(seed)
        return [torch.randint(-100, 100, (self.n,), generator=gen, device=device, dtype=torch.int32)]

    def program(self):
        raise NotImplementedError


@dataclass(frozen=True)
class NoReference(Double):
    """Its reference cannot be computed."""

    def reference(self, *inputs):
        raise ValueError("no reference today")


class Injected(Schedule):
    """One knob, `kind`: what the kernel does besides doubling."""

    name = "test_injected"
    family = "test_double"
    device_kind = "cpu"
    template = CPU
    bodies = BODIES

    def space(self, workload, device):
        return SearchSpace(self.name, [Knob("kind", tuple(self.bodies))])

    def default_config(self, workload, device):
        return {"kind": "good"}

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        import tvm

        kind = config["kind"]
        if kind == "invalid":
            raise InvalidConfig("kind='invalid' breaks the constraint")
        if kind == "build_endless":
            time.sleep(1e6)
        if kind == "build_abort":
            os.abort()
        fields = {"n": workload.n, "dtype": workload.dtype}
        if kind == "unwritten":
            lines = CPU.splitlines()
            source = "\n".join([*lines[:3], "    " + UNWRITTEN]).format(**fields)
        else:
            source = self.template.format(body=self.bodies[kind].format(**fields), **fields)
        func = tvm.script.from_source(source)
        return Scheduled(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), (Launch("main", ("x", "y")),))


CUDA_BODIES = {
    "good": "y[0] = x[0] * T.{dtype}(2)",
    "good_otherwise": "y[1] = x[1] * T.{dtype}(2)",
    "wrong": "y[3] = x[3] * T.{dtype}(3)",
    "beyond": "y[{n}] = T.{dtype}(0)",
    "changes_input": "x[2] = T.{dtype}(0)",
    "flaky": "y[b * 64 + t] = y[b * 64 + t] * "
    '(T.{dtype}(1) + T.Cast("{dtype}", T.call_extern("int32", "clock") % 64) * T.{dtype}(1e-7))',
    "illegal": "y[T.int64(1) << T.int64(44)] = T.{dtype}(0)",
    "endless": "while y[0] == y[0]:\n                y[0] = x[0] + T.{dtype}(1)",
    "no_compile": 'T.evaluate(T.call_extern("int32", "kronsched_test_no_such_function"))',
}


class InjectedCuda(Injected):
    """The same on a GPU."""

    name = "test_injected_cuda"
    device_kind = "cuda"
    template = CUDA
    bodies = CUDA_BODIES


def candidate(kind: str, space: str = "test_injected") -> Candidate:
    return Candidate(space, (("kind", kind),))


class Plain(Schedule):
    """The unscheduled program of any family, with a knob that changes nothing."""

    name = "test_plain"
    family = "kron"
    device_kind = "cpu"

    def space(self, workload, device):
        return SearchSpace(self.name, [Knob("unused", (0, 1))])

    def default_config(self, workload, device):
        return {"unused": 0}

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        names = (*(t.name for t in workload.inputs), workload.output.name)
        return Scheduled(workload.program(), (Launch("main", names),))


class Meter:
    """An energy observer that always sees 3 joules."""

    def start(self) -> None:
        """Nothing to note."""

    def stop(self) -> float | None:
        return 3.0
