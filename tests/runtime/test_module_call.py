"""Calling a TunedModule with torch tensors and numpy arrays; every error names the argument."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from kronsched import KronMatmul
from kronsched.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kronsched.runtime.build import build_artefact
from kronsched.runtime.module import TunedModule
from tests.runtime.runtime_toys import Toy, this_cpu

SQUARE = KronMatmul(m=40, factors=[(8, 8), (5, 5)])  # x and y have the same shape


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> TunedModule:
    artefact = tmp_path_factory.mktemp("module") / "a"
    build_artefact(SQUARE, Toy(), {"n": 3}, this_cpu(), artefact)
    return TunedModule.from_artefact(artefact, expected_us=2.5, measured=True, origin="log toy.jsonl")


@pytest.fixture
def inputs() -> list[torch.Tensor]:
    return SQUARE.make_inputs(0)


def test_describes_itself(module: TunedModule) -> None:
    assert module.workload == SQUARE
    assert module.config == {"n": 3}
    assert (module.space, module.device) == ("toy_cpu", "cpu")
    assert (module.expected_us, module.measured, module.origin) == (2.5, True, "log toy.jsonl")
    assert "def main(" in module.source
    assert module.artefact.is_absolute()
    assert repr(module) == "<TunedModule kron m=40 8x8,5x5 float32 on cpu, 2.5 us, toy_cpu>"


def test_torch_in_torch_out(module: TunedModule, inputs: list[torch.Tensor]) -> None:
    reference = module.reference(*inputs)
    assert reference.dtype == torch.float64
    for _ in range(2):  # the second call takes the quick path
        y = module(*inputs)
        assert isinstance(y, torch.Tensor) and y.dtype == torch.float32
        torch.testing.assert_close(y.double(), reference, rtol=1e-5, atol=1e-5)


def test_numpy_in_numpy_out(module: TunedModule, inputs: list[torch.Tensor]) -> None:
    arrays = [t.numpy() for t in inputs]
    y, reference = module(*arrays), module.reference(*arrays)
    assert isinstance(y, np.ndarray) and isinstance(reference, np.ndarray)
    assert (y.dtype, reference.dtype) == (np.float32, np.float64)
    np.testing.assert_allclose(y, reference, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y, arrays[0] @ np.kron(arrays[1], arrays[2]), rtol=1e-4, atol=1e-4)


def test_bfloat16_numpy(tmp_path: Path) -> None:
    w = KronMatmul(m=4, factors=[(8, 8)], dtype="bfloat16")
    build_artefact(w, Toy(), {}, this_cpu(), tmp_path / "a")
    mod = TunedModule.from_artefact(tmp_path / "a")
    arrays = [np.random.default_rng(i).standard_normal(t.shape).astype(ml_dtypes.bfloat16) for i, t in enumerate(w.inputs)]
    y = mod(*arrays)
    assert y.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(y.astype(float), mod.reference(*arrays), rtol=2e-2, atol=2e-2)


def test_results_are_the_callers_own(module: TunedModule, inputs: list[torch.Tensor]) -> None:
    first = module(*inputs)
    kept = first.clone()
    module(*SQUARE.make_inputs(1))
    assert torch.equal(first, kept)


def test_inputs_are_not_copied_or_changed(module: TunedModule, inputs: list[torch.Tensor], monkeypatch: Any) -> None:
    seen: list[int] = []
    monkeypatch.setattr(module, "_executable", Spy(module._executable, seen))
    before = [t.clone() for t in inputs]
    module(*inputs)
    assert seen == [t.data_ptr() for t in inputs]
    seen.clear()
    arrays = [t.numpy() for t in inputs]
    module(*arrays)
    assert seen == [a.ctypes.data for a in arrays]
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


class Spy:
    def __init__(self, inner: Any, seen: list[int]) -> None:
        self.inner, self.seen, self.manifest = inner, seen, inner.manifest

    def __call__(self, inputs: Any, output: Any) -> None:
        self.seen += [t.data_ptr() if isinstance(t, torch.Tensor) else t.ctypes.data for t in inputs]
        self.inner(inputs, output)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_out_is_written_and_returned(module: TunedModule, inputs: list[torch.Tensor], kind: str) -> None:
    args: list[Any] = inputs if kind == "torch" else [t.numpy() for t in inputs]
    out: Any = torch.full((40, 40), float("nan")) if kind == "torch" else np.full((40, 40), np.nan, np.float32)
    assert module(*args, out=out) is out
    assert abs(np.asarray(out) - np.asarray(module(*args))).max() == 0


def test_autograd_sees_that_out_changed(module: TunedModule, inputs: list[torch.Tensor]) -> None:
    out, leaf = torch.ones(40, 40), torch.ones(40, 40, requires_grad=True)
    product = (leaf * out).sum()  # saves `out` for backward
    module(*inputs, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_strided_inputs_are_made_contiguous(module: TunedModule, inputs: list[torch.Tensor], kind: str) -> None:
    want = module(*inputs)
    strided = [inputs[0].T.contiguous().T, inputs[1], torch.stack([inputs[2]] * 2, -1)[..., 0]]
    assert not strided[0].is_contiguous() and not strided[2].is_contiguous()
    args: list[Any] = strided if kind == "torch" else [t.numpy() for t in strided]
    assert abs(np.asarray(module(*args)) - want.numpy()).max() == 0


def test_negated_views_are_resolved(module: TunedModule, inputs: list[torch.Tensor]) -> None:
    want = -module(*inputs)
    contiguous = torch._neg_view(inputs[0])
    strided = torch.imag(torch.complex(torch.zeros_like(inputs[0]), inputs[0]).conj())
    for view in (contiguous, strided):
        assert view.is_neg() and view.is_contiguous() == (view is contiguous)
        torch.testing.assert_close(module(view, *inputs[1:]), want)
        torch.testing.assert_close(module(view, *inputs[1:], out=torch.empty(40, 40)), want)


def test_unaligned_numpy_is_copied(module: TunedModule, inputs: list[torch.Tensor]) -> None:
    raw = np.zeros(40 * 40 * 4 + 1, np.uint8)
    x = raw[1:].view(np.float32).reshape(40, 40)
    x[:] = inputs[0].numpy()
    assert not x.flags.aligned
    assert abs(module(x, *(t.numpy() for t in inputs[1:])) - module(*inputs).numpy()).max() == 0


WRONG: list[tuple[str, Callable[[list[Any]], tuple[list[Any], Any]], type[Exception], str]] = [
    (
        "count",
        lambda a: (a[:2], None),
        ArgumentError,
        "2 tensors were given; kron m=40 8x8,5x5 float32 takes 3: x (40, 40), f0 (8, 8)",
    ),
    ("none", lambda a: ([], None), ArgumentError, "0 tensors were given"),
    ("shape", lambda a: ([a[0], a[2], a[1]], None), ArgumentError, "f0 has shape (5, 5), (8, 8) is needed"),
    ("rank", lambda a: ([a[0].reshape(-1), *a[1:]], None), ArgumentError, "x has shape (1600,), (40, 40) is needed"),
    (
        "list",
        lambda a: ([[1.0], *a[1:]], None),
        ArgumentTypeError,
        "x is of type list: a torch.Tensor or numpy.ndarray is needed",
    ),
    ("scalar", lambda a: ([a[0], 1.0, a[2]], None), ArgumentTypeError, "f0 is of type float: a "),
    ("out list", lambda a: (a, [0]), ArgumentTypeError, "out is of type list: a "),
    ("out shape", lambda a: (a, a[1]), ArgumentError, "out has shape (8, 8), (40, 40) is needed"),
    ("out is x", lambda a: (a, a[0]), ArgumentError, "out shares memory with x"),
]


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize(("wrong", "error", "says"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_wrong_arguments(
    module: TunedModule, inputs: list[torch.Tensor], kind: str, wrong: Any, error: type[Exception], says: str
) -> None:
    args, out = wrong(inputs if kind == "torch" else [t.numpy() for t in inputs])
    with pytest.raises(error) as e:
        module(*args, out=out)
    assert type(e.value) is error
    assert says in str(e.value)
    assert "\n" not in str(e.value)


def test_errors_are_value_and_type_errors(module: TunedModule, inputs: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="f0 has shape"):
        module(inputs[0], inputs[2], inputs[2])
    with pytest.raises(TypeError, match="f1 has dtype float64, float32 is needed"):
        module(*inputs[:2], inputs[2].double())
    with pytest.raises(TypeError, match="f1 has dtype float64, float32 is needed"):
        module(*(t.numpy() for t in inputs[:2]), inputs[2].double().numpy())


def test_kinds_do_not_mix(module: TunedModule, inputs: list[torch.Tensor]) -> None:
    with pytest.raises(ArgumentTypeError, match=r"f0 is of type numpy\.ndarray: a torch\.Tensor is needed, as x is"):
        module(inputs[0], inputs[1].numpy(), inputs[2])
    with pytest.raises(ArgumentTypeError, match=r"out is of type torch\.Tensor: a numpy\.ndarray is needed, as x is"):
        module(*(t.numpy() for t in inputs), out=torch.empty(40, 40))


def test_device_and_layout(module: TunedModule, inputs: list[torch.Tensor]) -> None:
    with pytest.raises(ArgumentTypeError, match="f0 is on meta, this module runs on cpu"):
        module(inputs[0], inputs[1].to("meta"), inputs[2])
    with pytest.raises(ArgumentTypeError, match=r"f0 has layout torch\.sparse_coo"):
        module(inputs[0], inputs[1].to_sparse(), inputs[2])


def test_bad_out(module: TunedModule, inputs: list[torch.Tensor]) -> None:
    arrays = [t.numpy() for t in inputs]
    frozen = np.empty((40, 40), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ArgumentError, match="out is read-only"):
        module(*arrays, out=frozen)
    with pytest.raises(ArgumentError, match="out is not contiguous"):
        module(*arrays, out=np.empty((40, 80), np.float32)[:, ::2])
    with pytest.raises(ArgumentError, match="out is not contiguous"):
        module(*inputs, out=torch.empty(40, 40).T)
    block = torch.empty(2 * 1600)
    x, shifted = block[:1600].view(40, 40), block[1599:3199].view(40, 40)  # one element in common
    with pytest.raises(ArgumentError, match="out shares memory with x"):
        module(x, *inputs[1:], out=shifted)
    module(x, *inputs[1:], out=block[1600:].view(40, 40))  # neighbours are fine


def test_gradients_are_those_of_the_reference(module: TunedModule, inputs: list[torch.Tensor]) -> None:
    leaves = [t.clone().requires_grad_() for t in inputs]
    weight = torch.randn(40, 40)
    found = torch.autograd.grad(module(*leaves), leaves, weight)
    wanted = torch.autograd.grad(module.workload.reference(*leaves), leaves, weight.double())
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_gradients_are_refused_not_lost(module: TunedModule, inputs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    leaf, out = inputs[1].clone().requires_grad_(), torch.ones(40, 40)
    with pytest.raises(UnsupportedError, match=r"f0 requires grad: out= is not allowed where gradients are recorded; use torch"):
        module(inputs[0], leaf, inputs[2], out=out)
    with pytest.raises(UnsupportedError, match=r"out requires grad: out= is not allowed where gradients are recorded; use torch"):
        module(*inputs, out=out.requires_grad_())
    monkeypatch.setattr(KronMatmul, "gradient", None)  # as in a family that has none
    with pytest.raises(UnsupportedError, match=r"f0 requires grad: backward is not supported yet; use torch.no_grad\(\)"):
        module(inputs[0], leaf, inputs[2])
    with torch.no_grad():
        assert torch.equal(module(inputs[0], leaf, inputs[2]), module(*inputs))
    with torch.inference_mode():
        out = torch.empty(40, 40)
        module(*inputs, out=out)
        assert torch.equal(out, module(*inputs))


def test_parameters_and_copies(module: TunedModule, inputs: list[torch.Tensor]) -> None:
    parameter = torch.nn.Parameter(inputs[1], requires_grad=False)
    want = module(*inputs)
    assert torch.equal(module(inputs[0], parameter, inputs[2]), want)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin is not module
        assert (twin.expected_us, twin.measured, twin.origin) == (2.5, True, "log toy.jsonl")
        assert torch.equal(twin(*inputs), want)


def test_tensors_off_a_vector_boundary_are_copied_where_the_device_needs_it(
    tmp_path: Path, inputs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    build_artefact(SQUARE, Toy(), {"n": 3}, this_cpu(), tmp_path / "a")
    module = TunedModule.from_artefact(tmp_path / "a")
    module(*inputs)
    assert module._signature is not None
    module._signature.alignment = 16  # as on CUDA
    seen: list[int] = []
    executable = module._executable

    def spy(tensors: Any, output: Any) -> None:
        seen.extend(t.data_ptr() % 16 for t in (*tensors, output))
        executable(tensors, output)

    spy.manifest = executable.manifest  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "_executable", spy)
    shifted = torch.empty(inputs[0].numel() + 1)[1:].view(inputs[0].shape).copy_(inputs[0])
    out = torch.empty(inputs[0].numel() + 1)[1:].view(SQUARE.output.shape)
    assert shifted.data_ptr() % 16 and out.data_ptr() % 16
    y = module(shifted, *inputs[1:], out=out)
    assert y is out and seen and not any(seen)
    torch.testing.assert_close(y.double(), module.reference(*inputs), rtol=1e-5, atol=1e-5)


def test_a_traced_call_is_an_operator_in_the_graph(module: TunedModule, inputs: list[torch.Tensor]) -> None:
    """A graph without the operator would return memory that nothing wrote."""
    from torch.fx.experimental.proxy_tensor import make_fx

    expected = module(*inputs)
    module(*inputs)  # the quick path is there now
    graph = make_fx(lambda *a: module(*a))(*inputs)
    assert "kronsched" in graph.code
    torch.testing.assert_close(graph(*inputs), expected)
    traced = torch.jit.trace(lambda *a: module(*a), tuple(inputs), check_trace=False)
    torch.testing.assert_close(traced(*inputs), expected)


def test_what_differentiates_forwards_is_refused(module: TunedModule, inputs: list[torch.Tensor]) -> None:
    import torch.autograd.forward_ad as fw

    module(*inputs)
    with fw.dual_level():
        dual = fw.make_dual(inputs[0], torch.ones_like(inputs[0]))
        with pytest.raises(UnsupportedError, match="x carries a tangent"):
            module(dual, *inputs[1:])
        module(*inputs)  # no tangent, no complaint
    with pytest.raises(UnsupportedError, match=r"x is inside a torch\.func transform"):
        torch.func.jvp(lambda x: module(x, *inputs[1:]), (inputs[0],), (inputs[0],))


def test_the_reference_checks_its_arguments(module: TunedModule, inputs: list[torch.Tensor]) -> None:
    x, *factors = inputs
    with pytest.raises(ArgumentError, match="x has shape"):
        module.reference(x[:2], *factors)
    with pytest.raises(ArgumentTypeError, match="x has dtype"):
        module.reference(x.double(), *factors)
    arrays = [t.numpy() for t in inputs]
    with pytest.raises(ArgumentTypeError, match="x has dtype"):
        module.reference(arrays[0].astype(">f4"), *arrays[1:])
    turned = module.reference(arrays[0][::-1], *arrays[1:])
    np.testing.assert_allclose(turned, module.reference(*arrays)[::-1])
