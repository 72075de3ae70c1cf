"""Writers of 4-bit checkpoints for tests, by the documented order of each format; the opposite of kronsched/quant/formats*.py.

Each returns the tensors of one layer and the weights (k, n) in float64 that they stand for. Values are added up, not shifted and
masked as the readers do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def words(values: Tensor, dim: int, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """Eight values along `dim` (padded with zeros) in an int32 word: value order[i] at bit 4 i."""
    values = values.long().movedim(dim, -1)
    values = torch.nn.functional.pad(values, (0, -values.shape[-1] % 8)).unflatten(-1, (-1, 8))
    total = sum(values[..., place] * 16**i for i, place in enumerate(order))
    assert isinstance(total, Tensor)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32).movedim(-1, dim).contiguous()


def layer(k: int, n: int, group: int, seed: int = 0, zeros: str = "asymmetric") -> dict[str, Any]:
    """Normal weights (k, n) as q, scales, zeros and rows (the group of each row)."""
    gen = torch.Generator().manual_seed(seed)
    groups = 1 if group == -1 else -(-k // group)
    rows = torch.zeros(k, dtype=torch.long) if group == -1 else torch.arange(k) // group
    scales = (0.5 + torch.rand(groups, n, generator=gen)).half()
    if zeros == "asymmetric":
        z = torch.randint(4, 12, (groups, n), generator=gen)
    elif zeros == "float":
        z = 4 + 8 * torch.rand(groups, n, generator=gen)
    else:
        z = torch.full((groups, n), 8)
    q = (2.5 * torch.randn(k, n, generator=gen) + z[rows]).round().clamp(0, 15).to(torch.uint8)
    return {"q": q, "scales": scales, "zeros": z, "rows": rows}


def dense(c: dict[str, Any]) -> Tensor:
    return (c["q"].double() - c["zeros"].double()[c["rows"]]) * c["scales"].double()[c["rows"]]


def gptq(c: dict[str, Any], version: int, prefix: str = "a.q_proj.", g_idx: bool = True) -> dict[str, Tensor]:
    out = {
        "qweight": words(c["q"], 0),
        "qzeros": words(c["zeros"] - (1 if version == 1 else 0), 1),
        "scales": c["scales"],
    }
    if g_idx:
        out["g_idx"] = c["rows"].to(torch.int32)
    return {prefix + name: tensor for name, tensor in out.items()}


def awq(c: dict[str, Any], prefix: str = "a.q_proj.") -> dict[str, Tensor]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    out = {"qweight": words(c["q"], 1, order), "qzeros": words(c["zeros"], 1, order), "scales": c["scales"]}
    return {prefix + name: tensor for name, tensor in out.items()}


def compressed(c: dict[str, Any], symmetric: bool = False, act_order: bool = False) -> dict[str, Tensor]:
    k, n = c["q"].shape
    out = {
        "weight_packed": words(c["q"].T, 1),
        "weight_scale": c["scales"].T.contiguous(),
        "weight_shape": torch.tensor([n, k]),
    }
    if not symmetric:
        out["weight_zero_point"] = words(c["zeros"].T, 0)
    if act_order:
        out["weight_g_idx"] = c["rows"].to(torch.int32)
    return {"a.q_proj." + name: tensor for name, tensor in out.items()}


def hqq(c: dict[str, Any], encoded: bool) -> dict[str, Any]:
    k, n = c["q"].shape
    groups = c["scales"].shape[0]
    grouped = c["q"].T.reshape(n * groups, -1).contiguous()
    half = grouped.shape[0] // 2
    out: dict[str, Any] = {
        "W_q": grouped[:half] * 16 + grouped[half:],
        "scale": c["scales"].T.reshape(-1, 1),
        "zero": c["zeros"].T.reshape(-1, 1).float(),
    }
    settings: dict[str, Any] = {"shape": (n, k), "nbits": 4, "axis": 1, "group_size": k // groups, "packing": "4bit_u8"}
    settings |= {"quant_scale": False, "quant_zero": False, "view_as_float": False}
    for name, value in settings.items():
        out[name] = value
        if encoded:
            chars = [ord(letter) for letter in value] if isinstance(value, str) else value
            out[name] = torch.tensor(chars, dtype=torch.uint8 if isinstance(value, str | bool) else torch.int32)
    return {"a.q_proj." + name: value for name, value in out.items()}
