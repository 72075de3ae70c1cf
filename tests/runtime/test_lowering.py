"""Scheduled program -> source and launches; runs without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kronsched import KronMatmul
from kronsched.errors import CompileError, InvalidConfig
from kronsched.hardware import Device, resolve_target
from kronsched.runtime.build import lower_source
from kronsched.runtime.lower import first_line, lower
from kronsched.schedules.base import Launch, Scheduled
from kronsched.schedules.kron_cuda_simt import KronCudaSimt
from kronsched.space import Config
from kronsched.workloads.base import TensorSpec, Workload
from tests.runtime.runtime_toys import A100, H200, OneKernel, Toy, TwoStages, TwoStagesCuda, W, names, this_cpu

ONE = KronMatmul(m=24, factors=[(16, 64)])


def test_launch_is_read_from_tvms_host_code() -> None:
    lowered = lower(ONE, OneKernel(), {"threads": 32, "stage": True}, H200)
    (launch,) = lowered.launches
    assert launch.symbol == "main_kernel"
    assert launch.args == ("f0", "x", "y")  # sorted by name, as the kernel's parameters are
    assert launch.shapes == ((16, 64), (24, 16), (24, 64))
    assert launch.dtypes == ("float32",) * 3
    assert (launch.grid, launch.block) == ((24, 1, 1), (32, 1, 1))
    assert launch.shared_bytes == 16 * 4
    assert "extern __shared__" in lowered.source
    assert f"{launch.symbol}(float* __restrict__ f0_ptr, float* __restrict__ x_ptr, float* __restrict__ y_ptr)" in lowered.source


def test_digest_covers_the_launch_geometry() -> None:
    lowered = lower(ONE, OneKernel(), {"threads": 32, "stage": False}, H200)
    assert lowered.source.startswith("// launch main_kernel(f0, x, y) grid=(24, 1, 1) block=(32, 1, 1) dynamic_shared=0\n")


def test_two_kernels_share_one_source() -> None:
    lowered = lower(W, TwoStagesCuda(), {}, H200)
    assert [x.symbol for x in lowered.launches] == ["first_kernel", "second_kernel"]
    assert [x.args for x in lowered.launches] == [("f1", "t", "x"), ("f0", "t", "y")]
    assert lowered.scratch == (TensorSpec("t", (16, 8, 7), "float32"),)
    for launch in lowered.launches:
        # twice: TVM emits a declaration before each definition
        assert lowered.source.count(f"__launch_bounds__(32) {launch.symbol}(") == 2


def test_cpu_source_is_the_scheduled_script() -> None:
    lowered = lower(W, TwoStages(), {}, this_cpu())
    assert [x.symbol for x in lowered.launches] == ["__tvm_ffi_first", "__tvm_ffi_second"]
    assert "def first(" in lowered.source
    assert "align=" not in lowered.source  # how it is compiled is no part of the source
    assert lowered.source.startswith("# launch __tvm_ffi_first(x, f1, t)\n# launch __tvm_ffi_second(t, f0, y)\n# scratch t")


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_source_is_the_same_in_every_process(kind: str) -> None:
    code = (
        "from tests.runtime.runtime_toys import *; from kronsched.runtime.build import lower_source\n"
        f"s, d = (TwoStagesCuda(), A100) if {kind!r} == 'gpu' else (TwoStages(), this_cpu())\n"
        "print(lower_source(W, s, {}, d)[1])"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": "12345"}
    there = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout.strip()
    schedule, device = (TwoStagesCuda(), A100) if kind == "gpu" else (TwoStages(), this_cpu())
    assert lower_source(W, schedule, {}, device)[1] == there


def test_too_much_shared_memory_is_invalid() -> None:
    wide = KronMatmul(m=2, factors=[(65536, 32)])
    with pytest.raises(InvalidConfig, match="262144 bytes of shared memory, NVIDIA H200 has 232448"):
        lower(wide, OneKernel(), {"threads": 32, "stage": True}, H200)


def test_too_many_threads_are_invalid() -> None:
    with pytest.raises(InvalidConfig, match="2048 threads a block, NVIDIA H200 allows 1024"):
        lower(KronMatmul(m=2, factors=[(4, 2048)]), OneKernel(), {"threads": 2048, "stage": False}, H200)


class Broken(Toy):
    """`how` chooses what goes wrong."""

    def __init__(self, how: str, device_kind: str = "cpu") -> None:
        self.how, self.device_kind = how, device_kind  # type: ignore[misc]

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        import tvm

        mod, args = workload.program(), names(workload)
        if self.how == "schedule":
            tvm.s_tir.Schedule(mod).get_sblock("no_such_block")
        if self.how == "names":
            args = (*args[:-1], "x")
        if self.how == "unknown":
            args = (*args[:-1], "z")
        if self.how == "no output":
            return Scheduled(mod, (Launch("main", ("x",)),))
        return Scheduled(mod, (Launch("other" if self.how == "function" else "main", args),))


@pytest.mark.parametrize(
    ("how", "kind", "error", "says"),
    [
        ("schedule", "cpu", InvalidConfig, "no_such_block"),
        ("names", "cpu", CompileError, "no launch takes the output"),
        ("unknown", "cpu", CompileError, "'z', which is no input, output or scratch"),
        ("no output", "cpu", CompileError, "no launch takes the output"),
        ("function", "cpu", CompileError, "'other' is not a function"),
        ("unbound", "cuda", CompileError, "lowers to 0 kernels"),
    ],
)
def test_failures_are_one_line(how: str, kind: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as e:
        lower(W, Broken(how, kind), {}, H200 if kind == "cuda" else this_cpu())
    assert type(e.value) is error
    assert says in str(e.value)
    assert "\n" not in str(e.value)


def test_an_error_of_tvm_is_a_compile_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from tvm import tirx

    def fail(target: object) -> None:
        raise RuntimeError("----\nbad program\nstack trace")

    monkeypatch.setattr(tirx, "get_default_tir_pipeline", fail)
    with pytest.raises(CompileError) as e:
        lower(ONE, OneKernel(), {"threads": 32, "stage": False}, H200)
    assert str(e.value) == "lowering of toy_cuda failed: bad program"


def test_parameters_that_do_not_match_the_launch() -> None:
    class Swapped(Toy):
        def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
            args = names(workload)
            return Scheduled(workload.program(), (Launch("main", (args[1], args[0], *args[2:])),))

    with pytest.raises(CompileError, match=r"parameters \('x', 'f0', 'f1', 'y'\) differ from its arguments"):
        lower(W, Swapped(), {}, this_cpu())


def test_two_kernels_in_one_function_are_refused() -> None:
    class Unfused(Toy):
        device_kind = "cuda"

        def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
            import tvm

            from tests.runtime.runtime_toys import bind

            sch = tvm.s_tir.Schedule(workload.program())
            for block in ("t0", "t1", "y"):
                if f'T.sblock("{block}")' in sch.mod.script():
                    bind(sch, block, 2)
            return Scheduled(sch.mod, (Launch("main", names(workload)),))

    with pytest.raises(CompileError, match="lowers to 2 kernels, exactly one is needed"):
        lower(W, Unfused(), {}, H200)


def test_tirx_programs_take_their_own_pipeline() -> None:
    from tvm.script import tirx as T

    class Tile(Toy):
        device_kind = "cuda"

        def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
            import tvm

            @T.prim_func
            def main(x: T.Buffer((2048,), "float32"), f0: T.Buffer((1024,), "float32"), y: T.Buffer((2048,), "float32")) -> None:
                T.device_entry()
                cta = T.cta_id([64])
                tx = T.thread_id([32])
                y[cta * 32 + tx] = x[cta * 32 + tx] * f0[tx]

            return Scheduled(tvm.IRModule({"main": main}), (Launch("main", names(workload)),))

    (launch,) = lower(KronMatmul(m=64, factors=[(32, 32)]), Tile(), {}, H200).launches
    assert (launch.grid, launch.block, launch.args) == ((64, 1, 1), (32, 1, 1), ("f0", "x", "y"))


def test_first_line_finds_the_reason() -> None:
    assert first_line(ValueError("\n  ---\nScheduleError: x\nError message: loops differ\nmore")) == "loops differ"
    assert first_line(ValueError("plain\nmore")) == "plain"
    assert first_line(KeyError()) == "KeyError"
    assert len(first_line(ValueError("x" * 9999))) == 300


def test_tvm_is_kept_from_compiling_the_source_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU TVM's code generator also compiles what it generates, unless its switch is set."""
    from kronsched.runtime import lower as module

    monkeypatch.delenv("TVM_COMPILE_FORCE_FALLBACK", raising=False)
    with module._source_only():
        assert os.environ["TVM_COMPILE_FORCE_FALLBACK"] == "1"
    assert "TVM_COMPILE_FORCE_FALLBACK" not in os.environ


