from __future__ import annotations

import pytest
import torch

import kronsched
from kronsched import Gemm
from kronsched.errors import ArgumentError, ArgumentTypeError
from kronsched.measure.check import max_relative_error
from kronsched.workloads.float8 import FLOAT8, widened


def dense(m: int, n: int, k: int, dtype: str, out_dtype: str = "") -> Gemm:
    return Gemm(m, n, k, dtype, dtype, out_dtype=out_dtype)


def test_identities_of_4_bit_workloads_have_not_changed() -> None:
    """Tuning logs find their records by key."""
    assert Gemm(16, 4096, 4096).key == "gemm-0d27d05e7c814ae5"
    assert "out_dtype" not in Gemm(16, 4096, 4096).to_dict()
    assert Gemm(16, 4096, 4096, out_dtype="float16") == Gemm(16, 4096, 4096)


def test_default_output_dtypes() -> None:
    found = {d: dense(8, 8, 8, d).out_dtype for d in ("float16", "bfloat16", "int8", *FLOAT8)}
    assert found == {
        "float16": "float16",
        "bfloat16": "bfloat16",
        "int8": "float16",
        "float8_e4m3fn": "bfloat16",
        "float8_e5m2": "bfloat16",
    }
    assert dense(8, 8, 8, "int8", "int32").to_dict() == {
        "family": "gemm", "m": 8, "n": 8, "k": 8, "a_dtype": "int8", "b_dtype": "int8", "out_dtype": "int32"
    }  # fmt: skip


def test_tensors_and_costs() -> None:
    scaled, exact = dense(4, 6, 8, "int8"), dense(4, 6, 8, "int8", "int32")
    assert [(t.name, t.shape, t.dtype) for t in scaled.inputs] == [
        ("x", (4, 8), "int8"), ("w", (6, 8), "int8"), ("x_scale", (4,), "float32"), ("w_scale", (6,), "float32")
    ]  # fmt: skip
    assert [t.name for t in exact.inputs] == ["x", "w"]
    assert scaled.min_bytes == 4 * 8 + 6 * 8 + 4 * (4 + 6) + 2 * 4 * 6
    assert exact.min_bytes == 4 * 8 + 6 * 8 + 4 * 4 * 6
    assert scaled.flops == exact.flops == 2 * 4 * 6 * 8
    assert scaled.compute_dtype == "int8"
    assert dense(4, 6, 8, "bfloat16").label == "gemm m=4 n=6 k=8 bfloat16"
    assert exact.label == "gemm m=4 n=6 k=8 int8->int32"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_module_computes_linear(dtype: str) -> None:
    w = dense(5, 70, 33, dtype)
    mod = kronsched.load(w, device="cpu")
    x, weight = w.make_inputs(0)
    linear = torch.nn.functional.linear(x.double(), weight.double())
    assert max_relative_error(mod(x, weight), linear) < 1e-2
    assert torch.equal(mod.reference(x, weight), linear)


def test_int8_is_exact_at_its_extremes() -> None:
    w = dense(3, 5, 300, "int8", "int32")
    mod = kronsched.load(w, device="cpu")
    x, weight = torch.full((3, 300), -128, dtype=torch.int8), torch.full((5, 300), -128, dtype=torch.int8)
    assert torch.equal(mod(x, weight), torch.full((3, 5), 128 * 128 * 300, dtype=torch.int32))


def test_scales_and_their_mistakes() -> None:
    w = dense(3, 5, 32, "int8")
    mod = kronsched.load(w, device="cpu")
    x, weight, xs, ws = w.make_inputs(0)
    want = (x.double() @ weight.double().T) * xs.double()[:, None] * ws.double()[None, :]
    assert max_relative_error(mod(x, weight, xs, ws), want) < 1e-3
    with pytest.raises(ArgumentError, match=r"2 tensors were given; .* takes 4: x .*x_scale \(3,\), w_scale \(5,\)"):
        mod(x, weight)
    with pytest.raises(ArgumentError, match="x_scale has shape"):
        mod(x, weight, ws, xs)
    with pytest.raises(ArgumentTypeError, match="w_scale has dtype float64"):
        mod(x, weight, xs, ws.double())
    with pytest.raises(ArgumentError, match="w has shape"):
        mod(x, weight.T.contiguous(), xs, ws)


def test_float8_special_values() -> None:
    """NaN in, NaN out, in its row and column only; results beyond the output dtype become infinite, not NaN."""
    w = dense(4, 5, 16, "float8_e4m3fn", "float16")
    mod = kronsched.load(w, device="cpu")
    x, weight, xs, ws = w.make_inputs(0)
    x[1, 3] = float("nan")
    weight[2, 0] = float("nan")
    x[3], weight[4], xs[3], ws[4] = 448.0, 448.0, 1.0, 1.0
    y = mod(x, weight, xs, ws)
    nan = torch.zeros(4, 5, dtype=torch.bool)
    nan[1, :] = nan[:, 2] = True
    assert torch.equal(y.isnan(), nan)
    assert y[3, 4] == float("inf")


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_float8_number_is_widened_exactly(dtype: str) -> None:
    import tvm
    from tvm import te, tirx

    x = te.placeholder((256,), name="x", dtype=dtype)
    y = te.compute((256,), lambda i: widened(tirx.reinterpret("uint8", x[i]), dtype).astype("float32"), name="y")
    func = te.create_prim_func([x, y]).with_attr("global_symbol", "main")
    every = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype))
    out = torch.empty(256)
    tvm.compile(tvm.IRModule({"main": func}), target="llvm")["main"](every, out)
    torch.testing.assert_close(out, every.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "out_dtype"), [("float16", ""), ("int8", ""), ("int8", "int32"), ("float8_e4m3fn", "")])
def test_baseline_computes_the_product(dtype: str, out_dtype: str) -> None:
    w = dense(20, 24, 32, dtype, out_dtype)
    inputs = w.make_inputs(0)
    name, call = w.baseline(*inputs)
    assert name.startswith("torch ")
    assert call().shape == (20, 24)
