"""export and emit write directories that load again; emit needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kronsched
from kronsched import register_schedule, registry
from kronsched.errors import ArgumentError, UnsupportedError
from kronsched.hardware import PRESETS
from kronsched.runtime.cache import get_or_build
from kronsched.runtime.export import emit, export
from kronsched.runtime.load import load
from kronsched.runtime.manifest import FILE_NAME, Manifest
from kronsched.runtime.module import TunedModule
from tests.runtime.runtime_toys import Toy, TwoStagesCuda, W, this_cpu
from tests.runtime.test_load import record, write


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    register_schedule(Toy)
    register_schedule(TwoStagesCuda)
    monkeypatch.setattr(registry, "schedules_for", lambda w, d: [Toy()] if d.kind == "cpu" else [TwoStagesCuda()])


@pytest.fixture
def module() -> TunedModule:
    path = get_or_build(W, Toy(), {"n": 2}, this_cpu())
    return TunedModule.from_artefact(path, expected_us=7.5, measured=True, origin="log k.jsonl")


def test_exported_directory_loads_here(module: TunedModule, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    files = kronsched.export(module, str(out))
    assert sorted(files) == sorted(out / n for n in ("kernel.py", "kernel.so", "manifest.json"))
    assert all(f.is_file() for f in files)
    again = kronsched.load(out)
    assert (again.config, again.expected_us, again.measured) == ({"n": 2}, 7.5, True)
    assert again.origin == f"export {out} of log k.jsonl"
    assert again.source == module.source
    args = [np.ones(t.shape, "f4") for t in W.inputs]
    assert np.array_equal(again(*args), module(*args))


def test_exported_directory_loads_in_a_process_that_knows_no_schedule(module: TunedModule, tmp_path: Path) -> None:
    export(module, tmp_path / "out")
    code = (
        "import sys, numpy as np, kronsched\n"
        "mod = kronsched.load(sys.argv[1])\n"
        "assert abs(mod(*(np.ones(t.shape, 'f4') for t in mod.workload.inputs)) - 40).max() < 1e-4\n"
        "assert not {'tvm', 'torch', 'kronsched.schedules.kron_cpu'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")], capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr


def test_time_of_another_machine_is_not_expected_here(module: TunedModule, tmp_path: Path) -> None:
    export(module, tmp_path)
    file = tmp_path / FILE_NAME
    file.write_text(file.read_text().replace(f'"device": "{this_cpu().name}"', '"device": "Another CPU"'))
    again = load(tmp_path)
    assert (again.expected_us, again.measured) == (None, False)


def test_export_leaves_other_files_alone_and_replaces_its_own(module: TunedModule, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    export(module, tmp_path)
    running = load(tmp_path)
    args = [np.ones(t.shape, "f4") for t in W.inputs]
    want = running(*args)
    other = TunedModule.from_artefact(get_or_build(W, Toy(), {"n": 3}, this_cpu()))
    export(other, tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "mine"
    assert load(tmp_path).config == {"n": 3}
    assert load(tmp_path).expected_us is None
    assert np.array_equal(running(*args), want)  # its library was replaced, not overwritten


def test_export_of_an_exported_module_onto_itself(module: TunedModule, tmp_path: Path) -> None:
    export(module, tmp_path)
    export(load(tmp_path), tmp_path)
    assert load(tmp_path).expected_us == 7.5


def test_unwritable_place(module: TunedModule, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match=r"out_dir='.*file' cannot be written"):
        export(module, tmp_path / "file")


def test_load_checks_the_kind_and_the_workload(module: TunedModule, tmp_path: Path) -> None:
    export(module, tmp_path)
    with pytest.raises(ArgumentError, match="workload='kron m=3 4x4 float32' is not what"):
        load(tmp_path, kronsched.KronMatmul(m=3, factors=[(4, 4)]))
    assert load(tmp_path, W).workload == W


@pytest.mark.parametrize("target", ["nvidia/h200", "nvidia/a100"])
def test_emit_for_a_gpu_that_is_not_here(tmp_path: Path, target: str) -> None:
    files = emit(W, tmp_path, target)
    assert [f.name for f in files] == ["kernel.cu", "kernel.cubin", "manifest.json"]
    manifest = Manifest.load(tmp_path)
    assert (manifest.kind, manifest.arch, manifest.device) == ("cuda", PRESETS[target].arch, PRESETS[target].name)
    assert (manifest.expected_us, manifest.origin) == (None, "default, not measured")
    assert "first_kernel" in files[0].read_text()
    assert files[1].read_bytes()[:4] == b"\x7fELF"


def test_a_cuda_export_on_a_machine_without_the_gpu(tmp_path: Path) -> None:
    emit(W, tmp_path, "nvidia/h200")
    with pytest.raises(UnsupportedError, match=r"device='cpu' is not allowed: .* was built for NVIDIA H200 \(cuda\)"):
        load(tmp_path, device="cpu")


def test_emit_a_log_for_the_device_it_was_recorded_on(tmp_path: Path) -> None:
    h200 = PRESETS["nvidia/h200"]
    log = write(tmp_path / "k.jsonl", record(9.0, 1, device=h200, space="toy_two_stages_cuda"), record(1e9, 2))
    emit(log, tmp_path / "a")
    manifest = Manifest.load(tmp_path / "a")
    assert (manifest.device, manifest.config, manifest.expected_us) == ("NVIDIA H200", {"n": 1}, 9.0)
    assert manifest.origin == "log, measured on NVIDIA H200"
    emit(log, tmp_path / "b", "cpu")
    assert Manifest.load(tmp_path / "b").config == {"n": 2}
    with pytest.raises(ArgumentError, match="holds no successful record for NVIDIA A100"):
        emit(log, tmp_path / "c", "nvidia/a100")
    assert not (tmp_path / "c").exists()


def test_emit_uses_the_best_record_of_a_workload(tmp_path: Path) -> None:
    from kronsched.records import default_log

    write(default_log(W), record(9.0, 3))
    emit(W, tmp_path, "cpu")
    manifest = Manifest.load(tmp_path)
    assert (manifest.config, manifest.expected_us) == ({"n": 3}, 9.0)
