"""Knobs, search spaces and candidates. A leaf package: it knows no workload and no device."""

from kronsched.space.space import Candidate, Config, Knob, SearchSpace, Value
from kronsched.space.toml import load_knobs, space_path, spaces_dir

__all__ = ["Candidate", "Config", "Knob", "SearchSpace", "Value", "load_knobs", "space_path", "spaces_dir"]
