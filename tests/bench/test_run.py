from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kronsched import KronMatmul, KSMatmul
from kronsched.bench import contest
from kronsched.bench import run as bench_run
from kronsched.bench.peers import PEERS
from kronsched.bench.row import Row, by_dtype, geomean, published_geomean, slower_than
from kronsched.bench.run import choose_peers, run_suite, without_folders
from kronsched.bench.suites import Case
from kronsched.dtypes import DTYPES
from kronsched.errors import ArgumentError, UnsupportedError
from kronsched.hardware import resolve_target
from kronsched.workloads.kron import shuffle
from tests.bench.conftest import FakeModule

CPU = resolve_target("cpu")
SMALL = Case(KronMatmul(4, ((4, 3), (3, 4))))


def test_a_row_has_checked_times_and_says_what_was_timed(ours: Callable[..., None]) -> None:
    ours()
    [row] = run_suite([SMALL], CPU, ["torch_shuffle"])
    assert row.failure is None and row.us and row.us > 0 and (row.peers["torch_shuffle"] or 0) > 0
    assert row.error is not None and 0 < row.error < 1e-6 and set(row.peer_errors) == {"torch_shuffle"}
    assert row.kernel is not None and (row.kernel.how, row.kernel.launches) == ("tuned", 2)
    assert row.floor_by == "bandwidth" and row.share_of_floor == pytest.approx(row.floor_us / row.us)
    assert row.ratios["torch_shuffle"] == pytest.approx(row.peers["torch_shuffle"] / row.us)  # type: ignore[operator]


def test_a_shape_with_much_arithmetic_is_bounded_by_it(ours: Callable[..., None]) -> None:
    ours()
    [row] = run_suite([Case(KronMatmul(64, ((256, 256),)))], CPU, [])
    assert row.floor_by == "compute" and row.us


def test_a_wrong_result_has_no_time(ours: Callable[..., None]) -> None:
    ours(fault=1.0)
    [row] = run_suite([SMALL], CPU, ["torch_shuffle"])
    assert row.us is None and row.error is None and "wrong result" in (row.failure or "") and row.peers["torch_shuffle"]
    assert row.share_of_floor is None and row.ratios == {"torch_shuffle": None}


def test_a_kernel_that_raises_anything_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch, ours: Callable[..., None]) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("CUDA error:\n launch failed")

    ours()
    monkeypatch.setattr(bench_run, "load_module", broken)
    [row] = run_suite([SMALL], CPU, ["torch_shuffle"])
    assert row.us is None and row.failure == "RuntimeError: CUDA error: launch failed" and row.peers["torch_shuffle"]


def test_a_failing_or_wrong_peer_is_null_with_a_note(monkeypatch: pytest.MonkeyPatch, ours: Callable[..., None]) -> None:
    def broken(workload: Any, inputs: Any) -> Any:
        raise RuntimeError("no such\nkernel")

    ours()
    peers = {"broken": broken, "wrong": lambda w, inputs: lambda: inputs[0].repeat(1, 2)[:, : w.k_out]}
    monkeypatch.setitem(PEERS, "kron", peers)  # type: ignore[arg-type]
    [row] = run_suite([SMALL], CPU, ["broken", "wrong"])
    assert row.us and row.peers == {"broken": None, "wrong": None}
    assert row.notes["broken"] == "RuntimeError: no such kernel" and "wrong result" in row.notes["wrong"]


def test_a_peer_may_be_less_exact_but_not_ours(monkeypatch: pytest.MonkeyPatch, ours: Callable[..., None]) -> None:
    allowed = DTYPES["float32"].tolerance

    def rough(times: float) -> Any:
        return lambda w, inputs: lambda: shuffle(inputs[0].double(), [f.double() for f in inputs[1:]]) * (1 + times * allowed)

    ours()
    monkeypatch.setitem(PEERS, "kron", {"rough": rough(3), "wrong": rough(100)})
    [row] = run_suite([SMALL], CPU, ["rough", "wrong"])
    assert row.peers["rough"] and row.peer_errors["rough"] > allowed and row.peers["wrong"] is None
    monkeypatch.setattr(bench_run, "load_module", lambda *args: FakeModule(100 * allowed))
    assert run_suite([SMALL], CPU, [])[0].us is None


