"""The contract of a schedule, checked on a CPU whatever it is for: CUDA schedules run through `serialize_cuda`."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kronsched import registry
from kronsched.dtypes import DTYPES
from kronsched.hardware import Device, resolve_target
from kronsched.measure.check import max_relative_error
from kronsched.schedules.base import Schedule, Scheduled
from kronsched.schedules.serial import serialize_cuda
from kronsched.space import Config
from kronsched.workloads.base import Workload
from tests.contract.workload_battery import poisoned, run_functions


class ScheduleBattery:
    """Override `name` and `workloads`; `random_configs` where a build is slow. For CUDA, subclass `CudaScheduleBattery`."""

    name: str
    target = "cpu"
    """The device whose limits apply."""
    random_configs = 2
    quick: int | None = None
    """Where a build is slow: so many workloads, spread over the list, are tested each time, the others with `-m slow`."""

    def workloads(self) -> Sequence[Workload]:
        """Workloads the schedule supports: ordinary and adversarial ones, every dtype among them."""
        raise NotImplementedError

    def device(self) -> Device:
        return resolve_target(self.target)

    @property
    def schedule(self) -> Schedule:
        return registry.schedule(self.name)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "workload" in metafunc.fixturenames:
            workloads = self.workloads()
            step = len(workloads) / (self.quick or len(workloads))
            quick = {int(i * step) for i in range(len(workloads))}
            marked = [pytest.param(w, marks=() if i in quick else pytest.mark.slow, id=w.label) for i, w in enumerate(workloads)]
            metafunc.parametrize("workload", marked)

    # -- the space ----------------------------------------------------------------------------------

    def test_is_what_the_registry_says(self) -> None:
        schedule = self.schedule
        assert schedule.name == self.name
        assert type(pickle.loads(pickle.dumps(schedule))) is type(schedule)
        for workload in self.workloads():
            assert workload.family == schedule.family
            assert schedule.supports(workload, self.device()) is None
            assert self.name in [s.name for s in registry.schedules_for(workload, self.device())]

    def test_space_has_candidates_and_helpful_knobs(self, workload: Workload) -> None:
        space = self.schedule.space(workload, self.device())
        assert space.name == self.name
        assert all(k.help for k in space.knobs)
        assert space.size >= 1
        found = space.sample(random.Random(0))
        assert found is not None
        assert space.invalid(found.config) is None

    def test_space_digest_is_the_same_in_every_process(self) -> None:
        workload = self.workloads()[0]
        code = (
            "import json, sys; from kronsched import registry; from kronsched.hardware import resolve_target\n"
            "workload = registry.workload_from_dict(json.loads(sys.argv[2]))\n"
            "print(registry.schedule(sys.argv[3]).space(workload, resolve_target(sys.argv[1])).digest)"
        )
        argv = [self.target, json.dumps(workload.to_dict()), self.name]
        environment = {**os.environ, "PYTHONHASHSEED": "7"}
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.strip() == self.schedule.space(workload, self.device()).digest

    def test_default_config_is_valid(self, workload: Workload) -> None:
        schedule, device = self.schedule, self.device()
        config = schedule.default_config(workload, device)
        space = schedule.space(workload, device)
        assert space.invalid(config) is None
        assert json.loads(json.dumps(space.candidate(config).config)) == dict(config)

    def test_a_value_outside_its_knob_is_invalid(self, workload: Workload) -> None:
        schedule, device = self.schedule, self.device()
        config = dict(schedule.default_config(workload, device))
        space = schedule.space(workload, device)
        for knob in space.knobs:
            assert space.invalid({**config, knob.name: "nonsense"}) is not None

    # -- the program --------------------------------------------------------------------------------

    def test_computes_the_reference(self, workload: Workload) -> None:
        inputs = workload.make_inputs(11)
        ref = workload.reference(*inputs)
        for config in self._configs(workload):
            output = run_on_cpu(self.schedule.apply(workload, config, self.device()), workload, inputs)
            error = max_relative_error(output, ref)
            assert error <= DTYPES[workload.output.dtype].tolerance, f"{error:.2g} with {dict(config)}"

    def test_program_is_a_function_of_the_config_and_writes_the_output(self, workload: Workload) -> None:
        config = self.schedule.default_config(workload, self.device())
        scheduled, again = (self.schedule.apply(workload, config, self.device()) for _ in range(2))
        assert scheduled.mod.script() == again.mod.script()
        known = {t.name for t in (*workload.inputs, workload.output, *scheduled.scratch)}
        assert len(known) == len(workload.inputs) + 1 + len(scheduled.scratch), "scratch hides another tensor"
        functions = {g.name_hint for g in scheduled.mod.get_global_vars()}
        assert scheduled.launches
        for launch in scheduled.launches:
            assert launch.func in functions
            assert set(launch.args) <= known
        assert workload.output.name in scheduled.launches[-1].args
        used = {a for launch in scheduled.launches for a in launch.args}
        assert {t.name for t in scheduled.scratch} <= used

    def test_features_are_finite_and_alike(self, workload: Workload) -> None:
        schedule, device = self.schedule, self.device()
        rows = [schedule.features(workload, config, device) for config in self._configs(workload, more=8)]
        for row in rows:
            assert list(row) == list(rows[0])
            for name, value in row.items():
                assert math.isfinite(value), f"{name}={value}"

    def _configs(self, workload: Workload, more: int | None = None) -> list[Config]:
        """The default config and random valid ones, the same in every run."""
        space = self.schedule.space(workload, self.device())
        rng = random.Random(f"{self.name} {workload.key}")
        found = [space.sample(rng) for _ in range(self.random_configs if more is None else more)]
        return [self.schedule.default_config(workload, self.device()), *(c.config for c in found if c is not None)]


class CudaScheduleBattery(ScheduleBattery):
    """What NVRTC and ptxas make of the default config, for Ampere and for Hopper."""

    target = "nvidia/h200"

    @pytest.mark.parametrize("preset", ["nvidia/a100", "nvidia/h200"])
    def test_binary_has_no_spills(self, workload: Workload, preset: str, tmp_path: Path) -> None:
        from kronsched.runtime.build import build_artefact

        device = resolve_target(preset)
        if (reason := self.schedule.supports(workload, device)) is not None:
            pytest.skip(reason)
        config = self.schedule.default_config(workload, device)
        manifest = build_artefact(workload, self.schedule, config, device, tmp_path / "artefact")
        assert manifest.arch == {"nvidia/a100": "sm_80", "nvidia/h200": "sm_90a"}[preset]
        assert manifest.spill_bytes == 0
        assert manifest.registers is not None
        assert 0 < manifest.registers <= 255
        assert (tmp_path / "artefact" / str(manifest.binary_file)).stat().st_size > 0


def run_on_cpu(scheduled: Scheduled, workload: Workload, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Run a scheduled program on this CPU with poisoned output and scratch; returns the output."""
    tensors = dict(zip((s.name for s in workload.inputs), inputs, strict=True))
    for spec in (*scheduled.scratch, workload.output):
        tensors[spec.name] = poisoned(spec)
    mod = scheduled.mod
    if "thread_binding" in mod.script():
        mod = serialize_cuda(mod)
    run_functions(mod, [(launch.func, launch.args) for launch in scheduled.launches], tensors)
    return tensors[workload.output.name]
