from __future__ import annotations

import math
import sys

import pytest
import torch

from kronsched import KSMatmul
from kronsched.bench.peers import PEERS, PeerUnavailable, peers_for
from kronsched.bench.peers import ks as ks_peers
from kronsched.bench.peers.base import slack_of
from kronsched.nn import ks_select_library as library
from kronsched.workloads.ks import LAYOUTS

PATTERNS = [(2, 3, 5, 1), (1, 4, 3, 2), (2, 3, 5, 4), (3, 2, 4, 2), (1, 3, 2, 1), ((2, 3, 4, 2), (1, 6, 12, 1))]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_peers_compute_the_product_or_say_why_not(pattern: object, layout: str) -> None:
    w = KSMatmul(batch=7, pattern=pattern, dtype="float64", layout=layout)  # type: ignore[arg-type]
    inputs = w.make_inputs(0)
    want, served = w.reference(*inputs), set()
    for name, peer in peers_for(w).items():
        try:
            y = peer(w, inputs)()
        except PeerUnavailable as e:
            assert str(e)
            continue
        served.add(name)
        torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
    assert {"bmm", "einsum", "dense"} <= served
    single = len(w.patterns) == 1
    assert not single or ("strided_bmm" in served) == library.serves("strided_bmm", w.patterns[0], layout == "batch_first")
    assert not single or ("block_dense" in served) == library.serves("block_dense", w.patterns[0], layout == "batch_first")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_peers_of_an_epilogue_are_followed_by_passes(layout: str) -> None:
    w = KSMatmul(7, (2, 3, 5, 1), "float64", layout, bias=True, activation="gelu", residual=True)
    inputs = w.make_inputs(0)
    peers = peers_for(w)
    assert "unfused" in peers and "unfused" not in peers_for(w.plain)
    for peer in peers.values():
        torch.testing.assert_close(peer(w, inputs)(), w.reference(*inputs), rtol=1e-12, atol=1e-12)


def test_bmm_on_views_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    w = KSMatmul(batch=8, pattern=(3, 2, 4, 2), layout="batch_last")
    x, weight = w.make_inputs(0)
    seen: list[torch.Tensor] = []
    real = torch.bmm

    def spy(a: torch.Tensor, b: torch.Tensor, **kw: torch.Tensor) -> torch.Tensor:
        seen.append(b)
        return real(a, b, **kw)

    call = library.strided_bmm(weight, False)
    monkeypatch.setattr(torch, "bmm", spy)
    call(x)
    assert len(seen) == 2  # min(a, d) calls
    assert all(t.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for t in seen)


def test_a_hopeless_dense_matrix_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    w = KSMatmul(batch=64, pattern=(64, 2, 2, 64))
    monkeypatch.setattr(library, "dense_matrix", lambda w: pytest.fail("made"))
    with pytest.raises(PeerUnavailable, match="times the floor"):
        PEERS["ks"]["dense"](w, w.make_inputs(0))


def test_what_is_for_information_does_not_count() -> None:
    peers = PEERS["ks"]
    shown = {name for name, peer in peers.items() if getattr(peer, "information", False)}
    assert shown == {"block_dense", "strided_bmm_tf32"}
    assert slack_of(peers["strided_bmm_tf32"]) == ks_peers.TF32_SLACK and slack_of(peers["bmm"]) == 4.0


def test_dense_matrix_is_the_kronecker_sparse_one() -> None:
    w = torch.arange(1.0, 1 + 2 * 3 * 2 * 2).reshape(2, 3, 2, 2)
    matrix = library.dense_matrix(w)
    support = torch.block_diag(*[torch.kron(torch.ones(3, 2), torch.eye(2))] * 2)
    assert torch.equal(matrix != 0, support != 0) and matrix[2, 1] == 0 and matrix[2, 0] == w[0, 1, 0, 0]
    assert math.isclose(float(matrix.sum()), float(w.sum()))


def test_lazylinop_says_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lazylinop.butterfly", None)
    w = KSMatmul(batch=4, pattern=(1, 2, 2, 1), layout="batch_last")
    with pytest.raises(PeerUnavailable, match="pip install lazylinop"):
        PEERS["ks"]["lazylinop"](w, w.make_inputs(0))
    first = KSMatmul(batch=4, pattern=(1, 2, 2, 1))
    with pytest.raises(PeerUnavailable, match="batch-last only"):
        PEERS["ks"]["lazylinop"](first, first.make_inputs(0))
