"""Models that ship: training, the files, and what is done with a file that cannot be used."""

from __future__ import annotations

import gzip
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import xgboost

from kronsched import registry
from kronsched.cost_model import pretrained as pretrained_module
from kronsched.cost_model.base import ModelError
from kronsched.cost_model.features import Columns, Featurizer
from kronsched.cost_model.pretrained import ModelWarning, digest_of, load_prior, pretrained, save_prior, train
from kronsched.cost_model.transfer import Prior, fit_prior, shapes_of
from kronsched.errors import ArgumentError
from kronsched.records.journal import Journal
from tests.search.synthetic import H200, FusedSchedule, fused_table, fused_workload, records


@pytest.fixture(scope="module")
def prior() -> Prior:
    found = fit_prior(shapes_of(FusedSchedule(), H200, records(256, 120) + records(4096, 120)), members=2)
    assert found is not None
    return found


@pytest.fixture
def saved(tmp_path: Path, prior: Prior) -> Path:
    return save_prior(prior, tmp_path, "made_up", "0123")[0]


def features(columns: list[str]) -> np.ndarray:
    table = fused_table(1024)
    assert table.subject is not None
    s = table.subject
    featurizer = Featurizer(table.space, s.workload, s.device, s.schedule, Columns(columns))
    return featurizer.matrix([c for c, _ in table][:200])


def test_a_saved_model_scores_the_same(saved: Path, prior: Prior) -> None:
    loaded = load_prior(saved)
    rows = features(prior.columns.names)
    np.testing.assert_array_equal(loaded.score(rows), prior.score(rows))
    assert loaded.members(rows).shape == (2, 200) and np.ptp(loaded.score(rows)) > 0
    assert (loaded.known, loaded.records, loaded.values) == (prior.known, prior.records, prior.values)
    assert loaded.columns.names == prior.columns.names


def test_the_files_are_json_and_small(saved: Path) -> None:
    data = json.loads(saved.read_text())
    assert data["digest"] == "0123" and data["versions"]["xgboost"] == xgboost.__version__
    assert data["columns"] and data["boosters"] == ["made_up.0.json.gz", "made_up.1.json.gz"]
    assert "learner" in json.loads(gzip.decompress((saved.parent / "made_up.0.json.gz").read_bytes()))
    assert sum(p.stat().st_size for p in saved.parent.iterdir()) < 3_000_000


def test_the_digest_is_of_the_records_not_of_their_order() -> None:
    found = records(256, 20)
    digest = digest_of(shapes_of(FusedSchedule(), H200, found))
    assert digest == digest_of(shapes_of(FusedSchedule(), H200, found[::-1]))
    assert digest != digest_of(shapes_of(FusedSchedule(), H200, found[:-1]))


# -- training -------------------------------------------------------------------------------------------


def test_training_writes_a_model_for_each_schedule_with_records(tmp_path: Path) -> None:
    registry.register_schedule(FusedSchedule)
    log = tmp_path / "a.jsonl"
    for record in records(256, 60):
        Journal(log).append(record)
    [done] = train("kron", [log], tmp_path / "models")
    assert (done.schedule, done.shapes, done.records) == ("made_up", 1, 60)
    assert [p.name for p in done.files] == ["made_up.json", *(f"made_up.{i}.json.gz" for i in range(4))]
    assert pretrained(FusedSchedule(), fused_workload(1024), H200, [tmp_path / "models"]) is not None


def test_nothing_to_train_from_and_nowhere_to_write(tmp_path: Path, prior: Prior) -> None:
    with pytest.raises(ArgumentError, match="family='kron': the 0 logs hold no record"):
        train("kron", [], tmp_path)
    with pytest.raises(ArgumentError, match="family='nope' is not allowed"):
        train("nope", [], tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="cannot be written"):
        save_prior(prior, tmp_path / "file", "made_up", "")


# -- files that cannot be used --------------------------------------------------------------------------


