"""Quantised weights: the packed layout kernels read, and the way into it."""

from kronsched.quant.packed_weight import PackedWeight, pack

__all__ = ["PackedWeight", "pack"]
