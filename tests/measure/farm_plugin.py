"""Makes the toy family and its schedule known by name: a worker of a cluster finds schedules by name only."""

from __future__ import annotations

from kronsched import registry
from tests.measure.injected_kernels import Double, Injected

registry.register_family(Double)
registry.register_schedule(Injected)
