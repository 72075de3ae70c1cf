"""Building artefact directories; CUDA ones too, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from kronsched import KronMatmul
from kronsched.errors import ArgumentError, CompileError, InvalidConfig
from kronsched.runtime import build
from kronsched.runtime.build import build_artefact
from kronsched.runtime.executable import load_executable
from kronsched.runtime.manifest import Manifest
from tests.runtime.runtime_toys import A100, H200, OneKernel, Toy, TwoStages, TwoStagesCuda, W, this_cpu


def files(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


@pytest.mark.parametrize("device", [A100, H200], ids=lambda d: d.arch)
def test_cuda_artefact(device: object, tmp_path: Path) -> None:
    out = tmp_path / "a"
    manifest = build_artefact(W, TwoStagesCuda(), {"n": 2}, device, out)  # type: ignore[arg-type]
    assert files(out) == ["kernel.cu", "kernel.cubin", "manifest.json"]
    assert Manifest.load(out) == manifest
    assert (out / "kernel.cubin").read_bytes()[:4] == b"\x7fELF"
    assert "std::" in (out / "kernel.cu").read_text()  # the source as TVM wrote it, so that nvcc takes it
    assert manifest.registers is not None and 0 < manifest.registers < 64
    assert (manifest.spill_bytes, manifest.shared_bytes) == (0, 0)
    assert (manifest.kind, manifest.arch, manifest.space, manifest.config) == (
        "cuda",
        device.arch,
        "toy_two_stages_cuda",
        {"n": 2},
    )  # type: ignore[attr-defined]
    assert manifest.versions["compiler"].startswith("nvrtc ")


def test_shared_memory_is_static_plus_dynamic(tmp_path: Path) -> None:
    w = KronMatmul(m=4, factors=[(64, 32)])
    assert build_artefact(w, OneKernel(), {"threads": 32, "stage": True}, H200, tmp_path / "a").shared_bytes == 256


def test_cpu_artefact(tmp_path: Path) -> None:
    out = tmp_path / "a"
    manifest = build_artefact(W, TwoStages(), {}, this_cpu(), out)
    assert files(out) == ["kernel.py", "kernel.so", "manifest.json"]
    assert Manifest.load(out) == manifest
    assert (manifest.registers, manifest.spill_bytes, manifest.shared_bytes) == (None, None, None)


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bad(Toy):
        def apply(self, *_: object) -> None:  # type: ignore[override]
            raise InvalidConfig("no")

    with pytest.raises(InvalidConfig):
        build_artefact(W, Bad(), {}, this_cpu(), tmp_path / "a")
    monkeypatch.setattr(build, "host_linker", lambda: "/bin/false")
    with pytest.raises(CompileError, match="false cannot link the module: 1"):
        build_artefact(W, Toy(), {}, this_cpu(), tmp_path / "a")
    assert files(tmp_path) == []


def test_llvm_error_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tvm

    def fail(*_: object, **__: object) -> None:
        raise tvm.error.InternalError("\nLLVM is unhappy\nstack")

    monkeypatch.setattr(tvm, "compile", fail)
    with pytest.raises(CompileError) as e:
        build_artefact(W, Toy(), {}, this_cpu(), tmp_path / "a")
    assert str(e.value) == f"llvm for {this_cpu().arch}: LLVM is unhappy"


def test_rebuilding_replaces_an_artefact_but_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "a"
    build_artefact(W, Toy(), {"n": 1}, this_cpu(), out)
    assert build_artefact(W, Toy(), {"n": 2}, this_cpu(), out).config == {"n": 2}
    assert Manifest.load(out).config == {"n": 2}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ArgumentError, match="mine' cannot be written"):
        build_artefact(W, Toy(), {}, this_cpu(), tmp_path / "mine")
    assert files(tmp_path) == ["a", "mine"]
    assert files(tmp_path / "mine") == ["thesis.tex"]


def test_unknown_compiler(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="compiler='hipcc' is not allowed"):
        build_artefact(W, Toy(), {}, this_cpu(), tmp_path / "a", "hipcc")


def test_without_a_linker_the_program_is_compiled_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from kronsched import register_schedule

    register_schedule(TwoStages)
    monkeypatch.setattr(build, "host_linker", lambda: None)
    manifest = build_artefact(W, TwoStages(), {}, this_cpu(), tmp_path / "a")
    assert manifest.binary_file is None
    assert files(tmp_path / "a") == ["kernel.py", "manifest.json"]
    inputs = W.make_inputs(0)
    y = torch.full(W.output.shape, float("nan"))
    load_executable(tmp_path / "a")(inputs, y)
    torch.testing.assert_close(y.double(), W.reference(*inputs), rtol=1e-5, atol=1e-5)
