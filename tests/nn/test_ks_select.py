from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kronsched import KSMatmul
from kronsched.bench.row import Row
from kronsched.bench.selection import entries_of, judge
from kronsched.cli import main
from kronsched.errors import ArgumentError, RecordError
from kronsched.hardware import PRESETS, resolve_target
from kronsched.nn import ks_dynamic, ks_select, ks_select_library
from kronsched.nn.ks_select import (
    LibraryCalls,
    Selector,
    choice_for,
    read_table,
    save_table,
)
from kronsched.nn.ks_select_predict import KERNEL, Entry, paper_prefers_kernel

H200 = PRESETS["nvidia/h200"]
BASE = KSMatmul(batch=1024, pattern=(4, 16, 16, 2), dtype="float16")


def _at(a: int = 4, b: int = 16, d: int = 2, batch: int = 1024) -> KSMatmul:
    return replace(BASE, batch=batch, pattern=(a, b, b, d))


def _entry(workload: KSMatmul, kernel: float | None, **library: float) -> Entry:
    return Entry(workload, kernel, library)


# -- the choice -----------------------------------------------------------------------------------------


def test_what_was_measured_decides_and_noise_does_not() -> None:
    selector = Selector([_entry(_at(), 10.0, bmm=8.0, dense=9.0), _entry(_at(b=64), 10.0, bmm=9.9)])
    assert selector.choose(_at()).name == "bmm" and selector.choose(_at()).how == "measured"
    assert selector.choose(_at(b=64)).name == KERNEL
    assert selector.choose(_at(), kernel_us=7.0).name == KERNEL  # a log knows of a better kernel


def test_a_shape_without_a_kernel_gets_the_library() -> None:
    assert Selector([_entry(_at(), None, bmm=8.0)]).choose(_at()).name == "bmm"


def test_neighbours_decide_for_what_was_not_measured() -> None:
    fast = [_entry(_at(a=a), 10.0, bmm=20.0) for a in (2, 4, 8)]
    slow = [_entry(_at(a=a, b=256), 10.0, bmm=2.0) for a in (2, 4, 8)]
    selector = Selector([*fast, *slow])
    near = selector.choose(_at(a=6, b=20))
    assert (near.name, near.how) == (KERNEL, "predicted")
    assert selector.choose(_at(a=6, b=240)).name == "bmm"
    assert Selector([*fast, *slow[:1], *slow[2:]]).choose(_at(a=4, b=256)).name == "bmm"


def test_far_shapes_other_dtypes_and_layouts_say_nothing() -> None:
    selector = Selector([_entry(_at(), 10.0, bmm=1.0)])
    for other in (
        _at(a=512, b=16),
        replace(_at(a=5), dtype="float32"),
        replace(_at(a=5), layout="batch_last"),
        _at(a=5, d=1),
        _at(a=5, batch=1),
    ):
        assert (selector.choose(other).name, selector.choose(other).how) == (KERNEL, "nothing near was measured")


def test_a_prediction_serves_only_what_the_pattern_has() -> None:
    selector = Selector([_entry(_at(a=a), 10.0, bmm=5.0, block_dense=1.0) for a in (2, 3, 4, 6)])
    assert selector.choose(_at(a=5)).name == "block_dense"
    assert selector.choose(_at(a=1)).name == "bmm"  # with a = 1 block_dense is dense


def test_the_kernel_is_kept_where_choosing_saved_nothing() -> None:
    """Noise of 20% about equal times: each prediction is right half of the time."""
    draw = random.Random(0)
    entries = [
        _entry(_at(a=a, b=b), 10.0, bmm=10.2 * math.exp(draw.gauss(0, 0.2))) for a in range(2, 12) for b in (8, 16, 32, 64)
    ]
    chosen = {Selector(entries).choose(_at(a=a, b=24)).name for a in range(2, 12)}
    assert chosen == {KERNEL}


def test_a_log_of_the_kernel_counts_beside_predicted_libraries() -> None:
    selector = Selector([_entry(_at(a=a, b=b), 10.0, bmm=2.0 * b / 16) for a in (2, 4, 8) for b in (16, 32, 256)])
    assert selector.choose(_at(a=3)).name == "bmm"
    assert selector.choose(_at(a=3), kernel_us=0.5).name == KERNEL


def test_the_papers_rule_is_memory_over_arithmetic() -> None:
    assert paper_prefers_kernel((1, 4, 4, 1), 0.5) and not paper_prefers_kernel((9, 64, 64, 9), 0.5)


