"""The device description every other part reads: limits, bandwidth, peak rates. Frozen data, no queries here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tvm


@dataclass(frozen=True)
class Device:
    """One GPU model or one CPU.

    kind: "cuda" or "cpu".  name: "NVIDIA H200" or the CPU's model name.  arch: "sm_90a", or the LLVM mcpu name.
    units: SMs or CPU cores.  bandwidth_gbs: measured copy bandwidth, bytes read plus written, 1e9 bytes/s.
    peak_gflops: measured or data-sheet rate by dtype, 1e9 flop/s.
    present: whether this machine has it (False for a preset: nothing can be measured).
    """

    kind: str
    name: str
    arch: str
    units: int
    bandwidth_gbs: float
    peak_gflops: Mapping[str, float]
    shared_per_block: int = 0
    shared_per_sm: int = 0
    registers_per_sm: int = 65536
    max_threads_per_block: int = 1024
    max_threads_per_sm: int = 2048
    warp_size: int = 32
    l2_bytes: int = 0
    vector_bytes: int = 16
    driver: str | None = None
    index: int = 0
    present: bool = True
    ceilings_from: str = "preset"
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def torch_device(self) -> str:
        """The torch device string, "cuda:0" or "cpu"."""
        return f"cuda:{self.index}" if self.kind == "cuda" else "cpu"

    def tvm_target(self, without: Sequence[str] = ()) -> tvm.target.Target:
        """The TVM target with this device's true limits (built-in tags understate shared memory).

        without: features of an x86 CPU, by LLVM's names, that its code is not to use.
        """
        import tvm

        if self.kind == "cpu":
            removed = {"mattr": [f"-{name}" for name in without]} if without and self.arch.startswith("x86-64") else {}
            return tvm.target.Target({"kind": "llvm", "mcpu": self.arch, "num-cores": self.units, **removed})
        return tvm.target.Target(
            {
                "kind": "cuda",
                "arch": self.arch,
                "max_threads_per_block": self.max_threads_per_block,
                "max_shared_memory_per_block": self.shared_per_block,
                "thread_warp_size": self.warp_size,
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """What a tuning record keeps of the device."""
        return {
            "kind": self.kind,
            "name": self.name,
            "arch": self.arch,
            "units": self.units,
            "shared_per_block": self.shared_per_block,
            "vector_bytes": self.vector_bytes,
            "driver": self.driver,
        }
