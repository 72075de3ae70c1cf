"""Conv2d: convolution of images in NHWC, in int4, int8, fp8 and 16-bit floats, with a fused epilogue.

    acc[n, i, j, o] = Σ x[n, i·stride − padding + r·dilation, j·stride − padding + s·dilation, c] · w[o, r, s, c]

Floating output: y = relu(acc · scale + bias + residual), computed in float32 and rounded once. int32 output:    y = relu(acc +
bias + residual). int8 output:     y = saturate(relu(rint((acc + bias) · scale) + rint(residual · residual_scale))): one
product in float32 each, and rint rounds halves to even, so that the result is defined to the last bit. int4 and uint4 output:
the same, saturated to [-8, 7] or [0, 15], without a residual.

Read first: `Conv2d`; `conv2d_reference` in kronsched/workloads/conv2d_reference.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.dtypes import DTYPES, dtype_of
from kronsched.errors import ArgumentError, ArgumentTypeError, UnsupportedError, choose
from kronsched.workloads.base import TensorSpec, Workload

if TYPE_CHECKING:
    import torch
    import tvm

OUT_DTYPES: Mapping[str, tuple[str, ...]] = {
    "int8": ("int8", "int32"),
    "int4": ("int4", "int32"),
    "uint4": ("uint4", "int4", "int32"),
    "float16": ("float16",),
    "bfloat16": ("bfloat16",),
    "float8_e4m3fn": ("float16", "bfloat16"),
    "float8_e5m2": ("float16", "bfloat16"),
}
"""Input dtype to the output dtypes it may have, the default first."""
LIMITS: Mapping[str, tuple[int, int]] = {"int8": (-128, 127), "int4": (-8, 7), "uint4": (0, 15)}
"""What requantised output saturates to."""
FOUR_BIT = ("int4", "uint4")
"""Dtypes of which a byte of an int8 tensor holds two: the lower half is the channel with the even number."""
MAX_ELEMENTS = 2**31 - 1
_LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
_LARGEST_PRODUCT: Mapping[str, int] = {"int8": 2**14, "int4": 2**6, "uint4": 15 * 8}
LAYOUTS = ("NHWC", "NHWCnc")
IMAGES, CHANNEL_BYTES = 8, 32
"""A block of NHWCnc: so many images by so many bytes of channels of one pixel lie together."""
EPILOGUE = ("scale", "bias", "residual", "residual_scale")
"""Optional inputs, in the order in which they follow x and w."""


def parse_pair(text: str) -> tuple[int, int]:
    """Parse "3" into (3, 3) and "3x5" into (3, 5)."""
    match = re.fullmatch(r"\s*(\d+)\s*(?:x\s*(\d+)\s*)?", text)
    if match is None:
        raise ArgumentError(f"{text!r} is not allowed: write one number, or two such as 3x5")
    return int(match[1]), int(match[2] or match[1])


@dataclass(frozen=True)
class Conv2d(Workload):
    """Convolution in NHWC: x (n, h, w, c_in), w (c_out, kh, kw, c_in / groups), y (n, h_out, w_out, c_out).

    kernel, stride, padding (zeros on both sides), dilation: an int or a pair (along h, along w).  in_dtype: int8, float16,
    bfloat16, float8_e4m3fn, float8_e5m2, int4, or uint4 (x; then w is int4).  out_dtype: int8 or int32 for int8, 4 bits or int32
    for 4 bits, float16 or bfloat16 for fp8, else as in_dtype.  Tensors of 4 bits are given as int8, two channels a byte, the even
    one in the lower half (`kronsched.workloads.int4`); their last extent is half as many channels.
    has_scale: an input scale (c_out,) float32; by default where the output is int8 or of 4 bits.  has_bias: an input bias
    (c_out,), int32 for integer inputs, else float32.  has_residual: an input residual of y's shape and dtype; for int8 output its
    values are multiplied by residual_scale (1,) float32.  relu: negative results become 0. Sums are int32 or float32; a bias that
    takes an int32 sum out of its range wraps around. A NaN or Inf of fp8 propagates; integer results of a scale that is NaN or
    infinite are not defined.
    The product Y (m, n) = X (m, k) Wᵀ with the same epilogue is a dense `Gemm`.
    layout: of x and y: "NHWC", or "NHWCnc", (n / 8, h, w, c / b, 8, b) with 32 bytes of b channels (kronsched.workloads.blocked).
    A call is `mod(x, w, scale=…, bias=…, residual=…)`; a scale may be a number, and is 1 when left out.
    Raises ArgumentError (a ValueError) or ArgumentTypeError (a TypeError) naming the field.
    """

    family: ClassVar[str] = "conv2d"

    n: int = field(metadata={"help": "images"})
    h: int = field(
        metadata={"cli": "hw", "sets": ("h", "w"), "parse": parse_pair, "help": "height and width of x, such as 56x56"}
    )
    w: int = field(metadata={"cli": None, "help": "width of x"})
    c_in: int = field(metadata={"help": "channels of x"})
    c_out: int = field(metadata={"help": "channels of y"})
    kernel: tuple[int, int] = field(metadata={"help": "size of the kernel: 3, or 3x5", "parse": parse_pair})
    stride: tuple[int, int] = field(default=(1, 1), metadata={"help": "stride: 1, or 1x2 [default: 1]", "parse": parse_pair})
    padding: tuple[int, int] = field(default=(0, 0), metadata={"help": "rows of zeros [default: 0]", "parse": parse_pair})
    dilation: tuple[int, int] = field(default=(1, 1), metadata={"help": "dilation [default: 1]", "parse": parse_pair})
    groups: int = field(default=1, metadata={"help": "groups of channels"})
    in_dtype: str = field(default="int8", metadata={"help": "dtype of x and w"})
    out_dtype: str = field(default="", metadata={"help": "dtype of y: as x, float16 for fp8, or int32 for int8"})
    has_scale: bool | None = field(default=None, metadata={"help": "scale a channel of y (where y is int8)", "parse": bool})
    has_bias: bool = field(default=False, metadata={"help": "bias a channel of y"})
    has_residual: bool = field(default=False, metadata={"help": "add a tensor of y's shape"})
    relu: bool = field(default=False, metadata={"help": "set negative results to 0"})
    layout: str = field(default="NHWC", metadata={"help": "of x and y: NHWC, or NHWCnc in blocks of 8 images x 32 bytes"})

    def __post_init__(self) -> None:
        """Validate and normalise to ints and pairs."""
        for name in ("n", "h", "w", "c_in", "c_out", "groups"):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1))
        for name, least in (("kernel", 1), ("stride", 1), ("padding", 0), ("dilation", 1)):
            object.__setattr__(self, name, _pair(name, getattr(self, name), least))
        self._check_dtypes()
        for name in ("has_bias", "has_residual", "relu"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentTypeError(f"{name}={getattr(self, name)!r} must be True or False")
        self._check_scale()
        for name in ("c_in", "c_out"):
            if getattr(self, name) % self.groups:
                raise ArgumentError(f"{name}={getattr(self, name)} is not a multiple of groups={self.groups}")
        self._check_depth()
        self._check_layout()
        if min(self.out_hw) < 1:
            raise ArgumentError(f"kernel={self.kernel} does not fit into h={self.h}, w={self.w} with padding={self.padding}")
        largest = max(t.size for t in (*self.inputs, self.output))
        if largest > MAX_ELEMENTS:
            raise UnsupportedError(f"{self.label} needs a tensor of {largest} elements; {MAX_ELEMENTS} at most are supported")

    def _check_dtypes(self) -> None:
        dtype_of(self.in_dtype, "in_dtype", tuple(OUT_DTYPES))
        allowed = OUT_DTYPES[self.in_dtype]
        if self.out_dtype == "":
            object.__setattr__(self, "out_dtype", allowed[0])
        if self.out_dtype not in allowed:
            raise choose("out_dtype", self.out_dtype, allowed)
        self._check_four_bit()

    def _check_depth(self) -> None:
        product = _LARGEST_PRODUCT.get(self.in_dtype)
        if product is not None and self.depth * product >= 2**31:
            most = (2**31 - 1) // product
            raise UnsupportedError(
                f"c_in={self.c_in}, kernel={_show(self.kernel)} is not supported with {self.in_dtype}: "
                f"sums of {self.depth} products (more than {most}) may overflow int32"
            )

    def _check_four_bit(self) -> None:
        if self.in_dtype not in FOUR_BIT:
            return
        if self.c_in // self.groups % 2:
            raise ArgumentError(f"c_in={self.c_in} is not allowed with {self.in_dtype}: an even number (a group) is needed")
        if self.out_dtype in FOUR_BIT:
            if self.c_out % 2:
                raise ArgumentError(
                    f"c_out={self.c_out} is not allowed with out_dtype={self.out_dtype!r}: an even number is needed"
                )
            if self.has_residual:
                raise UnsupportedError(f"has_residual=True is not supported with out_dtype={self.out_dtype!r}")

    def _check_layout(self) -> None:
        if self.layout not in LAYOUTS:
            raise choose("layout", self.layout, LAYOUTS)
        if self.layout == "NHWC":
            return
        if self.in_dtype in FOUR_BIT or self.groups > 1 or self.has_residual:
            raise UnsupportedError(f"layout={self.layout!r} is not supported with 4 bits, groups or a residual")
        for name, count, dtype in (("n", 1, ""), ("c_in", self.c_in, self.in_dtype), ("c_out", self.c_out, self.out_dtype)):
            block = block_channels(dtype) if dtype else IMAGES
            if (count if dtype else self.n) % block:
                raise ArgumentError(
                    f"{name}={getattr(self, name)} is not allowed with layout NHWCnc: a multiple of {block} is needed"
                )

    def _check_scale(self) -> None:
        if self.has_scale is None:
            object.__setattr__(self, "has_scale", self.requantised)
        if not isinstance(self.has_scale, bool):
            raise ArgumentTypeError(f"has_scale={self.has_scale!r} must be True or False")
        if self.has_scale and self.out_dtype == "int32":
            raise ArgumentError("has_scale=True is not allowed with out_dtype='int32': its sums are exact")

    def to_dict(self) -> dict[str, Any]:
        """As `Workload.to_dict`; the usual layout goes without saying, so that keys are those of logs that knew no other."""
        return {name: value for name, value in super().to_dict().items() if (name, value) != ("layout", "NHWC")}

    @property
    def plain(self) -> Conv2d:
        """The same convolution with no more than the scale that rounding to an integer takes."""
        return replace(self, has_scale=self.requantised, has_bias=False, has_residual=False, relu=False)

    # -- shape --------------------------------------------------------------------------------------

    @property
    def out_hw(self) -> tuple[int, int]:
        """Height and width of y."""
        sizes = zip((self.h, self.w), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        h, w = ((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes)
        return h, w

    @property
    def pixels(self) -> int:
        """Rows of the implicit product: n · h_out · w_out."""
        return self.n * self.out_hw[0] * self.out_hw[1]

    @property
    def depth(self) -> int:
        """Terms of a sum: kh · kw · c_in / groups."""
        return self.kernel[0] * self.kernel[1] * self.c_in // self.groups

    @property
    def requantised(self) -> bool:
        """Whether y is rounded to an integer of 8 or 4 bits."""
        return self.out_dtype in LIMITS

    @property
    def sums_dtype(self) -> str:
        """int32 or float32."""
        return DTYPES[self.in_dtype].accumulate

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The tensors x and w, then those of scale, bias, residual and residual_scale that there are."""
        specs = [
            self._image("x", self.h, self.w, self.c_in, self.in_dtype),
            _stored("w", (self.c_out, *self.kernel, self.c_in // self.groups), self.in_dtype),
        ]
        if self.has_scale:
            specs.append(TensorSpec("scale", (self.c_out,), "float32"))
        if self.has_bias:
            specs.append(TensorSpec("bias", (self.c_out,), "int32" if self.sums_dtype == "int32" else "float32"))
        if self.has_residual:
            specs.append(TensorSpec("residual", self.output.shape, self.out_dtype))
            if self.out_dtype == "int8":
                specs.append(TensorSpec("residual_scale", (1,), "float32"))
        return tuple(specs)

    @property
    def output(self) -> TensorSpec:
        """The tensor y (n, h_out, w_out, c_out)."""
        return self._image("y", *self.out_hw, self.c_out, self.out_dtype)

    def _image(self, name: str, h: int, w: int, channels: int, dtype: str) -> TensorSpec:
        """The spec of x or y in its layout."""
        if self.layout == "NHWC":
            return _stored(name, (self.n, h, w, channels), dtype)
        block = block_channels(dtype)
        return TensorSpec(name, (self.n // IMAGES, h, w, channels // block, IMAGES, block), dtype)

    @property
    def flops(self) -> int:
        """Twice the pixels of y times c_out times the terms of a sum (zeros of the padding count)."""
        return 2 * self.pixels * self.c_out * self.depth

    @property
    def label(self) -> str:
        """Such as "conv2d n=8 56x56 64→64 3x3 s1 p1 int8"."""
        parts = [f"conv2d n={self.n} {self.h}x{self.w} {self.c_in}->{self.c_out} {_show(self.kernel)}"]
        parts += [f"s{_show(self.stride, 'x')} p{_show(self.padding, 'x')}"]
        parts += [f"d{_show(self.dilation, 'x')}"] * (self.dilation != (1, 1)) + [f"g{self.groups}"] * (self.groups > 1)
        parts += [self.in_dtype] + [f"to {self.out_dtype}"] * (self.out_dtype != self.in_dtype)
        default = self.requantised
        parts += ["unscaled" if default else "scale"] * (self.has_scale != default)
        parts += [self.layout] * (self.layout != "NHWC")
        parts += ["bias"] * self.has_bias + ["residual"] * self.has_residual + ["relu"] * self.relu
        return " ".join(parts)

    # -- tensors ------------------------------------------------------------------------------------

    def make_inputs(self, seed: int, device: str = "cpu") -> list[torch.Tensor]:
        """All values of int8, or normal x and w; scales that make y of order 1, of int8 some of it saturated."""
        from kronsched.workloads.conv2d_reference import make_inputs

        return make_inputs(self, seed, device)

    def flatten_args(self, args: Sequence[Any]) -> list[Any]:
        """All tensors by position, or x and w alone where scales are all that is missing: they are 1 then."""
        return self.flatten_named(args, {})

    def flatten_named(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """(x, w) and keywords scale, bias, residual, residual_scale to the flat list of `inputs`.

        A scale may be a number; scales left out are 1. Raises ArgumentError for a keyword this workload was not made for.
        """
        flat, named = list(args), dict(named)
        wanted = [t for t in self.inputs if t.name in EPILOGUE]
        if len(flat) != 2 or not wanted:
            unknown = next(iter(named), None)
            if unknown is not None:
                raise self._unknown(unknown)
            return flat
        for spec in wanted:
            value = named.pop(spec.name, None)
            if value is None and not spec.name.endswith("scale"):
                raise ArgumentError(f"{spec.name} is missing: {self.label} needs {spec.name}=…")
            if value is None or isinstance(value, int | float):
                value = filled(spec, 1.0 if value is None else value, flat[0])
            flat.append(value)
        if named:
            raise self._unknown(next(iter(named)))
        return flat

    def _unknown(self, name: str) -> ArgumentError:
        if name in EPILOGUE[:3]:
            return ArgumentError(f"{name} was given: make the workload with has_{name}=True")
        return ArgumentError(f"{name} was given: {self.label} takes no such argument")

    # -- what it computes ---------------------------------------------------------------------------

    def reference(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Y in float64 from the flat inputs, on their device; integers are exact."""
        from kronsched.workloads.conv2d_reference import conv2d_reference

        return conv2d_reference(self, *inputs)

    def baseline(self, *inputs: torch.Tensor) -> tuple[str, Callable[[], torch.Tensor]]:
        """(name, call) of what a user of torch would run: conv2d in channels-last, in float16 where torch has no kernel."""
        from kronsched.workloads.conv2d_reference import torch_conv2d

        return torch_conv2d(self, *inputs)

    def program(self) -> tvm.IRModule:
        """TensorIR: x padded, sums, epilogue."""
        import tvm
        from tvm import te

        from kronsched.workloads.conv2d_te import conv2d_stages

        placeholders, stages = conv2d_stages(self)
        func = te.create_prim_func([*placeholders, stages[-1]]).with_attr("global_symbol", "main")
        return tvm.IRModule({"main": func})


def block_channels(dtype: str) -> int:
    """Channels of a block of NHWCnc."""
    return CHANNEL_BYTES // DTYPES[dtype].itemsize


def _stored(name: str, shape: tuple[int, ...], dtype: str) -> TensorSpec:
    """The spec of a tensor; of 4 bits, two channels are a byte."""
    if dtype in FOUR_BIT:
        return TensorSpec(name, (*shape[:-1], shape[-1] // 2), "int8")
    return TensorSpec(name, shape, dtype)


def filled(spec: TensorSpec, value: float, like: Any) -> Any:
    """A constant array of the kind and device of `like`."""
    value = real(spec.name, value)
    if type(like).__module__ == "numpy":
        import numpy as np

        return np.full(spec.shape, value, DTYPES[spec.dtype].numpy())
    import torch

    return torch.full(spec.shape, value, dtype=DTYPES[spec.dtype].torch(), device=getattr(like, "device", None))


def real(name: str, value: Any) -> float:
    """A number that float32 can hold, as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(f"{name}={value!r} must be an int or float, or a floating tensor of the right shape")
    if not -_LARGEST_FLOAT32 <= value <= _LARGEST_FLOAT32:
        raise ArgumentError(f"{name} is not allowed: a finite number within ±{_LARGEST_FLOAT32:.4g} is needed")
    return float(value)


def _show(pair: tuple[int, int], same: str = "") -> str:
    if pair[0] == pair[1] and same:
        return str(pair[0])
    return f"{pair[0]}x{pair[1]}"


def _pair(name: str, value: Any, least: int) -> tuple[int, int]:
    if isinstance(value, list | tuple):
        if len(value) != 2:
            raise ArgumentError(f"{name}={value!r} is not allowed: an int or a pair of ints is needed")
        return integer(name, value[0], least), integer(name, value[1], least)
    one = integer(name, value, least)
    return one, one


def integer(name: str, value: Any, least: int) -> int:
    """An int of any kind, of a least value."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(f"{name}={value!r} must be an int ≥ {least}")
    number = int(value.__index__())
    if number < least:
        raise ArgumentError(f"{name}={number} is not allowed: an int ≥ {least} is needed")
    return number