def test_a_device_that_broke_fails_rows_and_not_the_bench(monkeypatch: pytest.MonkeyPatch, ours: Callable[..., None]) -> None:
    def broken(device: Any) -> int:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    ours()
    monkeypatch.setattr(bench_run, "free_bytes", broken)
    [row] = run_suite([SMALL], CPU, ["torch_shuffle"])
    assert row.us is None and "illegal memory access" in (row.failure or "")


def test_a_peer_that_no_graph_can_hold_is_said_to_be_timed_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(Stream=lambda device: None, stream=lambda s: nullcontext(), synchronize=lambda: None)
    for name in vars(stream):
        monkeypatch.setattr(torch.cuda, name, getattr(stream, name))
    device = resolve_target("nvidia/h200")
    monkeypatch.setattr(contest, "repeated", lambda calls, count, device: calls[0])  # a plain function, as where capture fails
    assert not contest._captures(lambda: None, device)
    monkeypatch.setattr(contest, "repeated", lambda calls, count, device: [].append)  # a method, as a graph's replay
    assert contest._captures(lambda: None, device)


def test_what_does_not_fit_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch, ours: Callable[..., None]) -> None:
    ours()
    monkeypatch.setattr(bench_run, "free_bytes", lambda device: 100)
    [row] = run_suite([SMALL], CPU, ["torch_shuffle"])
    assert row.us is None and row.peers == {"torch_shuffle": None} and "0.0 GB are free" in (row.failure or "")


def test_memory_that_earlier_shapes_held_is_given_back_before_a_shape_is_refused(
    monkeypatch: pytest.MonkeyPatch, ours: Callable[..., None]
) -> None:
    ours()
    free = [100]
    monkeypatch.setattr(bench_run, "free_bytes", lambda device: free[-1])
    monkeypatch.setattr(bench_run, "release", lambda device: free.append(1 << 40))
    assert run_suite([SMALL], CPU, [])[0].us and len(free) == 3  # before the row and after it


def _on_a_gpu(monkeypatch: pytest.MonkeyPatch, medians: list[float], record: float | None) -> tuple[float, str]:
    """(time, note) of a thorough contest whose rounds read these medians, the last of them for ever."""
    found = contest.Contest.__new__(contest.Contest)
    found.device, found.notes, found.expected = resolve_target("nvidia/h200"), {}, {} if record is None else {"p": record}
    found._reference, found._ready = torch.zeros(1), {"p": []}
    monkeypatch.setattr(contest, "_captures", lambda call, device: True)
    monkeypatch.setattr(contest, "side_stream", lambda device: nullcontext())
    found._ready["p"].append(lambda: None)
    monkeypatch.setattr(found, "_round", lambda name: medians.pop(0) if len(medians) > 1 else medians[0])
    return found.times()["p"], found.notes.get("p", "")


@pytest.mark.parametrize(
    ("medians", "record", "us", "note"),
    [
        ([5.0, 62.0, 5.2], None, 5.0, ""),
        ([62.0, 5.0, 30.0, 5.1], None, 5.0, "timed 62, 5, 30, 5.1 µs"),
        ([1.0, 5.0, 5.2], None, 5.0, "timed 1, 5, 5.2, 5.2, 5.2 µs"),
        ([1.0, 2.0, 4.0, 8.0, 16.0], None, 4.0, "timed 1, 2, 4, 8, 16 µs: no two agree"),
        ([62.0, 5.0, 30.0], 4.9, 5.0, ""),
        ([5.0], 3.6, 5.0, "timed 5, 5, 5 µs (its record says 3.6)"),
    ],
)
def test_a_best_median_that_nothing_confirms_is_taken_again(
    monkeypatch: pytest.MonkeyPatch, medians: list[float], record: float | None, us: float, note: str
) -> None:
    assert _on_a_gpu(monkeypatch, medians, record) == (us, note)


