"""Shared libraries called through the TVM-FFI C ABI."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from kronsched import KronMatmul
from kronsched.dtypes import DTYPES
from kronsched.errors import RecordError, UnsupportedError
from kronsched.runtime import cpu
from kronsched.runtime.build import build_artefact
from kronsched.runtime.executable import load_executable
from kronsched.runtime.manifest import FILE_NAME
from kronsched.runtime.tvm_libs import physical_cores
from tests.runtime.runtime_toys import Parallel, Toy, TwoStages, W, this_cpu


def error(y: torch.Tensor, ref: torch.Tensor) -> float:
    return float(((y.double() - ref).abs() / (ref.abs() + ref.pow(2).mean().sqrt())).max())


@pytest.mark.parametrize("schedule", [Toy, Parallel, TwoStages], ids=lambda s: s.name)
def test_computes_the_right_result(schedule: type[Toy], tmp_path: Path) -> None:
    build_artefact(W, schedule(), {}, this_cpu(), tmp_path / "a")
    executable = load_executable(tmp_path / "a")
    for seed in (0, 1):
        inputs = W.make_inputs(seed)
        y = torch.full(W.output.shape, float("nan"))
        executable(inputs, y)
        assert error(y, W.reference(*inputs)) < 1e-6


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_every_dtype(dtype: str, tmp_path: Path) -> None:
    w = KronMatmul(m=16, factors=[(8, 6), (5, 7)], dtype=dtype)
    build_artefact(w, Parallel(), {}, this_cpu(), tmp_path / "a")
    inputs = w.make_inputs(0)
    y = torch.full(w.output.shape, float("nan"), dtype=DTYPES[dtype].torch())
    load_executable(tmp_path / "a")(inputs, y)
    assert error(y, w.reference(*inputs)) < DTYPES[dtype].tolerance


def test_element_aligned_memory_is_enough(tmp_path: Path) -> None:
    """Vectorised code must not assume more: a numpy slice starts anywhere."""
    w = KronMatmul(m=8, factors=[(16, 16)])
    build_artefact(w, Vector(), {}, this_cpu(), tmp_path / "a")
    executable = load_executable(tmp_path / "a")

    def odd(shape: tuple[int, ...]) -> np.ndarray:
        n = int(np.prod(shape))
        raw = np.zeros(4 * n + 128, np.uint8)
        start = -raw.ctypes.data % 64 + 4
        return raw[start : start + 4 * n].view(np.float32).reshape(shape)

    x, f, y = odd((8, 16)), odd((16, 16)), odd((8, 16))
    x[:], f[:] = np.random.default_rng(0).standard_normal((8, 16)), np.random.default_rng(1).standard_normal((16, 16))
    executable([x, f], y)
    np.testing.assert_allclose(y, x @ f, rtol=1e-5, atol=1e-5)


class Vector(Toy):
    name = "toy_vector"

    def apply(self, workload, config, device):  # type: ignore[no-untyped-def]
        import tvm

        scheduled = super().apply(workload, config, device)
        sch = tvm.s_tir.Schedule(scheduled.mod)
        block = sch.get_sblock("y")
        i, j, k = sch.get_loops(block)
        sch.reorder(i, k, j)
        sch.vectorize(j)
        return type(scheduled)(sch.mod, scheduled.launches)


def test_calls_from_many_threads_do_not_mix(tmp_path: Path) -> None:
    build_artefact(W, TwoStages(), {}, this_cpu(), tmp_path / "a")
    executable = load_executable(tmp_path / "a")
    problems = [(inputs := W.make_inputs(seed), W.reference(*inputs)) for seed in range(4)]
    worst = [0.0] * len(problems)

    def work(i: int) -> None:
        inputs, reference = problems[i]
        for _ in range(200):
            y = torch.empty(W.output.shape)
            executable(inputs, y)
            worst[i] = max(worst[i], error(y, reference))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(problems))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert 0 < max(worst) < 1e-6


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_thread_pool_works_in_a_process_without_tvm_or_torch(tmp_path: Path) -> None:
    w = KronMatmul(m=256, factors=[(16, 16)] * 2)
    build_artefact(w, Parallel(), {}, this_cpu(), tmp_path / "a")
    assert b"__TVMBackendParallelLaunch" in (tmp_path / "a" / "kernel.so").read_bytes()
    code = """
import sys, os, numpy as np
from pathlib import Path
from kronsched.runtime.executable import load_executable
run = load_executable(Path(sys.argv[1]))
x, f0, f1 = (np.random.default_rng(i).standard_normal(s).astype("f4") for i, s in enumerate([(256, 256), (16, 16), (16, 16)]))
y = np.empty((256, 256), "f4")
reference = x @ np.kron(f0, f1)  # starts numpy's own threads
mask, before = os.sched_getaffinity(0), len(os.listdir("/proc/self/task"))
run([x, f0, f1], y)
assert abs(y - reference).max() < 1e-3
assert not {"tvm", "tvm_ffi", "torch"} & set(sys.modules), sorted(sys.modules)
after = len(os.listdir("/proc/self/task"))
print(after - before, all(os.sched_getaffinity(int(t)) == mask for t in os.listdir("/proc/self/task")))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    started, unbound = done.stdout.split()
    assert int(started) == physical_cores() - 1  # the caller is the first worker
    assert unbound == "True"


