"""What a builder process runs for `bench kron-multi`: one artefact into the cache. Imports no torch: 30 processes share a host.

Read first: `first_that_builds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kronsched.errors import CompileError, InvalidConfig
from kronsched.runtime.cache import get_or_build

if TYPE_CHECKING:
    from kronsched.hardware import Device
    from kronsched.workloads.base import Workload

Choice = tuple[str, Mapping[str, Any]]
"""A space's name and a config of it."""


def first_that_builds(workload: Workload, choices: Sequence[Choice], device: Device) -> None:
    """Put the first of these configs that can be built into the artefact cache; raises what the last one does.

    The process does not touch the GPU: contexts of many processes are made one after another.
    """
    for number, (space, config) in enumerate(choices, 1):
        try:
            get_or_build(workload, space, config, device)
        except (CompileError, InvalidConfig):
            if number == len(choices):
                raise
        else:
            return
