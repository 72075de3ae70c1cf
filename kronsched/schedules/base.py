"""The schedule interface: HOW a workload is computed on one kind of device.

Read first: `Schedule.apply` (config -> IRModule) and `Scheduled` (what it returns).
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from kronsched.space import Config, SearchSpace
from kronsched.workloads.base import TensorSpec, Workload

if TYPE_CHECKING:
    import tvm

    from kronsched.hardware import Device


@dataclass(frozen=True)
class Launch:
    """One call of a function of the module. `args` are tensor names: workload inputs, its output, or scratch.

    On CUDA each function lowers to exactly one kernel; on CPU to one packed function.

    A launch that uses nothing but inputs and scratch of its own is done once where these inputs are bound (`TunedModule.bind`):
    launches behind it read what it leaves in its scratch, and do not write there.

    overlap: CUDA's programmatic dependent launch: the kernel may start while the one before it on the stream, whichever it is,
    still runs. Only for a kernel whose every thread executes `griddepcontrol.wait` before it reads anything that an earlier
    kernel may have written (constant weights excepted) and before it writes anything at all.
    """

    func: str
    args: tuple[str, ...]
    overlap: bool = False


@dataclass(frozen=True)
class Scheduled:
    """A scheduled program: functions, the order in which to call them, and the scratch they need.

    The buffers of each PrimFunc are named like the entries of its `Launch.args`, in the same order.  pass_config: options
    of TVM's passes that a CUDA program is to be lowered with.
    """

    mod: tvm.IRModule
    launches: tuple[Launch, ...]
    scratch: tuple[TensorSpec, ...] = ()
    pass_config: Mapping[str, bool | int] = field(default_factory=dict)


class Schedule(abc.ABC):
    """One technique for one family on one kind of device. Stateless; picklable."""

    name: ClassVar[str]
    """Registry name; also the name of its search space, such as "kron_cuda_simt"."""
    family: ClassVar[str]
    device_kind: ClassVar[str]
    """"cuda" or "cpu"."""
    untuned_share: ClassVar[float] = 0.2
    """A rough guess of the share of the roofline that the default config reaches on a large shape. It decides between schedules
    only until a cost model knows better: what is measured never asks for it."""

    @abc.abstractmethod
    def space(self, workload: Workload, device: Device) -> SearchSpace:
        """The knobs, values and constraints for this shape on this device."""

    @abc.abstractmethod
    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        """Build the scheduled program. Raises `InvalidConfig` when the config cannot be scheduled."""

    @abc.abstractmethod
    def default_config(self, workload: Workload, device: Device) -> Config:
        """The documented safe default: valid for every supported workload, never a bad choice."""

    def supports(self, workload: Workload, device: Device) -> str | None:
        """None when this schedule can serve the workload, else one line saying why not."""
        return None

    def expected_us(self, workload: Workload, config: Config, device: Device) -> float | None:
        """What a config is expected to take, in microseconds, by a model of the schedule's own; None where there is none."""
        return None

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        """Features for the cost model beyond the knobs: tile and wave counts, occupancy, bytes a level..."""
        return {}
