"""A Monarch layer: replace a dense layer by the nearest MonarchLinear, then train it. Runs on a GPU or a CPU."""

import torch

from kronsched.nn import MonarchLinear


def main() -> None:
    """Approximate a dense layer, train the approximation on its outputs, compare parameters and errors."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dense = torch.nn.Linear(64, 64, device=device)
    layer = MonarchLinear.from_dense(dense.weight, blocks=8, bias=dense.bias)  # two factors of 8 blocks, the best there are

    x = torch.randn(128, 64, device=device)  # any batch: a few kernels serve them all
    target = dense(x).detach()
    start = torch.nn.functional.mse_loss(layer(x), target).item()
    optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3)
    for _ in range(50):
        loss = torch.nn.functional.mse_loss(layer(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.dense_weight(), layer.bias), rtol=1e-4, atol=1e-4)
    count = sum(p.numel() for p in layer.parameters()), sum(p.numel() for p in dense.parameters())
    print(f"{count[0]} parameters instead of {count[1]}; mean squared error {start:.4f} before training, {loss.item():.4f} after")
    print("right: the layer is the dense one that its factors stand for")


if __name__ == "__main__":
    main()
