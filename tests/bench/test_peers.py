from __future__ import annotations

import pickle
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kronsched import KronMatmul
from kronsched.bench import peers
from kronsched.bench.peers import PEERS, PeerUnavailable, kron, peers_of, register_peer
from kronsched.bench.peers.base import slack_of
from kronsched.dtypes import DTYPES
from kronsched.measure.check import max_relative_error

SMALL = KronMatmul(4, ((4, 3), (3, 4)))


@pytest.mark.parametrize("name", sorted(PEERS["kron"]))
@pytest.mark.parametrize("workload", [SMALL, KronMatmul(5, ((2, 2), (3, 3), (2, 4)))], ids=lambda w: w.label)
def test_installed_peers_are_right(name: str, workload: KronMatmul) -> None:
    inputs = workload.make_inputs(0)
    try:
        call = PEERS["kron"][name](workload, inputs)
    except PeerUnavailable as e:
        assert "not installed" in str(e) or "no kernel" in str(e)
        if name in ("torch_shuffle", "gpytorch"):  # in the test extra
            raise
        pytest.skip(str(e))
    assert max_relative_error(call().reshape(workload.output.shape), workload.reference(*inputs)) < DTYPES["float32"].tolerance


@pytest.mark.parametrize("group", PEERS)
def test_peers_and_their_marks_reach_the_runner_process(group: str) -> None:
    for peer in PEERS[group].values():
        there = pickle.loads(pickle.dumps(peer))
        assert slack_of(there) == slack_of(peer) and getattr(there, "information", 0) == getattr(peer, "information", 0)


def test_a_family_without_peers_has_its_baseline() -> None:
    [(name, baseline)] = peers_of("of_a_plugin").items()
    assert name == "baseline"
    inputs = SMALL.make_inputs(0)
    result = torch.as_tensor(baseline(SMALL, inputs)())
    assert max_relative_error(result, SMALL.reference(*inputs)) < DTYPES["float32"].tolerance
    with pytest.raises(PeerUnavailable, match="names no baseline"):
        baseline(SimpleNamespace(family="bare"), inputs)  # type: ignore[arg-type]


def test_a_registered_peer_takes_the_place_of_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PEERS", {})
    register_peer("mine", "fast", kron.torch_shuffle)
    assert dict(peers_of("mine")) == {"fast": kron.torch_shuffle}


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (subprocess.CompletedProcess([], 0, "", ""), ""),
        (subprocess.CompletedProcess([], 1, "", "Traceback\n\nRuntimeError: no kernel image\n"), "RuntimeError: no kernel image"),
        (subprocess.CompletedProcess([], -6, "", ""), "exit code -6"),
        (subprocess.TimeoutExpired([], 1), "took over"),
    ],
)
def test_fastkron_is_tried_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, outcome: Any, reason: str) -> None:
    def run(*args: Any, **options: Any) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(kron.subprocess, "run", run)
    found = kron._fastkron_fault.__wrapped__("cuda:0")  # not the cached one
    assert reason in found and bool(found) == bool(reason)
