"""The contract of a workload family. A family's test subclasses `WorkloadBattery` and gives its workloads."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from kronsched import registry
from kronsched.dtypes import DTYPES
from kronsched.errors import UserError
from kronsched.measure.check import as_real, max_relative_error
from kronsched.workloads.base import TensorSpec, Workload

_PROGRAM_FLOPS = 20_000_000  # unscheduled programs are slow: only smaller workloads are run
_DENSE_ELEMENTS = 4_000_000


class WorkloadBattery:
    """Override `workloads`, `bad_fields` and, where there is one, `dense`."""

    def workloads(self) -> Sequence[Workload]:
        """Workloads of one family, all different; every dtype and option at a small shape among them."""
        raise NotImplementedError

    def bad_fields(self) -> Sequence[tuple[Mapping[str, Any], str]]:
        """(all fields of a workload, one of them wrong; the text by which the message must name it)."""
        raise NotImplementedError

    def dense(self, workload: Workload, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The result in float64 by another route than `reference`; None when that is too large."""
        return None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        names = metafunc.fixturenames
        if "workload" in names:
            metafunc.parametrize("workload", self.workloads(), ids=lambda w: w.label)
        if "small" in names:
            small = [w for w in self.workloads() if w.flops <= _PROGRAM_FLOPS]
            metafunc.parametrize("small", small, ids=lambda w: w.label)
        if "bad" in names:
            metafunc.parametrize("bad", self.bad_fields(), ids=lambda bad: f"{bad[1]} in {dict(bad[0])!r}"[:80])

    # -- identity -----------------------------------------------------------------------------------

    def test_survives_json(self, workload: Workload) -> None:
        again = registry.workload_from_dict(json.loads(json.dumps(workload.to_dict())))
        assert type(again) is type(workload)
        assert again == workload
        assert again.key == workload.key
        assert hash(again) == hash(workload)

    def test_is_frozen_and_picklable(self, workload: Workload) -> None:
        assert dataclasses.is_dataclass(workload)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(workload, dataclasses.fields(workload)[0].name, 1)
        assert pickle.loads(pickle.dumps(workload)) == workload

    def test_keys_differ_and_are_the_same_in_every_process(self) -> None:
        workloads = self.workloads()
        keys = [w.key for w in workloads]
        assert len(set(keys)) == len(keys), "two workloads share a key"
        assert all(k.startswith(w.family + "-") for k, w in zip(keys, workloads, strict=True))
        code = (
            "import json, sys; from kronsched import registry\n"
            "print(json.dumps([registry.workload_from_dict(d).key for d in json.load(sys.stdin)]))"
        )
        for seed in ("1", "2"):
            done = subprocess.run(
                [sys.executable, "-c", code],
                input=json.dumps([w.to_dict() for w in workloads]),
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                check=True,
            )
            assert json.loads(done.stdout) == keys

    # -- user's mistakes ----------------------------------------------------------------------------

    def test_a_bad_field_is_named_in_one_line(self, bad: tuple[Mapping[str, Any], str]) -> None:
        fields, name = bad
        family = registry.family(self.workloads()[0].family)
        with pytest.raises(UserError) as caught:
            family.from_fields(fields)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_an_unknown_field_is_named(self) -> None:
        workload = self.workloads()[0]
        with pytest.raises(UserError, match="'colour'"):
            registry.workload_from_dict({**workload.to_dict(), "colour": 1})

    def test_every_field_can_be_a_command_line_option(self) -> None:
        for field in dataclasses.fields(self.workloads()[0]):  # type: ignore[arg-type]
            assert field.metadata.get("help"), f"field {field.name} has no help"
            assert "parse" in field.metadata or field.type in ("int", "float", "str", "bool"), f"field {field.name} has no parse"

    # -- tensors and costs --------------------------------------------------------------------------

    def test_costs_are_positive(self, workload: Workload) -> None:
        assert workload.flops > 0
        assert workload.min_bytes >= workload.output.nbytes + workload.inputs[0].nbytes > 0
        assert workload.compute_dtype in DTYPES
        assert workload.label.startswith(workload.family)
        assert "\n" not in workload.label

    def test_tensor_names_are_distinct_identifiers(self, workload: Workload) -> None:
        specs = [*workload.inputs, workload.output]
        assert len({s.name for s in specs}) == len(specs)
        for spec in specs:
            assert spec.name.isidentifier()
            assert all(n >= 1 for n in spec.shape)
            assert TensorSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec

    def test_inputs_depend_on_the_seed_only(self, small: Workload) -> None:
        first, second, other = small.make_inputs(3), small.make_inputs(3), small.make_inputs(4)
        for spec, a, b, c in zip(small.inputs, first, second, other, strict=True):
            assert tuple(a.shape) == spec.shape
            assert a.dtype == DTYPES[spec.dtype].torch()
            assert torch.equal(a, b)
            assert spec.size < 4 or not torch.equal(a, c)

    # -- what it computes ---------------------------------------------------------------------------

    def test_reference_is_float64_and_matches_the_dense_formulation(self, small: Workload) -> None:
        inputs = small.make_inputs(0)
        ref = small.reference(*inputs)
        assert tuple(ref.shape) == small.output.shape
        assert ref.dtype == (torch.complex128 if DTYPES[small.output.dtype].is_complex else torch.float64)
        dense = self.dense(small, inputs)
        if dense is not None:
            assert max_relative_error(ref, dense) < 1e-12

    def test_some_workload_has_a_dense_formulation(self) -> None:
        assert any(self.dense(w, w.make_inputs(0)) is not None for w in self.workloads() if w.flops <= _PROGRAM_FLOPS)

    def test_unscheduled_program_computes_the_reference(self, small: Workload) -> None:
        inputs = small.make_inputs(1)
        output = poisoned(small.output)
        tensors = dict(zip((s.name for s in small.inputs), inputs, strict=True)) | {small.output.name: output}
        run_functions(small.program(), [("main", tuple(tensors))], tensors)
        tolerance = DTYPES[small.output.dtype].tolerance
        assert max_relative_error(output, small.reference(*inputs)) <= tolerance


def poisoned(spec: TensorSpec) -> torch.Tensor:
    """A tensor whose every element must be overwritten: NaN, or the smallest integer."""
    dtype = DTYPES[spec.dtype].torch()
    has_nan = dtype.is_floating_point or dtype.is_complex
    return torch.full(spec.shape, float("nan") if has_nan else torch.iinfo(dtype).min, dtype=dtype)


def run_functions(mod: Any, calls: Sequence[tuple[str, Sequence[str]]], tensors: Mapping[str, torch.Tensor]) -> None:
    """Compile a module for this CPU and call its functions in order, each with the named tensors viewed in its own shapes."""
    import tvm

    from kronsched.hardware import resolve_target

    built = tvm.compile(mod, target=resolve_target("cpu").tvm_target())
    for name, args in calls:
        params = mod[name].params
        assert [str(p.name) for p in params] == list(args), f"buffers of {name} are not named like its arguments"
        built[name](*(as_real(tensors[a]).view([int(n) for n in p.shape]) for a, p in zip(args, params, strict=True)))
