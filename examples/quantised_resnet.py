"""Post-training int8 quantisation of a ResNet: calibrate a float model, run its convolutions as `kronsched.nn.QuantConv2d`.

Weights are random (He), images noise with the spectrum of photographs; batch norms are folded into the convolutions, scales come
from torch.ao observers, stem and head stay in floats. Features and classes are compared with those of the float model. On a GPU
it is ResNet-50 on 224 × 224 images, and both are timed from image to logits; on a CPU a small model of the same blocks.
"""

import time

import torch
from torch import nn
from torch.ao.quantization import MinMaxObserver

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


class ResNet(nn.Module):
    """ResNet-50 is ResNet([3, 4, 6, 3], 64)."""

    def __init__(self, depths, width, classes=1000):
        super().__init__()
        blocks, c_in = [], width
        for stage, depth in enumerate(depths):
            for i in range(depth):
                blocks.append(Bottleneck(c_in, width << stage, 2 if i == 0 and stage > 0 else 1))
                c_in = 4 * (width << stage)
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c_in, classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.normal_(module.bias, std=0.05)
        for block in blocks:  # as batch norm would keep sums of a block and its input from growing
            nn.init.kaiming_normal_(block.expand.weight, a=2.0)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


def observer():
    """torch.ao's observer of the largest absolute value, which gives the scale of an int8."""
    return MinMaxObserver(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric, quant_min=-127, quant_max=127)


def scale_of(seen):
    """The scale that an observer has found."""
    return float(seen.calculate_qparams()[0])


class QuantBottleneck(nn.Module):
    """A block on int8 images in NHWC; the sum is made in the epilogue of the last convolution."""

    def __init__(self, block, calibration):
        super().__init__()
        outside, first, second, beside, out = (observer().to(calibration[0].device) for _ in range(5))
        for x in calibration:
            second(block.middle(first(block.reduce(outside(x)).relu())).relu())
            beside(x if block.beside is None else block.beside(x))
            out(block(x))
        x_scale, first, second, beside, self.out_scale = (scale_of(o) for o in (outside, first, second, beside, out))
        self.rest_scale = torch.tensor([beside / self.out_scale], device=calibration[0].device)
        self.reduce = QuantConv2d.from_float(block.reduce, x_scale, first, relu=True)
        self.middle = QuantConv2d.from_float(block.middle, first, second, relu=True)
        self.expand = QuantConv2d.from_float(block.expand, second, self.out_scale, relu=True)
        self.beside = None if block.beside is None else QuantConv2d.from_float(block.beside, x_scale, beside)

    def forward(self, x):
        rest = x if self.beside is None else self.beside(x)
        return self.expand(self.middle(self.reduce(x)), rest, self.rest_scale)


class QuantResNet(nn.Module):
    """Image to logits: stem and head of the float model in their dtype, int8 blocks between them."""

    def __init__(self, model, images):
        super().__init__()
        self.stem, self.head, self.blocks = model.stem, model.head, nn.Sequential()
        seen = [model.stem(x) for x in images]
        inside = observer().to(images[0].device)
        for x in seen:
            inside(x)
        self.in_scale = scale_of(inside)
        for block in model.blocks:
            self.blocks.append(QuantBottleneck(block, seen))
            seen = [block(x) for x in seen]
        self.out_scale = self.blocks[-1].out_scale

    def features(self, x):
        """The last feature map, NHWC in int8."""
        return self.blocks(quantise(self.stem(x), self.in_scale))

    def forward(self, x):
        y = self.features(x).permute(0, 3, 1, 2)
        return self.head(y.to(x.dtype) * self.out_scale)


def photographs(n, size, device):
    """Noise with the spectrum of photographs: amplitudes fall with the frequency."""
    across = torch.fft.rfftfreq(size, device=device)
    down = torch.fft.fftfreq(size, device=device)
    frequency = (down[:, None] ** 2 + across**2).sqrt().clamp_min(1 / size)
    noise = torch.fft.irfft2(torch.fft.rfft2(torch.randn(n, 3, size, size, device=device)) / frequency, s=(size, size))
    return (noise - noise.mean()) / noise.std()


def milliseconds(model, x):
    """Of a call, the best of 20; on a GPU of the replay of a CUDA graph."""
    if x.is_cuda:
        for _ in range(3):
            model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        graph.replay() if x.is_cuda else model(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


@torch.no_grad()
def main():
    """Calibrate, quantise, compare, and on a GPU time both."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (depths, width, size, batch) = ([3, 4, 6, 3], 64, 224, 32) if device == "cuda" else ([1, 1], 8, 32, 4)
    model = ResNet(depths, width).to(device).eval()
    images = [photographs(batch, size, device) for _ in range(3)]
    quantised = QuantResNet(model, images[:2])  # two batches to calibrate with, the third to judge by

    wanted, x = model.blocks(model.stem(images[2])), images[2]
    got = quantised.features(x).permute(0, 3, 1, 2).float() * quantised.out_scale
    error = float((got - wanted).norm() / wanted.norm())
    alike = float(nn.functional.cosine_similarity(got.flatten(1), wanted.flatten(1)).min())
    logits, ours = model(x), quantised(x)
    same = int((logits.argmax(1) == ours.argmax(1)).sum())
    print(f"{len(model.blocks)} blocks on {device}: features have a relative error of {error:.3f}, cosine similarity {alike:.4f}")
    print(f"{same} of {batch} images keep their class, logits are {float((ours - logits).norm() / logits.norm()):.3f} apart")
    assert alike > 0.98
    print("the int8 model is right")
    if device == "cuda":
        torch.backends.cudnn.benchmark = True
        half = model.half().to(memory_format=torch.channels_last)  # stem and head of the int8 model with it
        x = x.half().contiguous(memory_format=torch.channels_last)
        times = f"float16 {milliseconds(half, x):.2f} ms, int8 blocks {milliseconds(quantised, x):.2f} ms"
        print(f"image to logits, {batch} images: {times}")


if __name__ == "__main__":
    main()
