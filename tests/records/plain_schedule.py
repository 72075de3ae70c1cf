"""A schedule that runs the TensorIR program as it is: enough for measuring and replaying for real."""

from __future__ import annotations

from typing import ClassVar

from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.space import Knob, SearchSpace


class PlainCpu(Schedule):
    name: ClassVar[str] = "plain_cpu"
    family: ClassVar[str] = "kron"
    device_kind: ClassVar[str] = "cpu"

    def space(self, workload, device):
        return SearchSpace(self.name, [Knob("nothing", (0, 1))])

    def apply(self, workload, config, device):
        args = (*(t.name for t in workload.inputs), workload.output.name)
        return Scheduled(workload.program(), (Launch("main", args),))

    def default_config(self, workload, device):
        return {"nothing": 0}
