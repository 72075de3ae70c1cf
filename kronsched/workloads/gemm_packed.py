"""The arguments of a call of a Gemm with 4-bit weights: x and a `PackedWeight` to flat tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kronsched.dtypes import DTYPES
from kronsched.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from kronsched.quant.packed_weight import PackedWeight
    from kronsched.workloads.gemm import Gemm


def packed_args(w: Gemm, x: Any, pw: PackedWeight) -> list[Any]:
    """X and the packed tensors, as numpy views when x is a numpy array."""
    for name in ("k", "n"):
        if getattr(pw, name) != getattr(w, name):
            raise ArgumentError(f"pw has {name}={getattr(pw, name)}, this module was made for {name}={getattr(w, name)}")
    if pw.layout.rows_per_group != w.layout.rows_per_group:
        raise ArgumentError(f"pw has group_size={pw.group_size}, this module was made for group_size={w.group_size}")
    tensors = pw.tensors(w.a_dtype, w.zero_point, w.act_order)
    if not w.act_order and pw.order is not None:
        x = _gathered(x, pw.order)
    if type(x).__module__ == "numpy":
        return [x, *(_as_numpy(t) for t in tensors)]
    return [x, *tensors]


def _gathered(x: Any, order: torch.Tensor) -> Any:
    """Columns of x (torch or numpy) in another order; x itself when it is not what a call takes, for the call to say so."""
    if getattr(x, "ndim", 0) != 2 or x.shape[1] != len(order):
        return x
    if type(x).__module__ == "numpy":
        return x[:, order.numpy()] if order.device.type == "cpu" else x
    return x.index_select(1, order) if x.device == order.device else x


def _as_numpy(tensor: torch.Tensor) -> Any:
    """A numpy view of a CPU tensor (bfloat16 through ml_dtypes); a CUDA tensor stays what it is, to be refused by name."""
    if tensor.device.type != "cpu":
        return tensor
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "bfloat16":
        import torch

        return tensor.view(torch.int16).numpy().view(DTYPES[name].numpy())
    return tensor.numpy()
