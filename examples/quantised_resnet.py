"""Post-training int8 quantisation of a ResNet: calibrate a float model, run its convolutions as `kronsched.nn.QuantConv2d`.

Weights are random (He), images too; batch norms are folded into the convolutions. The last feature map is compared with that of
the float model. On a GPU it is ResNet-50 on 224 × 224 images, and both are timed; on a CPU a small model of the same blocks.
"""

import time

import torch
from torch import nn

from kronsched.nn import QuantConv2d
from kronsched.nn.quant_conv2d import quantise


class Bottleneck(nn.Module):
    """1×1, 3×3 (with the stride), 1×1, and a 1×1 beside them where the shape changes."""

    def __init__(self, c_in, width, stride):
        super().__init__()
        self.reduce = nn.Conv2d(c_in, width, 1)
        self.middle = nn.Conv2d(width, width, 3, stride, 1)
        self.expand = nn.Conv2d(width, 4 * width, 1)
        self.beside = nn.Conv2d(c_in, 4 * width, 1, stride) if stride > 1 or c_in != 4 * width else None

    def forward(self, x):
        y = self.expand(self.middle(self.reduce(x).relu()).relu())
        return (y + (x if self.beside is None else self.beside(x))).relu()


def resnet(depths, width):
    """(stem, blocks): ResNet-50 is ([3, 4, 6, 3], 64)."""
    blocks, c_in = [], width
    for stage, depth in enumerate(depths):
        for i in range(depth):
            blocks.append(Bottleneck(c_in, width << stage, 2 if i == 0 and stage > 0 else 1))
            c_in = 4 * (width << stage)
    stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    for module in [*stem.modules(), *(m for b in blocks for m in b.modules())]:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.normal_(module.bias, std=0.05)
    for block in blocks:  # as batch norm would keep sums of a block and its input from growing
        nn.init.kaiming_normal_(block.expand.weight, a=2.0)
    return stem, nn.Sequential(*blocks)


class Range:
    """An observer: the largest absolute value of a tensor, as the scale of an int8."""

    def __init__(self):
        self.largest = 0.0

    def __call__(self, x):
        self.largest = max(self.largest, float(x.abs().max()))
        return x

    @property
    def scale(self):
        return self.largest / 127


class QuantBottleneck(nn.Module):
    """A block on int8 images in NHWC; the sum is made in the epilogue of the last convolution."""

    def __init__(self, block, calibration):
        super().__init__()
        outside, first, second, beside, out = (Range() for _ in range(5))
        for x in calibration:
            outside(x)
            second(block.middle(first(block.reduce(x).relu())).relu())
            beside(x if block.beside is None else block.beside(x))
            out(block(x))
        self.out_scale = out.scale
        device = block.reduce.weight.device
        self.register_buffer("rest_scale", torch.tensor([beside.scale / out.scale], device=device))
        self.reduce = QuantConv2d.from_float(block.reduce, outside.scale, first.scale, relu=True)
        self.middle = QuantConv2d.from_float(block.middle, first.scale, second.scale, relu=True)
        self.expand = QuantConv2d.from_float(block.expand, second.scale, out.scale, relu=True)
        self.beside = None if block.beside is None else QuantConv2d.from_float(block.beside, outside.scale, beside.scale)

    def forward(self, x):
        rest = x if self.beside is None else self.beside(x)
        return self.expand(self.middle(self.reduce(x)), rest, self.rest_scale)


def timed(call, device):
    """Milliseconds of a call, the best of five."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


@torch.no_grad()
def main():
    """Calibrate, quantise, compare."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (stem, blocks), size, batch = (resnet([3, 4, 6, 3], 64), 224, 32) if device == "cuda" else (resnet([1, 1], 8), 32, 2)
    stem, blocks = stem.to(device).eval(), blocks.to(device).eval()
    images = [torch.randn(batch, 3, size, size, device=device) for _ in range(3)]

    features = [stem(x) for x in images]
    in_scale = max(float(f.abs().max()) for f in features[:2]) / 127
    quantised, seen = [], features[:2]  # two batches to calibrate with, the third to judge by
    for block in blocks:
        quantised.append(QuantBottleneck(block, seen))
        seen = [block(x) for x in seen]
    model = nn.Sequential(*quantised)

    wanted = blocks(features[2])
    x = quantise(features[2], in_scale)
    got = model(x).permute(0, 3, 1, 2).float() * quantised[-1].out_scale
    error = float((got - wanted).norm() / wanted.norm())
    alike = float(nn.functional.cosine_similarity(got.flatten(1), wanted.flatten(1)).min())
    print(f"{len(blocks)} blocks on {device}: relative error {error:.3f}, cosine similarity {alike:.4f}")
    assert alike > 0.98
    print("the int8 model is right")
    half, image = blocks.half().to(memory_format=torch.channels_last), features[2].half()
    image = image.contiguous(memory_format=torch.channels_last)
    if device == "cuda":
        torch.backends.cudnn.benchmark = True
        print(f"float16 {timed(lambda: half(image), device):.2f} ms, int8 {timed(lambda: model(x), device):.2f} ms")


if __name__ == "__main__":
    main()
