"""Warm start: records of other shapes become a prior; what cannot be used is left out."""

from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kronsched import registry
from kronsched.cost_model.features import Columns, Featurizer
from kronsched.cost_model.transfer import PER_GROUP, TOTAL, fit_prior, logs_in, prior_for, records_of_space
from kronsched.cost_model.xgb import XgbModel
from kronsched.hardware import PRESETS
from kronsched.records.journal import Journal
from kronsched.records.schema import TuningRecord
from kronsched.search.quality import model_quality
from tests.search.synthetic import H200, FusedSchedule, fused_table, fused_workload, records


def changed(record: TuningRecord, **fields: Any) -> TuningRecord:
    return dataclasses.replace(record, **fields)


def test_another_shape_ranks_this_one() -> None:
    prior = fit_prior(FusedSchedule(), H200, records(256, 200))
    assert prior is not None and (prior.groups, prior.records) == (1, 200)
    table = fused_table(1024)
    assert table.subject is not None
    s = table.subject
    featurizer = Featurizer(table.space, s.workload, s.device, s.schedule, Columns(prior.columns.names))
    model = XgbModel(featurizer, prior=prior.booster)
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
    prior = fit_prior(FusedSchedule(), H200, good + odd)
    assert prior is not None and (prior.groups, prior.records) == (1, 60)
    assert fit_prior(FusedSchedule(), H200, odd) is None


def test_failures_only_teach_nothing() -> None:
    failed = [changed(r, result={"status": "crash"}) for r in records(256, 20)]
    assert fit_prior(FusedSchedule(), H200, failed) is None and fit_prior(FusedSchedule(), H200, []) is None


def test_each_shape_and_device_is_a_group_of_bounded_size() -> None:
    ours = records(256, 400)
    there = [changed(r, target=PRESETS["nvidia/a100"].to_dict()) for r in ours]
    prior = fit_prior(FusedSchedule(), H200, ours + there + records(64, 50))
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
        prior = fit_prior(FusedSchedule(), H200, records(256, 350), seed=1)
        assert prior is not None
        scores.append(prior.booster.score(features)[0])
    assert scores[0] == scores[1]