def damage(saved: Path, change: str) -> None:
    data = json.loads(saved.read_text())
    booster = saved.parent / "made_up.0.json.gz"
    if change == "format":
        data["format"] = 99
    elif change == "version":
        data["versions"]["xgboost"] = "0.90"
    elif change == "columns":
        data["columns"].pop()
    elif change == "types":
        data["columns"][0] = 5
    elif change == "path":
        data["boosters"][0] = "../made_up.0.json"
    elif change == "missing":
        del data["known"]
    elif change == "known":
        data["known"] = [{"columns": [], "device": 3}]
    elif change == "no booster":
        booster.unlink()
    elif change == "empty booster":
        booster.write_bytes(gzip.compress(b'{"learner": {}}'))
    elif change in ("records", "share", "column twice", "space", "digest"):
        value = {
            "records": ("records", float("inf")),
            "share": ("known", [{**data["known"][0], "best_share": float("nan")}]),
            "column twice": ("columns", [data["columns"][1], *data["columns"][1:]]),
            "space": ("space", "another"),
            "digest": ("sha256", ["0" * 64, *data["sha256"][1:]]),
        }[change]
        data[value[0]] = value[1]
    elif change == "torn booster":
        booster.write_bytes(booster.read_bytes()[:-9])
    elif change == "plain booster":
        booster.write_text('{"learner": {}}')
    text = json.dumps(data)
    saved.write_text(text[: len(text) // 2] if change == "torn" else "[]" if change == "list" else text)


CHANGES = ["format", "version", "columns", "types", "path", "missing", "known", "no booster", "empty booster", "torn", "list"]
CHANGES += ["torn booster", "plain booster", "records", "share", "column twice", "space", "digest"]


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_cannot_be_used_says_why_in_one_line_and_is_passed_over(saved: Path, change: str) -> None:
    damage(saved, change)
    with pytest.raises(ModelError, match=r"made_up\..*json") as e:
        load_prior(saved)
    assert "\n" not in str(e.value)
    with pytest.warns(ModelWarning, match="passed over, `kronsched train --family kron` makes a new one"):
        assert pretrained(FusedSchedule(), fused_workload(), H200, [saved.parent]) is None


def test_the_next_folder_serves_where_the_first_cannot(saved: Path, prior: Prior, tmp_path: Path) -> None:
    save_prior(prior, tmp_path / "second", "made_up", "")
    damage(saved, "torn")
    with pytest.warns(ModelWarning):
        found = pretrained(FusedSchedule(), fused_workload(), H200, [tmp_path / "none", saved.parent, tmp_path / "second"])
    assert found is not None


def test_a_model_of_features_that_are_gone_is_passed_over(saved: Path) -> None:
    data = json.loads(saved.read_text())
    data["columns"] = [f"sched.old_{i}" for i in range(len(data["columns"]))]
    saved.write_text(json.dumps(data))
    with pytest.warns(ModelWarning, match="features that are gone, such as 'sched.old_0'"):
        assert pretrained(FusedSchedule(), fused_workload(), H200, [saved.parent]) is None


def test_a_good_model_is_used_without_a_word_and_a_new_file_is_noticed(saved: Path, prior: Prior) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = pretrained(FusedSchedule(), fused_workload(), H200, [saved.parent])
        assert first is not None and first is pretrained(FusedSchedule(), fused_workload(64), H200, [saved.parent])
    damage(saved, "torn")
    with pytest.warns(ModelWarning):
        assert pretrained(FusedSchedule(), fused_workload(), H200, [saved.parent]) is None


def test_training_that_was_cut_short_leaves_a_model_that_is_refused(
    saved: Path, prior: Prior, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Boosters of two trainings do not mix unseen."""
    replace_file, done = pretrained_module._replace, []

    def cut(path: Path, data: bytes) -> None:
        if done:
            raise KeyboardInterrupt
        done.append(path)
        replace_file(path, data[:-8] + bytes(8))

    monkeypatch.setattr(pretrained_module, "_replace", cut)
    with pytest.raises(KeyboardInterrupt):
        save_prior(prior, saved.parent, "made_up", "")
    with pytest.raises(ModelError, match="not what the manifest says"):
        load_prior(saved)
