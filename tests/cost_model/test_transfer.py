"""Warm start: records of other shapes become a prior; what cannot be used is left out."""

from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kronsched import registry
from kronsched.cost_model.features import Columns, Featurizer, shape_columns
from kronsched.cost_model.transfer import (
    PER_GROUP,
    TOTAL,
    Known,
    Prior,
    fit_prior,
    logs_in,
    predicted_share,
    prior_for,
    records_of_space,
    seen_space,
    shapes_of,
)
from kronsched.cost_model.xgb import XgbModel
from kronsched.hardware import PRESETS
from kronsched.records.journal import Journal
from kronsched.records.schema import TuningRecord
from kronsched.search.quality import model_quality
from tests.search.synthetic import H200, FusedSchedule, fused_table, fused_workload, records


def changed(record: TuningRecord, **fields: Any) -> TuningRecord:
    return dataclasses.replace(record, **fields)


def fitted(found: list[TuningRecord]) -> Prior | None:
    return fit_prior(shapes_of(FusedSchedule(), H200, found))


def test_another_shape_ranks_this_one() -> None:
    prior = fitted(records(256, 200))
    assert prior is not None and (prior.groups, prior.records) == (1, 200)
    table = fused_table(1024)
    assert table.subject is not None
    s = table.subject
    featurizer = Featurizer(table.space, s.workload, s.device, s.schedule, Columns(prior.columns.names))
    model = XgbModel(featurizer, prior=prior)
    quality = model_quality(model, table, set())
    assert quality is not None and quality.pairwise > 0.75 and quality.top16 > 0.7


def test_what_this_version_does_not_know_is_left_out() -> None:
    good = records(256, 60)
    odd = [
        changed(good[0], workload={"family": "unheard_of", "m": 4}),
        changed(good[0], workload={"family": "kron", "m": -4, "factors": [[8, 8]], "dtype": "float32"}),
        changed(good[0], workload={"family": "kron", "m": "x", "factors": [[8, 8]], "dtype": "float32"}),
        changed(good[0], workload={"family": "kron", "m": 4, "unknown": 1}),
        changed(good[0], target={**good[0].target, "name": "Some GPU of 2031"}),
        changed(good[0], target={**good[0].target, "kind": "cpu", "name": "Some CPU"}),
        changed(good[0], config={**good[0].config, "rows": 3}),
        changed(good[0], config={"rows": 1}),
        changed(good[0], space={"name": "other", "digest": None}),
    ]
    prior = fitted(good + odd)
    assert prior is not None and (prior.groups, prior.records) == (1, 60)
    assert fitted(odd) is None


def test_failures_only_teach_nothing() -> None:
    failed = [changed(r, result={"status": "crash"}) for r in records(256, 20)]
    assert fitted(failed) is None and fitted([]) is None


def test_each_shape_and_device_is_a_group_of_bounded_size(tmp_path: Path) -> None:
    registry.register_schedule(FusedSchedule)
    ours = records(256, 400)
    there = [changed(r, target=PRESETS["nvidia/a100"].to_dict()) for r in ours]
    log = tmp_path / "all.jsonl"
    log.write_text("".join(r.to_json() + "\n" for r in ours + there + records(64, 50)))
    prior = prior_for(FusedSchedule(), fused_workload(1024), H200, [log])
    assert prior is not None and prior.groups == 3 and prior.records == 2 * PER_GROUP + 50 <= TOTAL


def test_the_own_log_does_not_count_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.register_schedule(FusedSchedule)
    own, other = tmp_path / "own.jsonl", tmp_path / "other.jsonl"
    for record in records(1024, 40):
        Journal(own).append(record)
        Journal(other).append(record)
    w = fused_workload(1024)
    assert prior_for(FusedSchedule(), w, H200, [own], own) is None
    prior = prior_for(FusedSchedule(), w, H200, [own, other], own)
    assert prior is not None and prior.records == 40
    assert prior_for(FusedSchedule(), fused_workload(64), H200, [own], own) is not None
    assert prior_for(FusedSchedule(), w, H200, []) is None


