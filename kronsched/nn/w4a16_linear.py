"""`W4A16Linear`: a linear layer with 4-bit weights, for inference.

Read first: `W4A16Linear`. Kernels for every number of rows are in w4a16_kernels.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kronsched.errors import ArgumentError, ArgumentTypeError, choose
from kronsched.nn import w4a16_kernels
from kronsched.nn.kept_dtypes import KeepsDtypes
from kronsched.quant.layout import Layout
from kronsched.quant.packed_weight import PackedWeight
from kronsched.quant.quantize import round_to_nearest

DTYPES = (torch.float16, torch.bfloat16)


class W4A16Linear(KeepsDtypes):
    """y = x W + bias with W from a `PackedWeight`: `nn.Linear` whose weight takes 4 bits and a scale a group of inputs.

    weight: packed weights (k, n): in_features = k, out_features = n.  bias: (n,) or None.  dtype: float16 or bfloat16, of x, y,
    scales and bias; that of the scales by default. x: (…, in_features), any number of rows; y: (…, out_features). Under
    torch.autocast x is cast to the autocast dtype. Weights are buffers, not parameters: they are not trained; the gradient of x
    is computed from dequantised weights (once differentiable). torch.compile sees one operator for every number of rows.

    Kernels are built when a bucket of rows is first needed (`prepare` builds ahead) and shared by layers of the same shape: m
    tuned exactly, else powers of two, with the config of the nearest tuned m; for many rows dequantised weights and torch's
    matmul, from where a record of this GPU says (see w4a16_library.py). `kronsched.nn.w4a16_kernels.clear` forgets them.
    State dicts go between layers of the same shapes and kind of zeros. `.to(dtype)` also changes the dtype of x, which has to
    be one of the two for a call; words and float zeros (float32) stay as they are.
    Raises ArgumentError or ArgumentTypeError naming the argument.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None
    order: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: PackedWeight, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> None:
        """Hold the tensors in the dtypes that kernels read; see the class."""
        super().__init__()
        if not isinstance(weight, PackedWeight):
            raise ArgumentTypeError(f"weight is of type {type(weight).__name__}: a kronsched.quant.PackedWeight is needed")
        if dtype is None:
            dtype = weight.dtype if weight.dtype in DTYPES else torch.float16
        if dtype not in DTYPES:
            raise choose("dtype", dtype, DTYPES)
        if bias is not None and tuple(bias.shape) != (weight.n,):
            raise ArgumentError(f"bias has shape {tuple(bias.shape)}, ({weight.n},) is needed")
        self.in_features, self.out_features = weight.k, weight.n
        self.group_size, self.zero_point = weight.group_size, weight.zero_point
        order = _order(weight)
        # Where sorted rows have no padding between groups, x is gathered before the product; else by the kernel.
        self.act_order = weight.act_order and order is None
        words, scales, *rest = weight.tensors(str(dtype).removeprefix("torch."), self.zero_point, self.act_order)
        self.register_buffer("words", words)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", rest.pop(0) if self.zero_point != "symmetric" else None)
        self.register_buffer("perm", rest.pop(0) if self.act_order else None)
        self.register_buffer("order", order)
        self.register_buffer("bias", None if bias is None else bias.detach().to(device=weight.device, dtype=dtype, copy=True))

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, group_size: int = 128, zero_point: str = "symmetric", dtype: torch.dtype | None = None
    ) -> W4A16Linear:
        """The layer with the weights of an nn.Linear rounded to nearest; see `kronsched.quant.round_to_nearest`.

        dtype: of x; that of the weights by default, which must then be float16 or bfloat16.
        """
        if not isinstance(linear, nn.Linear):
            raise ArgumentTypeError(f"linear is of type {type(linear).__name__}: a torch.nn.Linear is needed")
        dtype = cls.dtype_for(linear.weight) if dtype is None else dtype
        if dtype not in DTYPES:
            raise choose("dtype", dtype, DTYPES)
        weight = round_to_nearest(linear.weight.detach().to(dtype), group_size, zero_point)
        return cls(weight, linear.bias, dtype)

    @staticmethod
    def dtype_for(weight: Tensor) -> torch.dtype:
        """The dtype of x for a dense weight; ArgumentTypeError when it has no kernels."""
        if weight.dtype not in DTYPES:
            raise ArgumentTypeError(
                f"weight has dtype {str(weight.dtype)[6:]}: pass dtype=torch.float16 or torch.bfloat16, which x then has to have"
            )
        return weight.dtype

    @property
    def dtype(self) -> torch.dtype:
        """Of x and y."""
        return self.scales.dtype

    def _kept(self) -> tuple[str, ...]:
        return ("words", "perm", "order", *(("zeros",) if self.zero_point == "float" else ()))

    @property
    def _kind(self) -> tuple[int, int, str, bool]:
        return self.out_features, self.group_size, self.zero_point, self.act_order

    def packed(self) -> PackedWeight:
        """The weights as a `PackedWeight`."""
        layout, perm = Layout(self.out_features, self.in_features, self.group_size, self.act_order), self.perm
        if self.order is not None:
            layout = Layout(self.out_features, self.in_features, self.group_size, True)
            perm = torch.full((layout.k_packed,), -1, dtype=torch.int32, device=self.words.device)
            perm[: self.in_features] = self.order.to(torch.int32)
        zeros = self.zeros.to(torch.uint8) if self.zeros is not None and self.zero_point == "asymmetric" else self.zeros
        return PackedWeight(layout, self.words, self.scales, zeros, perm)

    def dense_weight(self) -> Tensor:
        """The dequantised weight (out_features, in_features) of the equivalent nn.Linear. Large."""
        return self.packed().unpack().T.to(self.dtype)

    def prepare(self, *rows: int) -> None:
        """Build and load the kernels for these numbers of rows, such as before a CUDA graph is captured."""
        kernels = w4a16_kernels.kernels_of(self.in_features, self.dtype, self.words.device, *self._kind)
        for m in rows:
            if isinstance(m, bool) or not isinstance(m, int) or m < 1:
                raise ArgumentError(f"rows={m!r} is not allowed: ints ≥ 1 are needed")
            kernels.prepare(m)

    def forward(self, x: Tensor) -> Tensor:
        """Y (…, out_features) of x (…, in_features)."""
        dtype, kind = self.scales.dtype, x.device.type
        if x.dtype != dtype or dtype not in DTYPES or torch.is_autocast_enabled(kind):
            x, dtype = self._cast(x)
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ArgumentError(f"x has shape {tuple(x.shape)}, (…, {self.in_features}) is needed")
        rows = x.reshape(-1, self.in_features)
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        scales, zeros = self.scales.to(dtype), self.zeros
        if zeros is not None:
            zeros = zeros.to(torch.float32 if self.zero_point == "float" else dtype)
        weights = [t for t in (self.words, scales, zeros, self.perm) if t is not None]
        y = w4a16_kernels.product(rows, weights, *self._kind)
        if self.bias is not None:
            y = y + self.bias.to(dtype)
        return y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Sizes and kind, for print."""
        order = ", act_order=True" if self.perm is not None or self.order is not None else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"group_size={self.group_size}, zero_point={self.zero_point!r}{order}, dtype={self.dtype}"
        )

    def _cast(self, x: Tensor) -> tuple[Tensor, torch.dtype]:
        """(x, dtype to compute in): that of autocast where it is on, else x has to have the layer's."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
            if dtype in DTYPES:
                return x.to(dtype), dtype
        if self.dtype not in DTYPES:
            given = str(self.dtype)[6:]
            raise ArgumentTypeError(f"this layer was cast to {given}, float16 or bfloat16 is needed: call to(torch.float16)")
        if x.dtype != self.dtype:
            raise ArgumentTypeError(f"x has dtype {str(x.dtype)[6:]}, {str(self.dtype)[6:]} is needed, as this layer has")
        return x, self.dtype


def _order(weight: PackedWeight) -> Tensor | None:
    try:
        return weight.order
    except ArgumentError:  # a short group between others
        return None