def test_cuda_source_is_generated_under_that_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    import tvm

    seen = []
    real = tvm.get_global_func

    def watching(name: str, *args: object, **kwargs: object) -> object:
        if name == "target.build.cuda":
            seen.append(os.environ.get("TVM_COMPILE_FORCE_FALLBACK"))
        return real(name, *args, **kwargs)

    monkeypatch.setattr(tvm, "get_global_func", watching)
    schedule, workload, device = KronCudaSimt(), KronMatmul(8, [(4, 4)] * 2), resolve_target("nvidia/h200")
    lower(workload, schedule, schedule.default_config(workload, device), device)
    assert seen == ["1"]


@pytest.mark.cuda
def test_gpu_machine_generates_source_without_compiling_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import tvm.support.nvcc as nvcc

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("TVM compiled the source")

    monkeypatch.setattr(nvcc, "compile_cuda", refuse)
    device, workload = resolve_target("cuda"), KronMatmul(8, [(4, 4)] * 2)
    schedule = KronCudaSimt()
    assert "__global__" in lower(workload, schedule, schedule.default_config(workload, device), device).source


class Overlapping(OneKernel):
    """OneKernel whose launch overlaps, though it waits for nothing."""

    name = "toy_overlap"

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        plain = super().apply(workload, {"threads": 32, "stage": False}, device)
        return Scheduled(plain.mod, tuple(Launch(x.func, x.args, overlap=True) for x in plain.launches))


def test_an_overlapping_launch_must_wait_and_needs_hopper() -> None:
    with pytest.raises(CompileError, match=r"griddepcontrol\.wait"):
        lower(ONE, Overlapping(), {}, H200)
    with pytest.raises(InvalidConfig, match="need sm_90"):
        lower(ONE, Overlapping(), {}, A100)


def test_a_tile_program_that_waits_may_overlap() -> None:
    class Waits(OneKernel):
        def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
            import tvm
            from tvm.script import tirx as T

            @T.prim_func
            def main(x: T.Buffer((24, 16), "float32"), f0: T.Buffer((16, 64), "float32"), y: T.Buffer((24, 64), "float32")):
                T.device_entry()
                row = T.cta_id([24])
                column = T.thread_id([64])
                T.ptx.griddepcontrol.wait()
                y[row, column] = x[row, 0] * f0[0, column]

            func = main.with_attr("global_symbol", "main")
            return Scheduled(tvm.IRModule({"main": func}), (Launch("main", ("x", "f0", "y"), overlap=True),))

    lowered = lower(ONE, Waits(), {}, H200)
    assert lowered.launches[0].overlap
    assert lowered.source.splitlines()[0].endswith("dynamic_shared=0 overlap")
