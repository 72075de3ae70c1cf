"""Peers for 4-bit weights on a CPU, the paper's decompositions as configs, and the w4a16 suites."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kronsched import Gemm, KronMatmul, registry
from kronsched.bench.groups import group_of
from kronsched.bench.peers import PEERS, PeerUnavailable, peers_for, w4a16
from kronsched.bench.peers.base import SLACK, slack_of
from kronsched.bench.peers.w4a16_paper import SPACE, paper_config, prebuild
from kronsched.bench.peers.w4a16_weights import plain
from kronsched.bench.suites import load_cases, suite_names
from kronsched.cli.root import run
from kronsched.dtypes import DTYPES
from kronsched.hardware import PRESETS, resolve_target
from kronsched.measure.check import max_relative_error
from kronsched.quant import pack

H200 = PRESETS["nvidia/h200"]
KINDS = [
    Gemm(3, 64, 256, group_size=64),
    Gemm(3, 64, 256, group_size=64, zero_point="asymmetric"),
    Gemm(2, 64, 256, "bfloat16", group_size=-1, zero_point="float"),
]


@pytest.mark.parametrize("workload", KINDS, ids=lambda w: w.label)
@pytest.mark.parametrize("name", ["cublas", "tinygemm", "dequantise_cublas"])
def test_peers_of_torch_are_right(workload: Gemm, name: str) -> None:
    inputs = workload.make_inputs(0)
    y = peers_for(workload)[name](workload, inputs)()
    assert max_relative_error(torch.as_tensor(y), workload.reference(*inputs)) <= DTYPES[workload.a_dtype].tolerance


@pytest.mark.parametrize(
    "workload", [Gemm(3, 60, 100, group_size=32), Gemm(3, 64, 128, group_size=32, act_order=True)], ids=lambda w: w.label
)
def test_the_dense_product_serves_every_kind(workload: Gemm) -> None:
    inputs = workload.make_inputs(0)
    y = torch.as_tensor(w4a16.cublas(workload, inputs)())
    assert max_relative_error(y, workload.reference(*inputs)) <= DTYPES[workload.a_dtype].tolerance
    y = torch.as_tensor(w4a16.dequantise_cublas(workload, inputs)())
    assert max_relative_error(y, workload.reference(*inputs)) <= DTYPES[workload.a_dtype].tolerance
    with pytest.raises(PeerUnavailable, match=r"groups of 32 in k=100|act-order"):
        w4a16.tinygemm(workload, inputs)


@pytest.mark.parametrize("name", ["gemlite", "humming", "splitk_paper", "dataparallel_paper"])
def test_peers_for_gpus_say_so(name: str) -> None:
    with pytest.raises(PeerUnavailable, match=r"CPU|GPU"):
        PEERS["w4a16"][name](KINDS[0], KINDS[0].make_inputs(0))


@pytest.mark.parametrize("zeros", [True, False])
def test_plain_weights_are_those_that_were_packed(zeros: bool) -> None:
    gen = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (200, 40), generator=gen, dtype=torch.uint8)
    scales = torch.rand(4, 40, generator=gen).half()
    z = torch.randint(0, 17, (4, 40), generator=gen) if zeros else None
    pw = pack(q, scales, z, 64)
    workload = Gemm(1, 40, 200, group_size=64, zero_point=pw.zero_point)
    found = plain(workload, [torch.ones(1, 200).half(), *pw.tensors("float16", pw.zero_point, False)])
    assert torch.equal(found.q, q.T) and torch.equal(found.scales, scales.T) and found.group_size == 64
    assert (found.zeros is None) if z is None else torch.equal(found.zeros, z.T.float())  # type: ignore[arg-type]
    torch.testing.assert_close(found.dense().double(), pw.unpack().T, rtol=1e-3, atol=0)
    words = found.words()
    assert words.dtype == torch.int32 and torch.equal((words[:, 2] >> 4) & 15, q[17].int())


def test_only_a_narrower_peer_gets_more_slack() -> None:
    assert slack_of(w4a16.cublas) == SLACK < slack_of(w4a16.tinygemm)


@pytest.mark.parametrize("case", load_cases("w4a16", "anchors"), ids=lambda c: c.workload.label)
def test_the_papers_decompositions_are_configs_of_our_schedule(case: object) -> None:
    workload = case.workload  # type: ignore[attr-defined]
    schedule = registry.schedule(SPACE)
    space = schedule.space(workload, H200)
    single = paper_config(workload, H200, split=False)
    assert single["split_k"] == 1 and 16 * single["strips"] * single["warps_n"] == 32 and space.invalid(single) is None
    try:
        split = paper_config(workload, H200, split=True)
    except PeerUnavailable as e:
        assert workload.n >= 16384 and "has k split" in str(e)
    else:
        assert split["split_k"] > 1 and space.invalid(split) is None


def test_kernels_of_the_papers_decompositions_are_built_ahead() -> None:
    jobs: list[tuple[object, ...]] = []

    class Builders:
        def schedule(self, task: object, *args: object, timeout: float) -> Future[None]:
            jobs.append((task, *args))
            done: Future[None] = Future()
            done.set_result(None)
            return done

    crew = SimpleNamespace(workers=lambda: (Builders(), []))
    workloads = [Gemm(1, 4096, 4096), Gemm(64, 28672, 8192), KronMatmul(2, ((2, 2),))]
    prebuild(workloads, ["cublas", "splitk_paper"], H200, crew)  # type: ignore[arg-type]
    assert jobs[0][1] == workloads[0] and jobs[0][3]["split_k"] > 1  # type: ignore[index]
    assert all(job[2] == SPACE and job[1] in workloads[:2] for job in jobs)
    prebuild(workloads, ["splitk_paper"], resolve_target("cpu"), crew)  # type: ignore[arg-type]
    assert len(jobs) <= 2


def test_suites_are_of_gemm_and_carry_published_times() -> None:
    names = suite_names("w4a16")
    assert names[0] == "anchors" and {"cpu", "variants", "ragged", "kinds", "wide", "adversarial"} <= set(names)
    anchors = load_cases("w4a16")
    assert len(anchors) == 30 and {c.workload.family for c in anchors} == {"gemm"}
    first = anchors[0]
    assert first.workload == Gemm(1, 4096, 4096) and first.published == pytest.approx(
        {"tinygemm": 6.8, "cublas": 12.7, "splitk_triton": 15.4}
    )
    assert all(c.published for c in anchors)
    assert not any(c.published for c in load_cases("w4a16", "anchors", ["bfloat16"]))


def test_each_kind_of_weights_has_the_same_sizes_and_its_group() -> None:
    groups: dict[str, list[tuple[int, int, int]]] = {}
    for case in load_cases("w4a16", "variants"):
        w = case.workload
        assert isinstance(w, Gemm)
        groups.setdefault(group_of(w), []).append((w.m, -(-w.n // 64), -(-w.k // 128)))
    kinds = ["float16", "bfloat16", "float16 asymmetric", "float16 float", "float16 act-order", "float16 ragged"]
    assert list(groups) == kinds and all(sizes == groups["float16"] for sizes in groups.values())
    assert len(groups["float16"]) == 18


def test_dtype_is_that_of_x() -> None:
    labels = [c.workload.compute_dtype for c in load_cases("w4a16", "cpu", ["float16", "bfloat16"], limit=1)]
    assert labels == ["float16", "bfloat16"]


def test_bench_runs_on_a_cpu(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from kronsched.bench import contest

    monkeypatch.setitem(contest.ROUNDS, "cpu", 2)
    monkeypatch.setattr(contest, "SETTLE_S", 0.0)
    monkeypatch.setattr(contest, "MAX_ROTATION", 2)
    monkeypatch.setitem(contest.PLANS, "cpu", replace(contest.PLANS["cpu"], budget_s=0.02))
    assert run(["bench", "w4a16", "--suite", "cpu", "--limit", "1", "--target", "cpu", "--json"]) == 0
    out, _ = capfd.readouterr()
    [row] = (found := json.loads(out))["rows"]
    assert found["suite"] == "w4a16/cpu" and {"gemlite", "humming-kernels"} <= set(found["versions"])
    assert row["us"] > 0 and 0 < row["error"] < 6e-4 and row["peers"]["cublas"] > 0 and row["peers"]["tinygemm"] > 0
    assert row["peers"]["humming"] is None and "CPU" in row["notes"]["humming"]