# -- tables ---------------------------------------------------------------------------------------------


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    entries = [_entry(_at(), 10.0, bmm=8.0), _entry(_at(b=8), None, dense=1.5)]
    save_table(tmp_path / "library" / "ks.json", "GPU", entries)
    assert read_table(tmp_path / "library" / "ks.json") == ("GPU", entries)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"format": 9}', '{"format": 1, "device": "x", "entries": [{}]}', "[" * 200_000],
    ids=["json", "kind", "format", "entry", "deep"],
)
def test_a_damaged_table_is_one_clear_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "ks.json").write_text(text)
    with pytest.raises(RecordError, match="is damaged"):
        read_table(tmp_path / "ks.json")
    with pytest.raises(RecordError, match="cannot be read"):
        read_table(tmp_path / "none.json")


@pytest.mark.parametrize("us", [-1.0, 1e-320, float("inf"), 10**400])
def test_times_that_cannot_be_are_refused(tmp_path: Path, us: float) -> None:
    save_table(tmp_path / "ks.json", "GPU", [_entry(_at(), us, bmm=8.0)])
    with pytest.raises(RecordError, match="is damaged"):
        read_table(tmp_path / "ks.json")


def test_an_unknown_library_is_refused_by_name(tmp_path: Path) -> None:
    save_table(tmp_path / "ks.json", "GPU", [_entry(_at(), 10.0, bmm=8.0, cutlass=1.0)])
    with pytest.raises(RecordError, match=r"ks\.json': library_us='cutlass' is not allowed: choose one of .*bmm, dense"):
        read_table(tmp_path / "ks.json")


def test_tables_of_other_devices_and_damaged_ones_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_table(tmp_path / "user" / "library" / "ks.json", "GPU", [_entry(_at(), 10.0, bmm=1.0)])
    save_table(tmp_path / "shipped" / "h200" / "library" / "ks_1.json", "GPU", [_entry(_at(), 10.0, bmm=99.0)])
    (tmp_path / "shipped" / "h200" / "library" / "ks_0.json").write_text("{")
    monkeypatch.setattr("kronsched.records.database.search_dirs", lambda: [tmp_path / "user", tmp_path / "shipped"])
    ks_select.selector_for.cache_clear()
    with pytest.warns(UserWarning, match="passed over"):
        found = ks_select.selector_for("GPU")
    assert found is not None and found.choose(_at()).name == "bmm"  # the user's comes first
    with pytest.warns(UserWarning, match="passed over"):
        assert ks_select.selector_for("other") is None
    ks_select.selector_for.cache_clear()


# -- what ks_matmul does --------------------------------------------------------------------------------


def _calls(monkeypatch: pytest.MonkeyPatch, entries: Sequence[Entry], patterns: object = ((4, 16, 16, 2),)) -> LibraryCalls:
    monkeypatch.setattr(ks_select, "selector_for", lambda device: Selector(entries))
    return LibraryCalls(patterns, "batch_first", "float16", H200)  # type: ignore[arg-type]


