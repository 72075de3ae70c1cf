"""Device description (query and presets) and roofline. A leaf package: it knows no workload, no torch and no TVM at import.

Read first: `Device`, then `resolve_target`.
"""

from kronsched.hardware.ceilings import measure_ceilings, raise_ceilings
from kronsched.hardware.device import Device
from kronsched.hardware.presets import PRESETS
from kronsched.hardware.query import resolve_target
from kronsched.hardware.roofline import floor_us, roofline_fraction

__all__ = ["PRESETS", "Device", "floor_us", "measure_ceilings", "raise_ceilings", "resolve_target", "roofline_fraction"]
