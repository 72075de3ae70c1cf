"""Columns of the cost model: stable, named, missing values explicit."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest

from kronsched.cost_model.features import Columns, Featurizer
from kronsched.errors import InvalidConfig
from kronsched.hardware import PRESETS, Device
from kronsched.schedules.base import Schedule, Scheduled
from kronsched.schedules.kron_cuda_simt import KronCudaSimt
from kronsched.space import Config, Knob, SearchSpace
from kronsched.workloads.base import Workload
from kronsched.workloads.kron import KronMatmul

H200 = PRESETS["nvidia/h200"]
SPACE = SearchSpace(
    "odd", [Knob("n", (1, 2, 4)), Knob("kind", ("x", "y")), Knob("on", (False, True)), Knob("mixed", (1, "auto"))]
)


class Odd(Schedule):
    """A schedule whose features are missing, infinite, constant, or raise for some configs."""

    name, family, device_kind = "odd", "kron", "cuda"

    def space(self, workload: Workload, device: Device) -> SearchSpace:
        return SPACE

    def apply(self, workload: Workload, config: Config, device: Device) -> Scheduled:
        raise NotImplementedError

    def default_config(self, workload: Workload, device: Device) -> Config:
        return {"n": 1, "kind": "x", "on": False, "mixed": 1}

    def features(self, workload: Workload, config: Config, device: Device) -> Mapping[str, float]:
        if config["n"] == 4:
            raise InvalidConfig("no plan")
        out = {"constant": 3.0, "ratio": math.inf if config["on"] else 0.5}
        return {**out, "late": 1.0} if config["kind"] == "y" else out


def test_knobs_only() -> None:
    row = Featurizer(SPACE).row({"n": 4, "kind": "y", "on": True, "mixed": "auto"})
    assert row == {
        "knob.n": 4.0,
        "knob.kind=x": 0.0,
        "knob.kind=y": 1.0,
        "knob.on": 1.0,
        "knob.mixed=1": 0.0,
        "knob.mixed=auto": 1.0,
    }


def test_a_matrix_has_every_column_and_nan_where_a_value_is_missing() -> None:
    f = Featurizer(SPACE, KronMatmul(8, [(4, 4)]), H200, Odd())
    candidates = list(SPACE)
    m = f.matrix(candidates)
    assert m.shape == (len(candidates), len(f.columns)) and m.dtype == np.float32 and not np.isinf(m).any()
    by_name = dict(zip(f.columns.names, m.T, strict=True))
    configs = [c.config for c in candidates]
    for name, missing in (
        ("sched.constant", [c["n"] == 4 for c in configs]),
        ("sched.late", [c["n"] == 4 or c["kind"] == "x" for c in configs]),
        ("sched.ratio", [c["n"] == 4 or bool(c["on"]) for c in configs]),
    ):
        assert np.isnan(by_name[name]).tolist() == missing
    np.testing.assert_array_equal(f.matrix(candidates), m)  # from the cache
    np.testing.assert_array_equal(f.matrix(candidates[3:5]), m[3:5])


def test_columns_only_ever_grow_at_the_end() -> None:
    f = Featurizer(SPACE, KronMatmul(8, [(4, 4)]), H200, Odd())
    early = [c for c in SPACE if c.config["kind"] == "x"]
    before = f.matrix(early)
    names = list(f.columns.names)
    f.matrix(list(SPACE))
    assert f.columns.names[: len(names)] == names and f.columns.names[len(names) :] == ["sched.late"]
    after = f.matrix(early)
    np.testing.assert_array_equal(after[:, : len(names)], before)
    assert np.isnan(after[:, -1]).all()


def test_two_shapes_share_columns_and_differ_in_those_of_the_shape() -> None:
    columns, schedule = Columns(), KronCudaSimt()
    rows = []
    for w in (KronMatmul(64, [(8, 8)] * 3), KronMatmul(1024, [(16, 16)] * 2, "float16")):
        space = schedule.space(w, H200)
        rows.append(Featurizer(space, w, H200, schedule, columns).matrix([space.candidate(schedule.default_config(w, H200))])[0])
    a, b = (dict(zip(columns.names, r, strict=False)) for r in rows)
    assert (a["shape.m"], b["shape.m"]) == (6.0, 10.0)
    assert (a["shape.item_bytes"], b["shape.item_bytes"]) == (2.0, 1.0)  # log2 of 4 and 2 bytes
    assert (a["shape.factors.count"], b["shape.factors.count"]) == (6.0, 4.0)
    assert a["device.units"] == b["device.units"] == pytest.approx(math.log2(132))
    assert {n for n in b if n.startswith("sched.")} and np.isfinite(b["sched.waves"])


@pytest.mark.parametrize("group", ["knob", "sched", "shape", "device"])
def test_a_group_can_be_left_out(group: str) -> None:
    f = Featurizer(SPACE, KronMatmul(8, [(4, 4)]), H200, Odd(), without=(group,))
    f.matrix(list(SPACE))
    groups = {n.split(".")[0] for n in f.columns.names}
    assert groups == {"knob", "sched", "shape", "device"} - {group}


def test_the_embedding_ranks_numbers_and_separates_strings() -> None:
    space = SearchSpace("s", [Knob("threads", (64, 1024, 256)), Knob("kind", ("x", "y", "z")), Knob("one", (9,))])
    f = Featurizer(space)
    at = {c.config["threads"]: f.embed([c])[0] for c in space if c.config["kind"] == "x"}
    np.testing.assert_allclose([at[64][0], at[256][0], at[1024][0]], [0.0, 0.5, 1.0])
    assert f.embed(list(space)).shape == (9, 4)
