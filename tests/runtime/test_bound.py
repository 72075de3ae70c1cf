"""Inputs that are bound to a module: what is launched once, and what call by call. First without a GPU, then on one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kronsched
from kronsched import KronMatmul
from kronsched.errors import ArgumentError, ArgumentTypeError
from kronsched.hardware import resolve_target
from kronsched.runtime.build import build_artefact
from kronsched.runtime.cuda import CudaExecutable
from kronsched.runtime.executable import load_executable
from kronsched.runtime.manifest import LaunchSpec, Manifest
from kronsched.runtime.module import TunedModule
from kronsched.workloads.base import TensorSpec
from tests.runtime.runtime_toys import H200, TwoStagesCuda, W
from tests.runtime.test_cuda_executable import NotingDriver, driver  # noqa: F401
from tests.runtime.test_manifest import MANIFEST


def _manifest(*launches: tuple[str, ...]) -> Manifest:
    def specs(*names: str) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name, (4,), "float32") for name in names)

    built = tuple(
        LaunchSpec(f"k{i}", args, ((4,),) * len(args), dtypes=("float32",) * len(args)) for i, args in enumerate(launches)
    )
    inputs, scratch, (output,) = specs("x", "w0", "w1"), specs("p0", "p1", "q", "t", "s"), specs("y")
    return dataclasses.replace(MANIFEST, launches=built, inputs=inputs, scratch=scratch, output=output)


def test_constant_launches_are_those_of_bound_inputs_and_their_own_scratch() -> None:
    packs = ("w0", "p0"), ("w1", "p1"), ("p1", "w1", "q")
    chain = _manifest(*packs, ("x", "p0", "t"), ("t", "s"), ("s", "p1", "q", "y"))
    assert chain.constant_launches(["w0", "w1"]) == (0, 1, 2)
    assert chain.constant_launches(["w0"]) == (0,)
    assert chain.constant_launches([]) == chain.constant_launches(["x"]) == ()
    # Scratch that a launch before it has used may hold what depends on x.
    assert _manifest(("x", "t"), ("t", "w0", "p0"), ("w1", "p1"), ("p0", "p1", "y")).constant_launches(["w0", "w1"]) == (2,)
    # A launch over scratch alone, such as one that clears a counter, is no constant.
    assert _manifest(("t",), ("x", "t", "y")).constant_launches(["w0"]) == ()


def test_bound_launches_run_once_and_the_rest_does_not_start_early(
    driver: NotingDriver,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[str] = []
    streams = {name: _stream(name, waits) for name in (1, 2)}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: streams[now])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: waits.append(f"memory, {stream.cuda_stream}"))
    build_artefact(W, TwoStagesCuda(), {}, H200, tmp_path / "a")
    manifest = Manifest.load(tmp_path / "a")
    dataclasses.replace(manifest, launches=tuple(dataclasses.replace(s, overlap=True) for s in manifest.launches)).save(
        tmp_path / "a"
    )
    executable = load_executable(tmp_path / "a")
    assert isinstance(executable, CudaExecutable)
    driver.n_args = {"first_kernel": 3, "second_kernel": 3}
    x, f0, f1 = W.make_inputs(0)
    names = [spec.name for spec in manifest.inputs]
    assert executable.bind({names[1]: f0}) is None and driver.launches == []
    now, capturing = 1, False
    bound = executable.bind({names[0]: x, names[2]: f1})  # the first launch takes these two
    assert bound is not None
    ((first, _, stream, (a, scratch, c), *how),) = driver.launches
    assert (first, stream, a, c, how) == ("first_kernel", 1, f1.data_ptr(), x.data_ptr(), [])
    for now, capturing in ((1, False), (1, False), (2, False), (2, True)):  # noqa: B007
        driver.launches.clear()
        y = torch.empty(W.output.shape)
        bound([x, f0, f1], y)
        assert [launch[0] for launch in driver.launches] == ["second_kernel"]
        assert driver.launches[0][2:] == (now, [f0.data_ptr(), scratch, y.data_ptr()])  # no "overlap" behind them
    assert waits == ["2 for 1", "memory, 2"]
    driver.launches.clear()
    executable([x, f0, f1], y)
    assert [launch[4:] for launch in driver.launches] == [("overlap",)] * 2  # a plain call is as it was
    assert driver.contexts == []


def _stream(name: int, waits: list[str]) -> Any:
    return SimpleNamespace(
        cuda_stream=name, record_event=lambda: name, wait_event=lambda event: waits.append(f"{name} for {event}")
    )


def test_a_bound_module_takes_the_other_inputs(tmp_path: Path) -> None:
    w = KronMatmul(m=3, factors=[(4, 5), (2, 3)])
    module = kronsched.load(w, device="cpu")
    x, *factors = w.make_inputs(0)
    names = [spec.name for spec in module.manifest.inputs]
    bound = module.bind(**dict(zip(names[1:], factors, strict=True)))
    assert isinstance(module, TunedModule) and not bound.once  # one function on a CPU
    want = module(x, *factors)
    assert torch.equal(bound(x), want) and torch.equal(bound(x, out=torch.empty_like(want)), want)
    x.requires_grad_()
    bound(x).sum().backward()
    assert x.grad is not None
    with pytest.raises(ArgumentError, match="2 tensors were given: 1 are needed beside"):
        bound(x, x)
    with pytest.raises(ArgumentError, match=f"{len(names)} are needed$"):
        module.bind()(x)
    with pytest.raises(ArgumentError, match="x was given by name: inputs that are not bound are given by position"):
        bound(x=x)
    with pytest.raises(ArgumentError, match=r"bound input='z' is not allowed: choose one of x, "):
        module.bind(z=x)
    with pytest.raises(ArgumentTypeError, match=f"{names[1]} is of type list: a torch.Tensor is needed"):
        module.bind(**{names[1]: [1.0]})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=f"{names[1]} has shape"):
        module.bind(**{names[1]: x.detach()})


@pytest.mark.cuda
def test_gpu_bound_launches(tmp_path: Path) -> None:
    build_artefact(W, TwoStagesCuda(), {}, resolve_target("cuda"), tmp_path / "a")
    module = TunedModule.from_artefact(tmp_path / "a")
    x, f0, f1 = W.make_inputs(0, "cuda")
    names = [spec.name for spec in module.manifest.inputs]
    bound = module.bind(**{names[0]: x, names[2]: f1})
    assert bound.once
    want, y = W.reference(x, f0, f1), torch.empty(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = bound(f0)
        with pytest.raises(ArgumentError, match="while a CUDA graph is captured"):
            module.bind(**{names[0]: x})
    graph.replay()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        z = bound(f0)
    torch.cuda.synchronize()
    out = torch.full_like(y, float("nan"))
    assert bound(f0, out=out) is out
    with pytest.raises(ArgumentError, match="out"):
        bound(f0, out=out[:-1])
    for got in (y, z, out, bound(f0)):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