def test_logs_are_found_and_read_whatever_they_hold(tmp_path: Path) -> None:
    (tmp_path / "h200" / "tables").mkdir(parents=True)
    good = [r.to_json() for r in records(256, 5)]
    (tmp_path / "h200" / "a.jsonl").write_text("\n".join([good[0], "garbage made_up", good[1], good[2][:50]]))
    (tmp_path / "h200" / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(good[3:]).encode()))
    (tmp_path / "h200" / "tables" / "c.jsonl").write_text(good[0])
    (tmp_path / "h200" / "notes.txt").write_text(good[0])
    found = logs_in([tmp_path, tmp_path / "none"])
    assert [p.name for p in found] == ["a.jsonl", "b.jsonl.gz"]
    assert [len(records_of_space(p, "made_up")) for p in found] == [2, 2]
    assert records_of_space(found[0], "other") == [] and records_of_space(tmp_path / "none.jsonl", "made_up") == []


def test_a_prior_is_deterministic() -> None:
    features = np.zeros((1, 60), np.float32)
    scores = []
    for _ in range(2):
        prior = fit_prior(shapes_of(FusedSchedule(), H200, records(256, 350)), seed=1)
        assert prior is not None
        scores.append(prior.score(features)[0])
    assert scores[0] == scores[1]


# -- what a prior knows of shapes -----------------------------------------------------------------------


def test_a_prior_on_a_prior_learns_its_errors() -> None:
    """The second one has seen other shapes as well, and ranks them at least as well as the first alone."""
    base = fitted(records(65536, 200))
    more = fit_prior(shapes_of(FusedSchedule(), H200, records(16, 300)), base=base)
    assert base is not None and more is not None and more.base is base
    assert more.columns.names[: len(base.columns)] == base.columns.names
    table = fused_table(16)
    s = table.subject
    assert s is not None
    pairwise = []
    for prior in (base, more):
        featurizer = Featurizer(table.space, s.workload, s.device, s.schedule, Columns(prior.columns.names))
        quality = model_quality(XgbModel(featurizer, prior=prior), table, set())
        assert quality is not None
        pairwise.append(quality.pairwise)
    assert pairwise[1] > pairwise[0]


def test_the_expected_share_of_the_roofline_is_that_of_near_shapes() -> None:
    def known(m: int, share: float) -> Known:
        return Known(shape_columns(fused_workload(m)), "any", share)

    near, distance = predicted_share([known(1024, 0.8), known(16, 0.01)], fused_workload(2048))
    assert near > 0.5 and 0 < distance < 1
    far, further = predicted_share([known(1024, 0.8), known(16, 0.01)], fused_workload(8))
    assert far < 0.05 and further < 1
    assert predicted_share([], fused_workload(8)) == (1.0, np.inf)
    assert known(64, 0.5).distance(shape_columns(fused_workload(64))) == 0


def test_only_values_that_occurred_often_are_known() -> None:
    found = [r for r in records(256, 400) if r.config["pad"] != 8]
    odd = next(r for r in records(256, 400) if r.config["pad"] == 8)
    prior = fitted([*found, odd])
    assert prior is not None and prior.values["pad"] == frozenset({0, 1, 2, 4})
    space = seen_space(fused_table(1024).space, prior)
    assert [k.values for k in space.knobs if k.name == "pad"] == [(0, 1, 2, 4)]


def test_records_with_other_knobs_are_passed_over() -> None:
    """Of a later version, or of a plugin: they must not stop tuning or training."""
    known = records(256, 40)
    odd = [dataclasses.replace(r, config={**r.config, "zzz": 1}) for r in known[:10]]
    (shape,) = shapes_of(FusedSchedule(), H200, [*known[10:], *odd])
    assert len(shape.candidates) == 30
