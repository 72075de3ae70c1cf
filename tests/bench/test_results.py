from __future__ import annotations

import json
from pathlib import Path

import pytest

from kronsched import KronMatmul, KSMatmul
from kronsched.bench.chains import chains
from kronsched.bench.groups import group_of, groups
from kronsched.bench.results import Results, read_rows
from kronsched.bench.row import Kernel, Row, best_geomean, joules_geomean
from kronsched.errors import ArgumentError

W = KSMatmul(batch=8, pattern=(1, 2, 2, 2))


def _row(workload: KSMatmul = W, us: float | None = 2.0, **peers: float | None) -> Row:
    return Row(workload, us, peers or {"bmm": 4.0, "shown": 1.0}, 1.0, error=1e-7, information=("shown",))


def _describe(rows: object) -> dict[str, object]:
    return {"device": {"name": "GPU"}, "rows": [r.to_dict() for r in rows]}  # type: ignore[attr-defined]


def test_the_best_peer_is_one_that_counts() -> None:
    row = _row(bmm=4.0, dense=3.0, shown=1.0, none=None)
    assert (row.best_peer, row.best_ratio) == ("dense", 1.5)
    assert _row(shown=1.0).best_peer is None and _row(shown=1.0).best_ratio is None
    other = _row(bmm=6.0)
    assert best_geomean([row, other]) == pytest.approx((1.5 * 3.0) ** 0.5)


def test_joules_are_compared_with_the_best_peers() -> None:
    row = _row().but(joules={"kronsched": 1.0, "bmm": 2.0, "shown": 0.1})
    assert row.joules_ratio == 0.5 and _row().joules_ratio is None
    assert joules_geomean([row, _row()]) == pytest.approx(0.5) and joules_geomean([_row()]) is None


def test_a_row_survives_its_json() -> None:
    row = _row().but(
        kernel=Kernel("tuned", "space", {"a": 1}, 2, "log"), notes={"x": "y"}, joules={"kronsched": 0.5}, peer_errors={"bmm": 0.1}
    )
    assert Row.from_dict(json.loads(json.dumps(row.to_dict()))) == row


@pytest.mark.parametrize(
    "wrong", [{"us": "x"}, {"us": -1}, {"us": 0}, {"us": float("nan")}, {"floor_us": True}, {"peers": {"bmm": float("inf")}}]
)
def test_a_row_of_wrong_values_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"device": {"name": "GPU"}, "rows": [{**_row().to_dict(), **wrong}]}))
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        read_rows(path)


def test_nested_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ArgumentError, match="not a result"):
        read_rows(path)


def test_a_run_that_is_killed_before_its_first_row_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    Results(path, lambda rows: {}, "cpu")
    assert not path.exists()
    path.write_text("{}")
    Results(path, lambda rows: {}, "cpu")
    assert path.read_text() == "{}"  # that of an earlier run stays until there is a row


def test_a_run_in_pieces_ends_in_one_file(tmp_path: Path) -> None:
    path, other = tmp_path / "r.json", KSMatmul(batch=9, pattern=(1, 2, 2, 2))
    first = Results(path, _describe, "GPU")
    first.add(_row())
    first.save(complete=False)
    assert not json.loads(path.read_text())["complete"]
    second = Results(path, _describe, "GPU", resume=True)
    second.add(_row(other))
    second.save(complete=True)
    assert set(read_rows(path, "GPU")) == {W.key, other.key} and json.loads(path.read_text())["complete"]
    assert not Results(path, _describe, "GPU").rows  # without resume it starts anew


def test_results_of_another_device_or_no_results_are_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results = Results(path, _describe, "GPU")
    results.save(complete=True)
    with pytest.raises(ArgumentError, match="are of GPU, this is other"):
        Results(path, _describe, "other", resume=True)
    path.write_text('{"rows": [{}]}')
    with pytest.raises(ArgumentError, match="is not a result of"):
        read_rows(path)
    path.write_text("{")
    with pytest.raises(ArgumentError, match="is not a result of"):
        read_rows(path)
    with pytest.raises(ArgumentError, match="cannot be read"):
        read_rows(tmp_path / "none.json")
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="cannot be written"):
        Results(tmp_path / "file" / "r.json", _describe, "GPU")


def test_groups_say_what_is_lost() -> None:
    slow = KSMatmul(batch=9, pattern=(1, 2, 2, 2))
    chain = KSMatmul(batch=9, pattern=[(1, 2, 2, 2), (1, 2, 2, 2)])
    rows = [_row(), _row(slow, us=8.0), _row(chain, us=None)]
    [one, two] = groups(rows)
    assert (one.name, one.rows, one.failed) == ("float32 batch_first d>1", 2, 0)
    assert one.best_geomean == pytest.approx(1.0) and (one.lowest, one.lost, one.over_floor) == (0.5, 1, 5.0)
    assert (two.name, two.rows, two.failed, two.best_geomean) == ("float32 batch_first chain", 0, 1, None)
    assert group_of(KSMatmul(batch=9, pattern=(2, 2, 2, 1), layout="batch_last")) == "float32 batch_last d=1"
    assert group_of(KronMatmul(4, ((2, 2),))) == "float32"


def test_groups_say_what_a_user_is_served_with() -> None:
    lost = _row(bmm=1.0)
    [group] = groups([lost, _row(KSMatmul(batch=9, pattern=(1, 2, 2, 2)), bmm=4.0)])
    assert (group.lowest, group.lost) == (0.5, 1)
    assert (group.served_lowest, group.served_lost) == (1.0, 0) and group.served_geomean == pytest.approx(2**0.5)
    [outside] = groups([_row(bmm=4.0, lazylinop=1.0)])  # what the selection does not know, it cannot serve
    assert outside.served_lowest == 0.5
    [other] = groups([Row(KronMatmul(m=2, factors=[(2, 2)]), 2.0, {"torch": 4.0}, 1.0)])
    assert other.served_geomean is None and other.served_lost is None


def test_chains_are_compared_with_their_factors() -> None:
    one, two = (1, 2, 4, 2), (1, 8, 4, 1)
    whole = Row(KSMatmul(8, (one, two)), 4.0, {}, 2.0, kernel=Kernel("tuned", "s", {}, 2))
    parts = [Row(KSMatmul(8, one), 2.0, {}, 1.0), Row(KSMatmul(8, two), 4.0, {}, 1.5)]
    [found] = chains([parts[0], whole, parts[1]])
    assert (found.passes, found.factors_us, found.gain, found.most) == (2, 6.0, 1.5, 1.25)
    assert found.to_dict()["gain"] == 1.5 and found.to_dict()["workload"]["family"] == "ks"
    assert not chains([whole, parts[0]]) and not chains([whole, parts[0], parts[1].but(us=None)])
