"""Conv2d on Hopper's warpgroup tensor cores whose taps share windows of x in shared memory: a TIRx tile program.

For layers with few channels, where bringing x once for each tap takes longer than the products: 3 × 3 of 64 channels.

Read first: conv2d_window_plan.py (sizes and constraints), conv2d_window_kernel.py (the program), conv2d_window_store.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from kronsched.errors import InvalidConfig
from kronsched.schedules.base import Schedule, Scheduled
from kronsched.schedules.conv2d_fold import folded_launches
from kronsched.schedules.conv2d_window_estimate import estimated_us, window_features
from kronsched.schedules.conv2d_window_kernel import window_program
from kronsched.schedules.conv2d_window_plan import plan_window, why_not
from kronsched.space import Config, SearchSpace, load_knobs
from kronsched.workloads.base import Workload
from kronsched.workloads.conv2d import Conv2d

if TYPE_CHECKING:
    from kronsched.hardware import Device


class Conv2dCudaWindow(Schedule):
    """int8 to int8, fp8, 16-bit floats on sm_90a: one group, no stride, several taps, whole 32 bytes of channels."""

    name: ClassVar[str] = "conv2d_cuda_window"
    family: ClassVar[str] = "conv2d"
    device_kind: ClassVar[str] = "cuda"
    untuned_share: ClassVar[float] = 0.55

    def supports(self, workload: Workload, device: Device) -> str | None:
        """None for sm_90a, several taps without a stride, and weights that fit in shared memory."""
        assert isinstance(workload, Conv2d)
        return why_not(workload, device)

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """Knobs of search_spaces/conv2d_cuda_window.toml, less what means nothing at this shape."""
        assert isinstance(workload, Conv2d)

        def check(config: Config) -> str | None:
            try:
                plan_window(workload, config, device)
            except InvalidConfig as e:
                return str(e)
            return None

        return SearchSpace(self.name, load_knobs(self.name), check)

    def default_config(self, workload: Workload, device: Device) -> Config:
        """The tile with the least estimated time, of two equal ones the one with more windows in flight."""
        assert isinstance(workload, Conv2d)
        configs = (c.config for c in self.space(workload, device))
        best = min(configs, key=lambda c: _merit(workload, c, device), default=None)
        if best is None:
            raise InvalidConfig(f"no config of {self.name} is valid for {workload.label} on {device.name}")
        return best

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """One launch, or two where channels are folded first."""
        assert isinstance(workload, Conv2d)
        plan = plan_window(workload, config, device)
        return folded_launches(plan.fold, window_program(plan, "conv2d"))

    def expected_us(self, workload: Workload, config: Config, device: Device) -> float | None:
        """By `estimated_us`."""
        assert isinstance(workload, Conv2d)
        return estimated_us(plan_window(workload, config, device), device)

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Waves, occupancy, bytes through each memory level, predicted and roofline time."""
        assert isinstance(workload, Conv2d)
        plan = plan_window(workload, config, device)
        return {**window_features(plan, device), "model_us": estimated_us(plan, device)}


def _merit(conv: Conv2d, config: Config, device: Device) -> tuple[float, ...]:
    """Smaller is better."""
    return (estimated_us(plan_window(conv, config, device), device), -float(config["stages"]))