def test_batches_get_what_serves_them_best(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _calls(monkeypatch, [_entry(_at(), 10.0, bmm=1.0)])
    assert calls.name(1024) == "bmm" and calls.name(1) is None
    monkeypatch.setattr(ks_select, "selector_for", lambda device: pytest.fail("asked again"))
    assert calls.name(1024) == "bmm"


def test_a_formulation_that_is_not_there_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _calls(monkeypatch, [_entry(_at(), 10.0, strided_bmm=1.0)]).name(1024) is None  # batch-first with d > 1
    assert _calls(monkeypatch, [_entry(_at(), 10.0, magic=1.0)]).name(1024) is None


@pytest.mark.parametrize("name", ["bmm", "dense"])
def test_prepared_weights_are_kept_until_they_change(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    made: list[str] = []
    real = ks_select_library.prepared
    monkeypatch.setattr(ks_select_library, "prepared", lambda *args: made.append(args[0]) or real(*args))
    patterns = ((2, 3, 4, 2), (1, 5, 6, 2))
    calls = _calls(monkeypatch, [], patterns)
    w = KSMatmul(batch=6, pattern=patterns, dtype="float64")
    x, *weights = w.make_inputs(0)
    for _ in range(2):
        torch.testing.assert_close(calls.run(name, x, weights), w.reference(x, *weights))
    assert made == [name]
    weights[1].mul_(2.0)
    torch.testing.assert_close(calls.run(name, x, weights), w.reference(x, *weights))
    assert made == [name] * 2
    with torch.inference_mode():
        frozen = [t * 1.0 for t in weights]
        torch.testing.assert_close(calls.run(name, x, frozen), w.reference(x, *weights))


def test_ks_matmul_runs_the_library_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = ks_dynamic.KSKernels([(2, 3, 4, 2)], "batch_first", "float64", "cpu")
    monkeypatch.setattr(kernels, "module", lambda batch: pytest.fail("built a kernel"))
    monkeypatch.setattr(kernels.library, "name", lambda batch: "bmm")
    w = KSMatmul(batch=5, pattern=(2, 3, 4, 2), dtype="float64")
    x, weight = w.make_inputs(0)
    torch.testing.assert_close(kernels(x, [weight]), w.reference(x, weight))


def test_a_cpu_has_no_table() -> None:
    calls = ks_dynamic.KSKernels([(2, 3, 4, 2)], "batch_first", "float32", "cpu").library
    assert calls.name(1024) is None


def test_a_choice_can_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ks_select, "selector_for", lambda device: Selector([_entry(_at(), 10.0, bmm=1.0)]))
    assert choice_for(_at(), "nvidia/h200").name == "bmm"
    assert choice_for(_at(), "cpu").name == KERNEL
    monkeypatch.setattr("kronsched.records.database.find_best", lambda w, d: SimpleNamespace(median_us=0.9))
    assert choice_for(_at(), "nvidia/h200").name == KERNEL


# -- judging rules --------------------------------------------------------------------------------------


def _results(path: Path) -> Path:
    rows = []
    for a in (2, 4, 8, 16):
        for b in (8, 16, 64, 128):  # the library wins where b is large, as the paper says
            library = 20.0 if b < 32 else 5.0
            rows.append(Row(_at(a=a, b=b), 10.0, {"bmm": library, "einsum": 1.0, "dense": None}, 1.0))
    path.write_text(json.dumps({"device": {"name": "GPU"}, "rows": [r.to_dict() for r in rows]}))
    return path


def test_rules_are_judged_against_the_fastest(tmp_path: Path) -> None:
    device, entries = entries_of([_results(tmp_path / "r.json")])
    assert device == "GPU" and len(entries) == 16 and set(entries[0].library_us) == {"bmm"}  # einsum is no formulation of ours
    by_rule = {v.rule.split(",")[0]: v for v in judge(entries)}
    assert by_rule["table"].regret == by_rule["paper"].regret == 1.0
    assert by_rule["kernel always"].regret == pytest.approx(math.sqrt(2)) and by_rule["kernel always"].library == 0.0
    assert by_rule["library always"].worst == pytest.approx(2.0)
    assert by_rule["predictor"].regret < 1.2 and by_rule["predictor"].right >= 0.75


def test_compressed_results_are_read_and_cut_ones_refused(tmp_path: Path) -> None:
    plain, packed = _results(tmp_path / "r.json"), tmp_path / "r.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert entries_of([packed]) == entries_of([plain])
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ArgumentError, match=r"r\.json\.gz' are not a whole gzip file"):
        entries_of([packed])


def test_results_of_two_devices_are_refused(tmp_path: Path) -> None:
    one, two = _results(tmp_path / "a.json"), tmp_path / "b.json"
    two.write_text(one.read_text().replace('"GPU"', '"other"'))
    with pytest.raises(ArgumentError, match="several devices: GPU, other"):
        entries_of([one, two])


def test_the_command_writes_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, table = _results(tmp_path / "r.json"), tmp_path / "library" / "ks.json"
    with pytest.raises(SystemExit) as done:
        main(["select", str(results), "-o", str(table), "--json"])
    assert done.value.code == 0 and json.loads(capsys.readouterr().out)["entries"] == 16
    assert len(read_table(table)[1]) == 16
    (tmp_path / "none.json").write_text('{"device": {"name": "GPU"}, "rows": []}')
    with pytest.raises(SystemExit) as done:
        main(["select", str(tmp_path / "none.json")])
    assert done.value.code == 2


@pytest.mark.cuda
def test_a_graph_reads_weights_that_change_after_its_capture() -> None:
    device = resolve_target("cuda")
    calls = LibraryCalls([(2, 8, 16, 2)], "batch_first", "float32", device)
    w = KSMatmul(batch=32, pattern=(2, 8, 16, 2))
    x, weight = w.make_inputs(0, device.torch_device)
    calls.run("bmm", x, [weight])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = calls.run("bmm", x, [weight])
    weight.mul_(2.0)
    graph.replay()
    torch.testing.assert_close(y.double(), w.reference(x, weight), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(calls.run("bmm", x, [weight]).double(), w.reference(x, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("api", ["new", "old"])
def test_tf32_is_off_inside_and_as_it_was_outside(api: str) -> None:
    settings = torch.backends.cuda.matmul
    x = torch.randn(512, 512, device="cuda")
    want = x.double() @ x.double()

    def error() -> float:
        return float(((x @ x).double() - want).abs().max() / want.abs().mean())

    try:
        if api == "new":
            settings.fp32_precision = "tf32"
        else:
            settings.allow_tf32 = True
        rough = error()
        with ks_select_library.full_precision(x):
            assert error() < rough / 20
        assert error() == pytest.approx(rough, rel=0.5) and settings.allow_tf32
    finally:
        settings.allow_tf32 = False
