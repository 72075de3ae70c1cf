"""Every family, put through the workload contract."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kronsched.workloads.base import Workload
from kronsched.workloads.conv2d import Conv2d
from kronsched.workloads.gemm import Gemm
from kronsched.workloads.kron import KronMatmul
from kronsched.workloads.ks import KSMatmul
from kronsched.workloads.ks_wgrad import KSWeightGrad
from tests.contract.workload_battery import WorkloadBattery


class TestKron(WorkloadBattery):
    def workloads(self) -> Sequence[Workload]:
        return [
            KronMatmul(6, [(4, 3), (5, 7), (2, 8)]),
            KronMatmul(6, [(4, 3), (5, 7), (2, 8)], "float64"),
            KronMatmul(6, [(4, 3), (5, 7), (2, 8)], "float16"),
            KronMatmul(6, [(4, 3), (5, 7), (2, 8)], "bfloat16"),
            KronMatmul(5, [(33, 17)]),
            KronMatmul(9, [(8, 1)] * 3),
            KronMatmul(9, [(1, 8)] * 3),
            KronMatmul(1, [(1, 1)]),
            KronMatmul(2, [(1, 1)] * 60 + [(2, 3)] * 4),
            KronMatmul(64, [(8, 8)] * 4),
            KronMatmul(1024, [(8, 8)] * 5, "float16"),
            KronMatmul(1, [(128, 2)] * 4),
        ]

    def bad_fields(self) -> Sequence[tuple[Mapping[str, Any], str]]:
        good: dict[str, Any] = {"m": 4, "factors": [[2, 2], [3, 3]], "dtype": "float32"}
        return [
            ({**good, "m": 0}, "m=0"),
            ({**good, "m": -3}, "m=-3"),
            ({**good, "m": 2.0}, "m=2.0"),
            ({**good, "m": "4"}, "m='4'"),
            ({**good, "m": True}, "m=True"),
            ({**good, "factors": []}, "factors"),
            ({**good, "factors": "2x2"}, "factors='2x2'"),
            ({**good, "factors": 7}, "factors=7"),
            ({**good, "factors": [[2, 2], [3]]}, "factors[1]"),
            ({**good, "factors": [[2, 2], [3, 0]]}, "factors[1] Q=0"),
            ({**good, "factors": [[-2, 2]]}, "factors[0] P=-2"),
            ({**good, "factors": [[2.5, 2]]}, "factors[0] P=2.5"),
            ({**good, "factors": ["22"]}, "factors[0]='22'"),
            ({**good, "factors": [[1, 1]] * 65}, "factors: 65"),
            ({**good, "factors": [[64, 64]] * 6}, "m=4 with these factors"),
            ({**good, "dtype": "float8"}, "dtype='float8'"),
            ({**good, "dtype": None}, "dtype=None"),
        ]

    def dense(self, workload: Workload, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        assert isinstance(workload, KronMatmul)
        if workload.k_in * workload.k_out > 4_000_000:
            return None
        product = torch.ones((1, 1), dtype=torch.float64)
        for factor in inputs[1:]:
            product = torch.kron(product, factor.double())
        return inputs[0].double() @ product


class TestGemm(WorkloadBattery):
    def workloads(self) -> Sequence[Workload]:
        return [
            Gemm(3, 48, 384),
            Gemm(1, 1, 1),
            Gemm(17, 130, 257, "bfloat16", group_size=64),
            Gemm(2, 64, 256, group_size=32, zero_point="asymmetric"),
            Gemm(2, 64, 200, "bfloat16", group_size=-1, zero_point="asymmetric"),
            Gemm(5, 70, 300, group_size=96, zero_point="float"),
            Gemm(5, 70, 300, "bfloat16", group_size=96, zero_point="float", act_order=True),
            Gemm(16, 4096, 4096),
            Gemm(16, 4096, 4096, act_order=True),
        ]

    def bad_fields(self) -> Sequence[tuple[Mapping[str, Any], str]]:
        good: dict[str, Any] = {"m": 4, "n": 64, "k": 128}
        return [
            ({**good, "m": 0}, "m=0"),
            ({**good, "n": -1}, "n=-1"),
            ({**good, "k": 1.5}, "k=1.5"),
            ({**good, "k": True}, "k=True"),
            ({**good, "n": 2**20, "k": 2**20}, "m=4, n=1048576, k=1048576"),
            ({**good, "a_dtype": "float32"}, "a_dtype='float32'"),
            ({**good, "b_dtype": "bfloat16"}, "b_dtype='bfloat16'"),
            ({**good, "b_dtype": "int8"}, "b_dtype='int8'"),
            ({**good, "out_dtype": "float32"}, "out_dtype='float32'"),
            ({**good, "b_dtype": None}, "b_dtype=None"),
            ({**good, "group_size": 16}, "group_size=16"),
            ({**good, "group_size": -2}, "group_size=-2"),
            ({**good, "group_size": "128"}, "group_size='128'"),
            ({**good, "zero_point": "none"}, "zero_point='none'"),
            ({**good, "zero_point": 8}, "zero_point=8"),
            ({**good, "act_order": 1}, "act_order=1"),
        ]

    def dense(self, workload: Workload, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Element by element, by the arithmetic of the layout's docstring."""
        assert isinstance(workload, Gemm)
        if workload.flops > 500_000:
            return None
        x, words, scales = inputs[0].double(), inputs[1].flatten().tolist(), inputs[2].double()
        k_packed, group_size = workload.layout.k_packed, workload.layout.rows_per_group
        perm = inputs[-1].tolist() if workload.act_order else [r if r < workload.k else -1 for r in range(k_packed)]
        w = torch.zeros((workload.k, workload.n), dtype=torch.float64)
        for row, source in enumerate(perm):
            for n in range(workload.n) if source >= 0 else ():
                tile = (n // 64 * (k_packed // 128) + row // 128) * 1024
                lane = n % 8 * 4 + row % 32 // 8
                word = words[tile + ((n % 64 // 16 * 2 + row % 128 // 64) * 32 + lane) * 4 + row % 64 // 32 * 2 + row % 8 // 4]
                q = word >> (4 * (row % 4 // 2 * 2 + n % 16 // 8) + row % 2 * 16) & 15
                column = (n // 64, row // group_size, n % 8 * 8 + n % 64 // 16 * 2 + n % 16 // 8)
                zero = 8.0 if workload.zero_point == "symmetric" else float(inputs[3][column])
                w[source, n] = (q - zero) * scales[column]
        return x @ w


class TestGemmDense(WorkloadBattery):
    def workloads(self) -> Sequence[Workload]:
        return [
            *(_dense(7, 9, 40, dtype) for dtype in ("float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")),
            _dense(7, 9, 40, "int8", "int32"),
            _dense(7, 9, 40, "int8", "bfloat16"),
            _dense(7, 9, 40, "float8_e4m3fn", "float16"),
            _dense(1, 1, 1, "float16"),
            _dense(4096, 4096, 4096, "int8"),
        ]

    def bad_fields(self) -> Sequence[tuple[Mapping[str, Any], str]]:
        good: dict[str, Any] = {"m": 4, "n": 64, "k": 128, "a_dtype": "int8", "b_dtype": "int8"}
        return [
            ({**good, "m": 0}, "m=0"),
            ({**good, "k": 2**17}, "k=131072"),
            ({**good, "m": 2**16, "n": 2**16}, "m=65536, n=65536"),
            ({**good, "a_dtype": "int32"}, "a_dtype='int32'"),
            ({**good, "b_dtype": "float16"}, "b_dtype='float16'"),
            ({**good, "b_dtype": "int4"}, "b_dtype='int4'"),
            ({**good, "out_dtype": "float32"}, "out_dtype='float32'"),
            ({**good, "out_dtype": None}, "out_dtype=None"),
            ({**good, "a_dtype": "float8_e4m3fn", "b_dtype": "float8_e5m2"}, "b_dtype='float8_e5m2'"),
            ({**good, "group_size": 64}, "group_size=64"),
            ({**good, "zero_point": "asymmetric"}, "zero_point='asymmetric'"),
            ({**good, "act_order": True}, "act_order=True"),
        ]

    def dense(self, workload: Workload, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Element by element, in numpy."""
        assert isinstance(workload, Gemm)
        if workload.flops > 500_000:
            return None
        x, w = (t.to(torch.float64 if t.is_floating_point() else torch.int64) for t in inputs[:2])
        y = (x[:, None, :] * w[None, :, :]).sum(dim=2).double()
        for axis, scale in enumerate(inputs[2:]):
            y = y * scale.double().unsqueeze(1 - axis)
        return y


def _dense(m: int, n: int, k: int, dtype: str, out_dtype: str = "") -> Gemm:
    return Gemm(m, n, k, dtype, dtype, out_dtype=out_dtype)


class TestKS(WorkloadBattery):
    def workloads(self) -> Sequence[Workload]:
        return [
            *(KSMatmul(6, (2, 5, 4, 3), dtype) for dtype in ("float32", "float64", "float16", "bfloat16")),
            *(KSMatmul(6, (2, 5, 4, 3), dtype, "batch_last") for dtype in ("float32", "float64", "float16", "bfloat16")),
            KSMatmul(5, [(6, 4, 8, 1), (1, 12, 12, 2)]),
            KSMatmul(5, [(6, 4, 8, 1), (1, 12, 12, 2)], "float16", "batch_last"),
            KSMatmul(1, (1, 1, 1, 1)),
            KSMatmul(9, (4, 1, 7, 2)),
            KSMatmul(9, (4, 7, 1, 2), layout="batch_last"),
            KSMatmul(3, [(4, 2, 2, 1), (2, 2, 2, 2), (1, 2, 2, 4)], "float64"),
            KSMatmul(25088, (6, 64, 64, 1), "float16"),
            KSMatmul(6, (2, 5, 4, 3), "float16", bias=True, activation="gelu", residual=True),
            KSMatmul(5, [(6, 4, 8, 1), (1, 12, 12, 2)], "float64", "batch_last", bias=True, activation="silu"),
            KSMatmul(5, [(6, 4, 8, 1), (1, 12, 12, 2)], "complex64", "batch_last", bias=True, residual=True),
            KSMatmul(5, (2, 5, 4, 3), "complex128"),
        ]

    def bad_fields(self) -> Sequence[tuple[Mapping[str, Any], str]]:
        good: dict[str, Any] = {"batch": 4, "pattern": [2, 3, 4, 5], "dtype": "float32", "layout": "batch_first"}
        return [
            ({**good, "batch": 0}, "batch=0"),
            ({**good, "batch": 2.0}, "batch=2.0"),
            ({**good, "batch": True}, "batch=True"),
            ({**good, "pattern": 7}, "pattern=7"),
            ({**good, "pattern": "2,3,4,5"}, "pattern='2,3,4,5'"),
            ({**good, "pattern": []}, "pattern=[]"),
            ({**good, "pattern": [2, 3, 4]}, "pattern=[2, 3, 4]"),
            ({**good, "pattern": [2, 3, 0, 5]}, "pattern c=0"),
            ({**good, "pattern": [2, 3, 4, 5.5]}, "pattern d=5.5"),
            ({**good, "pattern": [[2, 3, 4, 5], [1, 2, 3]]}, "pattern[1]"),
            ({**good, "pattern": [[2, 3, 4, 5], [1, 2, 3, 4]]}, "pattern[1]=(1, 2, 3, 4)"),
            ({**good, "pattern": [[1, 1, 1, 1]] * 33}, "33 factors"),
            ({**good, "pattern": [1024, 1024, 1024, 4]}, "needs a tensor"),
            ({**good, "dtype": "float8"}, "dtype='float8'"),
            ({**good, "dtype": "complex32"}, "dtype='complex32'"),
            ({**good, "dtype": "complex64", "activation": "relu"}, "activation='relu'"),
            ({**good, "layout": "first"}, "layout='first'"),
            ({**good, "layout": None}, "layout=None"),
            ({**good, "bias": 1}, "bias=1"),
            ({**good, "activation": "tanh"}, "activation='tanh'"),
            ({**good, "residual": None}, "residual=None"),
        ]

    def dense(self, workload: Workload, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        assert isinstance(workload, KSMatmul)
        wide = torch.complex128 if inputs[0].is_complex() else torch.float64
        x, weights, bias, residual = workload.parts([t.to(wide) for t in inputs])
        y = x if workload.batch_first else x.T
        for (a, b, c, d), w in zip(workload.patterns, weights, strict=True):
            if a * b * d * a * c * d > 4_000_000:
                return None
            k = torch.zeros(a, b, d, a, c, d, dtype=wide)
            for i in range(a):
                for inner in range(d):
                    k[i, :, inner, i, :, inner] = w[i, :, :, inner]
            y = y @ k.reshape(a * b * d, a * c * d).T
        y = y if bias is None else y + bias
        if workload.activation is not None:
            y = {"gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}[workload.activation](y)
        y = y if workload.batch_first else y.T
        return y if residual is None else y + residual


class TestKSWeightGrad(WorkloadBattery):
    def workloads(self) -> Sequence[Workload]:
        return [
            KSWeightGrad(6, (2, 5, 4, 3)),
            KSWeightGrad(6, (2, 5, 4, 3), "float16", "batch_last"),
            KSWeightGrad(1, (1, 1, 1, 1), "float64"),
            KSWeightGrad(25088, (6, 64, 64, 1), "bfloat16"),
        ]

    def bad_fields(self) -> Sequence[tuple[Mapping[str, Any], str]]:
        good = {"batch": 4, "pattern": [1, 2, 3, 1]}
        return [
            ({**good, "batch": 0}, "batch=0"),
            ({**good, "pattern": [1, 2, 3]}, "pattern"),
            ({**good, "pattern": [[1, 2, 3, 1], [1, 2, 2, 1]]}, "pattern"),
            ({**good, "dtype": "complex64"}, "complex64"),
            ({**good, "layout": "sideways"}, "layout"),
        ]

    def dense(self, workload: Workload, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        assert isinstance(workload, KSWeightGrad)
        a, b, c, d = workload.pattern
        g, x = (t.double() if workload.batch_first else t.double().T for t in inputs)
        blocks = (g.T @ x).reshape(a, b, d, a, c, d)  # every output with every input
        return blocks.diagonal(dim1=0, dim2=3).diagonal(dim1=1, dim2=3).permute(2, 0, 1, 3)


class TestConv2d(WorkloadBattery):
    def workloads(self) -> Sequence[Workload]:
        everything: dict[str, Any] = {"has_bias": True, "has_residual": True, "relu": True}
        return [
            Conv2d(1, 7, 5, 3, 10, 3, stride=2, padding=1),
            Conv2d(2, 5, 5, 6, 8, 3, padding=1, **everything),
            Conv2d(2, 5, 5, 6, 8, 3, out_dtype="int32", **everything),
            Conv2d(1, 6, 5, 8, 4, (3, 1), stride=(2, 1), padding=(1, 0), dilation=2, in_dtype="float16", has_scale=True),
            Conv2d(1, 6, 6, 8, 8, 3, groups=2, in_dtype="bfloat16", **everything),
            Conv2d(2, 6, 6, 8, 8, 3, padding=1, groups=8, has_scale=False),
            Conv2d(1, 6, 6, 8, 8, 3, in_dtype="float8_e4m3fn", has_scale=True, **everything),
            Conv2d(1, 6, 6, 8, 8, 3, in_dtype="float8_e5m2", out_dtype="bfloat16"),
            Conv2d(2, 1, 1, 64, 100, 1),
            Conv2d(8, 4, 5, 32, 64, 3, padding=1, layout="NHWCnc"),
            Conv2d(16, 3, 3, 32, 16, 1, in_dtype="float16", has_bias=True, layout="NHWCnc"),
            Conv2d(1, 6, 6, 8, 6, 3, padding=1, in_dtype="int4"),
            Conv2d(1, 6, 6, 8, 6, 3, groups=2, in_dtype="uint4", has_bias=True, relu=True),
            Conv2d(1, 6, 6, 8, 5, 3, in_dtype="uint4", out_dtype="int32", has_residual=True),
            Conv2d(8, 56, 56, 64, 64, 3, padding=1),
        ]

    def bad_fields(self) -> Sequence[tuple[Mapping[str, Any], str]]:
        good: dict[str, Any] = {"n": 1, "h": 8, "w": 8, "c_in": 8, "c_out": 8, "kernel": 3}
        return [
            ({**good, "n": 0}, "n=0"),
            ({**good, "h": 2.5}, "h=2.5"),
            ({**good, "c_in": True}, "c_in=True"),
            ({**good, "kernel": 0}, "kernel=0"),
            ({**good, "kernel": [3]}, "kernel=[3]"),
            ({**good, "kernel": "3"}, "kernel='3'"),
            ({**good, "kernel": 9}, "kernel=(9, 9)"),
            ({**good, "stride": [0, 1]}, "stride=0"),
            ({**good, "padding": -1}, "padding=-1"),
            ({**good, "dilation": 0}, "dilation=0"),
            ({**good, "groups": 3}, "c_in=8"),
            ({**good, "c_out": 6, "groups": 4}, "c_out=6"),
            ({**good, "in_dtype": "float32"}, "in_dtype='float32'"),
            ({**good, "in_dtype": "int4", "c_in": 7}, "c_in=7"),
            ({**good, "in_dtype": "uint4", "c_out": 7}, "c_out=7"),
            ({**good, "in_dtype": "int4", "has_residual": True}, "has_residual=True"),
            ({**good, "in_dtype": "int4", "out_dtype": "int8"}, "out_dtype='int8'"),
            ({**good, "out_dtype": "float16"}, "out_dtype='float16'"),
            ({**good, "in_dtype": "float16", "out_dtype": "int8"}, "out_dtype='int8'"),
            ({**good, "out_dtype": "int32", "has_scale": True}, "has_scale=True"),
            ({**good, "has_scale": 1}, "has_scale=1"),
            ({**good, "relu": 1}, "relu=1"),
            ({**good, "layout": "NCHW"}, "layout='NCHW'"),
            ({**good, "n": 8, "layout": "NHWCnc"}, "c_in=8"),
            ({**good, "n": 4, "c_in": 32, "c_out": 32, "layout": "NHWCnc"}, "n=4"),
            ({**good, "n": 8, "c_in": 32, "c_out": 32, "layout": "NHWCnc", "has_residual": True}, "layout='NHWCnc'"),
            ({**good, "n": 2**20, "h": 256, "w": 256}, "needs a tensor"),
        ]

    def dense(self, workload: Workload, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """torch's own convolution in float64, and the epilogue value by value."""
        assert isinstance(workload, Conv2d)
        named = dict(zip((t.name for t in workload.inputs), inputs, strict=True))
        if workload.layout == "NHWCnc":  # image by image, block by block of channels
            x = named["x"]
            images = [torch.cat([x[i // 8, :, :, c, i % 8] for c in range(x.shape[3])], dim=-1) for i in range(workload.n)]
            plain = replace(workload, layout="NHWC")
            y = self.dense(plain, [torch.stack(images), *inputs[1:]])
            assert y is not None
            blocks = y.reshape(-1, 8, *y.shape[1:3], *workload.output.shape[3::2])
            return blocks.movedim(1, 4)
        if workload.in_dtype in ("int4", "uint4"):
            named["x"], named["w"] = _halves(named["x"], workload.in_dtype == "int4"), _halves(named["w"], True)
        x, w = (named[n].double().permute(0, 3, 1, 2) for n in ("x", "w"))
        attrs: dict[str, Any] = {n: getattr(workload, n) for n in ("stride", "padding", "dilation", "groups")}
        y = torch.nn.functional.conv2d(x, w, **attrs).permute(0, 2, 3, 1)
        y = y.round() if "int" in workload.in_dtype else y
        scale, bias, rest = named.get("scale"), named.get("bias"), named.get("residual")
        limits = {"int8": (-128, 127), "int4": (-8, 7), "uint4": (0, 15)}.get(workload.out_dtype)
        if limits is not None:
            flat = (y + (0 if bias is None else bias)).reshape(-1).tolist()
            scales = [1.0] * workload.c_out if scale is None else scale.tolist()
            more = [0] * len(flat) if rest is None else _rescaled(rest.reshape(-1).tolist(), float(named["residual_scale"]))
            low, high = 0 if workload.relu else limits[0], limits[1]
            out = [min(high, max(low, round(_f32(_f32(v) * scales[i % workload.c_out])) + more[i])) for i, v in enumerate(flat)]
            if workload.out_dtype != "int8":  # a byte is a pair, from -128 to 127
                out = [(high % 16 * 16 + low % 16 + 128) % 256 - 128 for low, high in zip(out[::2], out[1::2], strict=True)]
            return torch.tensor(out, dtype=torch.float64).reshape(workload.output.shape)
        y = y if scale is None else y * scale
        y = y if bias is None else y + bias
        y = y if rest is None else y + rest.double()
        return y.relu() if workload.relu else y


def _halves(packed: torch.Tensor, signed: bool) -> torch.Tensor:
    """Both values of each byte, the lower half first."""
    bytes_ = packed.double() % 256
    pair = torch.stack([bytes_ % 16, bytes_ // 16], dim=-1).flatten(-2)
    return torch.where(pair > 7, pair - 16, pair) if signed else pair


def _f32(value: float) -> float:
    """Rounded to float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _rescaled(values: Sequence[int], scale: float) -> list[int]:
    return [round(_f32(v * scale)) for v in values]
