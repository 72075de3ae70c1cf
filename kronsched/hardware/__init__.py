"""Device description (query and presets) and roofline. A leaf package."""

from kronsched.hardware.device import Device

__all__ = ["Device"]
