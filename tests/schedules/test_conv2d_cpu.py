"""conv2d_cpu: channels that are no multiple of a vector are padded in registers, and y is not."""

from __future__ import annotations

import torch

import kronsched
from kronsched import Conv2d, registry
from kronsched.hardware import resolve_target

SCHEDULE, CPU = registry.schedule("conv2d_cpu"), resolve_target("cpu")


def channels(conv: Conv2d) -> list[int]:
    return sorted({int(c.config["channels"]) for c in SCHEDULE.space(conv, CPU).restrict({"parallel": False})})


def test_odd_channels_are_vectors() -> None:
    assert channels(Conv2d(1, 4, 4, 3, 33, 3)) == [1, 8, 16, 32] and channels(Conv2d(1, 4, 4, 3, 3, 3)) == [1, 8]
    assert channels(Conv2d(1, 4, 4, 9, 9, 3, groups=9)) == [1]
    conv = Conv2d(1, 3, 5, 3, 17, 3, has_bias=True)  # type: ignore[arg-type]
    assert SCHEDULE.default_config(conv, CPU)["channels"] == 16
    inputs = conv.make_inputs(0)
    around = torch.full((conv.output.size + 64,), 99, dtype=torch.int8)
    out = around[32:-32].view(conv.output.shape)
    kronsched.load(conv, device="cpu")(*inputs, out=out)
    assert torch.equal(out.double(), conv.reference(*inputs))
    assert bool((around[:32] == 99).all()) and bool((around[-32:] == 99).all())
