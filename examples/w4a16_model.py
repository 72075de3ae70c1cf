"""A model with 4-bit weights: round its linear layers, run any number of rows, see who multiplies. Runs on a GPU or a CPU."""

import copy

import torch
from torch import nn

from kronsched.nn import DynamicW4A16, W4A16Linear
from kronsched.quant import quantize_


class FeedForward(nn.Module):
    """The feed-forward part of a Llama block."""

    def __init__(self, size: int, inner: int) -> None:
        """Three linear layers without bias."""
        super().__init__()
        self.gate, self.up = nn.Linear(size, inner, bias=False), nn.Linear(size, inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape as x."""
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@torch.no_grad()
def main() -> None:
    """Quantise, compare with the dequantised model, ask the dispatch."""
    torch.manual_seed(0)
    device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.bfloat16)
    dense = FeedForward(256, 512).to(device, dtype)
    model = quantize_(copy.deepcopy(dense), group_size=64)  # weights=kronsched.quant.load(folder) takes a checkpoint's instead
    for name, layer in model.named_modules():
        if isinstance(layer, W4A16Linear):
            dense.get_submodule(name).weight.data.copy_(layer.dense_weight())

    for rows in (1, 5, 70):  # one module for any number of rows: a few kernels serve them all
        x = torch.randn(rows, 256, device=device, dtype=dtype)
        want = dense(x)
        torch.testing.assert_close(model(x), want, rtol=0, atol=0.02 * float(want.abs().max()))

    packed = model.up.packed()
    product = DynamicW4A16.of(packed, str(dtype).removeprefix("torch."))  # the same kernels without the layer
    print("kernel calls (first row, rows of the kernel) for 5 rows:", product.plan(5), "for 70:", product.plan(70))
    torch.testing.assert_close(product(x, packed), model.up(x))
    found = product.compare_with_library(16, save=False)  # save=True keeps the answer for later processes
    print("16 rows, µs by our kernel and by the library with dequantising:", *(f"{us:.1f}" for us in found.times[16]))
    print("right: the model is the dense one that its 4-bit weights stand for")


if __name__ == "__main__":
    main()