def test_on_a_cpu_long_calls_are_timed_in_fewer_rounds_but_with_one_thread_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found = contest.Contest(SMALL.workload, CPU)
    now, asked = [0.0], list[tuple[str, int]]()
    many = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(contest.time, "sleep", lambda s: None)
    monkeypatch.setattr(contest.time, "perf_counter", lambda: now[0])
    found._ready = {"short": [], "long": []}

    def spend(name: str) -> float:
        asked.append((name, torch.get_num_threads()))
        now[0] += {"short": 0.3, "long": 2.0}[name]
        return float(len(asked))

    monkeypatch.setattr(found, "_round", spend)
    try:
        assert found.times() == {"short": 1.0, "long": 2.0}
        assert [threads for name, threads in asked if name == "long"] == [2, 1, 2, 1, 2, 1]
        assert [threads for name, threads in asked if name == "short"] == [2, 1] * 4 and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(many)


def test_published_times_count_only_on_their_device(ours: Callable[..., None]) -> None:
    ours()
    mine = Case(SMALL.workload, {"fastkron": 5.0}, CPU.name)
    [here, elsewhere] = run_suite([mine, Case(mine.workload, mine.published, "NVIDIA H200")], CPU, [])
    assert here.published == {"fastkron": 5.0} and elsewhere.published == {}
    assert published_geomean([here, elsewhere], "fastkron") == pytest.approx(5.0 / (here.us or 1))


def test_devices_and_peers_that_are_not_there() -> None:
    with pytest.raises(UnsupportedError, match="not on this machine"):
        run_suite([SMALL], resolve_target("nvidia/h200"), [])
    with pytest.raises(ArgumentError, match="peer='me' is not allowed: choose one of torch_shuffle"):
        choose_peers([SMALL], ["me"])


def _row(us: float | None, peer: float | None, dtype: str = "float32", published: float = 0.0) -> Row:
    return Row(KronMatmul(1, ((2, 2),), dtype), us, {"p": peer}, 1.0, published={"p": published} if published else {})


def test_geomean_is_over_rows_that_have_both() -> None:
    rows = [_row(1.0, 2.0), _row(1.0, 8.0), _row(None, 5.0), _row(5.0, None)]
    assert geomean(rows, "p") == pytest.approx(4.0)
    assert geomean(rows[2:], "p") is None


def test_geomeans_by_dtype_and_rows_that_lose() -> None:
    rows = [_row(1.0, 2.0), _row(1.0, 0.5, "float16"), _row(1.0, 3.0, published=0.25)]
    assert by_dtype(rows, ["p"]) == {"float32": {"p": pytest.approx(6**0.5)}, "float16": {"p": pytest.approx(0.5)}}
    assert slower_than(rows, "p") == rows[1:]


@pytest.mark.parametrize(
    ("origin", "shown"),
    [
        ("log /tmp/res/a/kron-9c.jsonl, measured on NVIDIA H200", "log kron-9c.jsonl, measured on NVIDIA H200"),
        ("log out/k.jsonl, measured on A/B", "log k.jsonl, measured on A/B"),
        ("default, not measured", "default, not measured"),
    ],
)
def test_results_name_files_without_their_folders(origin: str, shown: str) -> None:
    assert without_folders(origin) == shown


def test_shipped_results_name_no_folder_of_the_machine_they_were_made_on() -> None:
    found = list((Path(__file__).parents[2] / "tuning_logs").rglob("*.json"))
    assert found and [path.name for path in found if "/tmp/" in path.read_text(encoding="utf-8")] == []


def test_weights_are_prepared_once_as_those_of_peers() -> None:
    bound: dict[str, torch.Tensor] = {}

    def bind(**tensors: torch.Tensor) -> Callable[..., str]:
        bound.update(tensors)
        return lambda *free: f"bound, called with {len(free)}"

    module: Any = SimpleNamespace(
        workload=KSMatmul(batch=4, pattern=((2, 3, 4, 1), (1, 2, 3, 2)), bias=True),
        bind=bind,
        manifest=SimpleNamespace(constant_launches=lambda names: (0,) if names == ("w0", "w1") else ()),
    )
    module.manifest.inputs = module.workload.inputs
    _, w0, w1, _ = inputs = module.workload.make_inputs(0)
    assert bench_run._call(module, inputs)() == "bound, called with 2"
    assert list(bound) == ["w0", "w1"] and bound["w0"] is w0 and bound["w1"] is w1