def test_physical_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, siblings in enumerate(["0,4", "1,5", "2,6", "3,7"] * 2):
        (tmp_path / f"cpu{number}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{number}" / "topology" / "thread_siblings_list").write_text(siblings)
    for allowed, n in ((range(8), 4), ({0, 4}, 1), ({1, 2, 3}, 3)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, allowed=allowed: set(allowed))
        assert physical_cores(tmp_path) == n
    assert physical_cores(tmp_path / "nowhere") == 3


def tamper(artefact: Path, **changes: object) -> None:
    file = artefact / FILE_NAME
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_an_error_of_the_function_is_a_runtime_error(tmp_path: Path) -> None:
    build_artefact(W, Toy(), {}, this_cpu(), tmp_path / "a")
    launches = json.loads((tmp_path / "a" / FILE_NAME).read_text())["launches"]
    launches[0]["shapes"][0] = [16, 8, 6]
    tamper(tmp_path / "a", launches=launches)
    executable = load_executable(tmp_path / "a")
    with pytest.raises(RuntimeError, match=r"__tvm_ffi_main of toy_cpu failed: ValueError: Invalid x\.shape\[2\]"):
        executable(W.make_inputs(0), torch.empty(W.output.shape))


def test_broken_artefacts(tmp_path: Path) -> None:
    a = tmp_path / "a"
    manifest = build_artefact(W, Toy(), {}, this_cpu(), a)
    launch = json.loads((a / FILE_NAME).read_text())["launches"][0]
    tamper(a, launches=[{**launch, "symbol": "nothing"}])
    with pytest.raises(RecordError, match="has no function nothing"):
        load_executable(a)
    manifest.save(a)
    library = (a / "kernel.so").read_bytes()
    (a / "kernel.so").unlink()  # in place, it would pull the code out from under the library loaded above
    (a / "kernel.so").write_bytes(library[:5000])
    with pytest.raises(RecordError, match=r"kernel\.so' is damaged"):
        load_executable(a)
    (a / "kernel.so").write_bytes(b"no library")
    tamper(a, binary_sha256=hashlib.sha256(b"no library").hexdigest())
    with pytest.raises(RecordError, match="cannot be loaded"):
        load_executable(a)
    (a / "kernel.so").unlink()
    with pytest.raises(RecordError, match="cannot be read"):
        load_executable(a)


def test_a_path_that_is_rebuilt_gives_the_new_library(tmp_path: Path) -> None:
    """dlopen by itself returns the old one."""
    other = KronMatmul(m=16, factors=[(8, 6), (5, 7)], dtype="float64")
    old = None
    for w in (W, other, W):
        build_artefact(w, Toy(), {}, this_cpu(), tmp_path / "a")
        executable, inputs = load_executable(tmp_path / "a"), w.make_inputs(0)
        y = torch.empty(w.output.shape, dtype=DTYPES[w.dtype].torch())
        executable(inputs, y)
        assert error(y, w.reference(*inputs)) < 1e-6
        old = old or executable
    y = torch.empty(W.output.shape)
    old(W.make_inputs(0), y)  # still the one it was loaded as
    assert error(y, W.reference(*W.make_inputs(0))) < 1e-6


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"arch": "znver9"}, "built for arch znver9, this machine has"),
        ({"versions": {"tvm": "0.1", "platform": ""}}, "built for platform ,"),
    ],
)
def test_a_library_of_another_machine_is_refused(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    build_artefact(W, Toy(), {}, this_cpu(), tmp_path / "a")
    tamper(tmp_path / "a", **changes)
    with pytest.raises(UnsupportedError, match=says):
        load_executable(tmp_path / "a")


def test_lower_levels_of_x86_run_on_higher_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_artefact(W, Toy(), {}, this_cpu(), tmp_path / "a")
    for here, built, fits in (("x86-64-v4", "x86-64-v2", True), ("x86-64-v2", "x86-64-v3", False)):
        monkeypatch.setattr(cpu, "cpu_arch", lambda here=here: (here, 16))
        tamper(tmp_path / "a", arch=built)
        if fits:
            load_executable(tmp_path / "a")
        else:
            with pytest.raises(UnsupportedError):
                load_executable(tmp_path / "a")


@pytest.mark.parametrize(
    ("dtype", "code"),
    [
        ("float32", (2, 32, 1)),
        ("bfloat16", (4, 16, 1)),
        ("int8", (0, 8, 1)),
        ("uint4", (1, 4, 1)),
        ("float8_e4m3fn", (10, 8, 1)),
        ("float32x4", (2, 32, 4)),
    ],
)
def test_dlpack_dtype_codes(dtype: str, code: tuple[int, int, int]) -> None:
    assert cpu.dl_dtype(dtype) == code


def test_dlpack_dtype_codes_agree_with_tvm_ffi() -> None:
    import tvm_ffi

    for name in ("float16", "bfloat16", "float64", "int8", "int4", "uint4", "int32", "float8_e4m3fn", "float8_e5m2"):
        dtype = tvm_ffi.dtype(name)
        assert cpu.dl_dtype(name) == (int(dtype.type_code), dtype.bits, dtype.lanes), name
    with pytest.raises(RecordError, match="'handle' has no DLPack code"):
        cpu.dl_dtype("handle")
