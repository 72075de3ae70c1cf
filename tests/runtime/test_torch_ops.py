"""torch.compile, torch.export and tensor subclasses go through the custom op."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kronsched.errors import ArgumentError
from kronsched.runtime.build import build_artefact
from kronsched.runtime.module import TunedModule
from tests.runtime.runtime_toys import Toy, W, this_cpu


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> TunedModule:
    artefact = tmp_path_factory.mktemp("ops") / "a"
    build_artefact(W, Toy(), {}, this_cpu(), artefact)
    return TunedModule.from_artefact(artefact)


@pytest.fixture
def inputs() -> list[torch.Tensor]:
    return W.make_inputs(0)


def test_compile_fullgraph(module: TunedModule, inputs: list[torch.Tensor]) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, backend=backend)
    def f(x: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
        return module(2 * x, *factors) + 1

    torch.testing.assert_close(f(*inputs), 2 * module(*inputs) + 1)
    f(*W.make_inputs(1))
    assert len(graphs) == 1
    assert [n.target for n in graphs[0].graph.nodes if "kronsched" in str(n.target)] == [torch.ops.kronsched.call]


def test_compile_before_any_plain_call(tmp_path: Path, inputs: list[torch.Tensor]) -> None:
    build_artefact(W, Toy(), {}, this_cpu(), tmp_path / "a")
    fresh = TunedModule.from_artefact(tmp_path / "a")
    y = torch.compile(lambda *a: fresh(*a), fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(y, fresh(*inputs))


def test_compile_with_out_and_strided_input(module: TunedModule, inputs: list[torch.Tensor]) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def f(x: torch.Tensor, out: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
        module(x.T.contiguous().T, *factors, out=out)
        return out + 1

    out = torch.full(W.output.shape, float("nan"))
    y = f(inputs[0], out, *inputs[1:])
    torch.testing.assert_close(out, module(*inputs))
    torch.testing.assert_close(y, out + 1)


def test_compile_of_an_nn_module(module: TunedModule, inputs: list[torch.Tensor]) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = torch.nn.ParameterList([torch.nn.Parameter(t) for t in inputs[1:]])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = module(x, *self.f)
            return y

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(Layer(), fullgraph=True, backend="aot_eager")(inputs[0]), module(*inputs))


@pytest.mark.slow
def test_compile_with_inductor(module: TunedModule, inputs: list[torch.Tensor]) -> None:
    f = torch.compile(lambda x, *fs: module(2 * x, *fs).relu(), fullgraph=True)
    torch.testing.assert_close(f(*inputs), (2 * module(*inputs)).relu())


def test_wrong_shape_under_compile_is_an_error(module: TunedModule, inputs: list[torch.Tensor]) -> None:
    with pytest.raises(Exception, match=r"f0 has shape \(5, 7\), \(8, 6\) is needed"):
        torch.compile(lambda *a: module(*a), fullgraph=True, backend="aot_eager")(inputs[0], inputs[2], inputs[2])


def test_export(module: TunedModule, inputs: list[torch.Tensor]) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, f0: torch.Tensor, f1: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = module(x, f0, f1)
            return y

    program = torch.export.export(Layer(), tuple(inputs))
    torch.testing.assert_close(program.module()(*inputs), module(*inputs))


def test_fake_tensors_get_a_shape_without_running(module: TunedModule) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        y = module(*(torch.empty(t.shape) for t in W.inputs))
        assert (tuple(y.shape), y.dtype) == (W.output.shape, torch.float32)
        with pytest.raises(ArgumentError, match="x has shape"):
            module(torch.empty(3, 3), *(torch.empty(t.shape) for t in W.inputs[1:]))


def test_op_passes_torchs_own_checks(module: TunedModule, inputs: list[torch.Tensor]) -> None:
    from kronsched.runtime import ops  # noqa: F401  registers them

    handle = str(module.artefact)
    torch.library.opcheck(torch.ops.kronsched.call, (inputs, handle))
    torch.library.opcheck(torch.ops.kronsched.call_out, (inputs, torch.empty(W.output.shape), handle))


def test_a_graph_finds_its_module_in_another_process(module: TunedModule, inputs: list[torch.Tensor], tmp_path: Path) -> None:
    torch.save([inputs, module(*inputs)], tmp_path / "case.pt")
    code = """
import sys, torch
import kronsched.runtime.ops
inputs, want = torch.load(sys.argv[2])
assert torch.equal(torch.ops.kronsched.call(inputs, sys.argv[1]), want)
"""
    command = [sys.executable, "-c", code, str(module.artefact), str(tmp_path / "case.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
