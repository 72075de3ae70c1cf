"""From a shape to a kernel: tune a small Kron-Matmul on whatever device there is, load the best, run it, compare with torch."""

import torch

import kronsched


def main() -> None:
    """Tune with few trials, load, run, check."""
    workload = kronsched.KronMatmul(m=64, factors=[(8, 8)] * 3, dtype="float32")

    # Measures up to 8 candidates. The log goes to your data directory; run again and it goes on from there.
    result = kronsched.tune(workload, trials=8)
    if result.best is None:
        raise SystemExit(f"no candidate was ok: {result.failures}")
    print(f"{workload.label} on {result.device.name}: {result.best.median_us:.1f} µs, log {result.log}")

    # Any later process loads the best record without tuning.
    mod = kronsched.load(workload)
    x = torch.randn(64, 8**3, device=mod.device)
    factors = [torch.randn(8, 8, device=mod.device) for _ in range(3)]
    y = mod(x, *factors)

    kronecker = torch.kron(torch.kron(factors[0], factors[1]), factors[2])  # 512×512: only a small shape can afford to form it
    torch.testing.assert_close(y, x @ kronecker, rtol=1e-4, atol=1e-3)
    print(f"right; expected {mod.expected_us} µs a call; {len(mod.source.splitlines())} lines of source")


if __name__ == "__main__":  # worker processes import this file
    main()
