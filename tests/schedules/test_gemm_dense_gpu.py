"""The dense Gemm on a GPU: odd shapes of every dtype, repeatability, many addresses, graphs, through the public call."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from kronsched import Gemm, registry
from kronsched.errors import InvalidConfig
from kronsched.hardware import resolve_target
from kronsched.measure.check import max_relative_error
from kronsched.runtime.build import build_artefact
from kronsched.runtime.module import TunedModule

pytestmark = pytest.mark.cuda
# A few roundings of the output; float8 sums keep fewer bits than float32 on the tensor cores for up to 512 terms.
BOUND = {"float16": 2e-3, "bfloat16": 8e-3, "int32": 0.0}


def dense(m: int, n: int, k: int, dtype: str, out_dtype: str = "") -> Gemm:
    return Gemm(m, n, k, dtype, dtype, out_dtype=out_dtype)


CASES = [
    dense(4000, 4104, 4040, "float16"),
    dense(1, 1, 8, "float16"),
    dense(1, 4096, 4096, "bfloat16"),
    dense(129, 257, 136, "bfloat16"),
    dense(4097, 1000, 264, "float16"),
    dense(65, 4096, 100, "float16"),
    dense(33, 31, 1, "bfloat16"),
    dense(300, 1000, 80, "int8", "int32"),
    dense(1000, 1001, 1008, "int8"),
    dense(17, 13, 7, "int8", "int32"),
    dense(512, 512, 16384, "int8", "bfloat16"),
    dense(333, 264, 272, "float8_e5m2", "float16"),
    dense(256, 512, 8192, "float8_e4m3fn"),
    dense(77, 99, 33, "float8_e4m3fn", "float16"),
]


def built(w: Gemm, name: str, where: Path, seed: int | None = None) -> TunedModule | None:
    """A module of a schedule's default config (seed None) or of a random one; None where it does not serve the workload."""
    device, schedule = resolve_target("cuda"), registry.schedule(name)
    if schedule.supports(w, device) is not None:
        return None
    config = schedule.default_config(w, device)
    if seed is not None:
        found = schedule.space(w, device).sample(random.Random(seed))
        config = config if found is None else found.config
    try:
        build_artefact(w, schedule, config, device, where)
    except InvalidConfig:
        assert seed is not None, "the default config must build"
        return None
    return TunedModule.from_artefact(where)


@pytest.mark.parametrize("name", ["gemm_dense_wgmma", "gemm_dense_cuda_mma"])
@pytest.mark.parametrize("w", CASES, ids=lambda w: w.label)
def test_every_config_is_right_and_repeatable(w: Gemm, name: str, tmp_path: Path) -> None:
    inputs = w.make_inputs(1, "cuda")
    reference = w.reference(*inputs)
    for seed in (None, 0, 1):
        mod = built(w, name, tmp_path / str(seed), seed)
        if mod is None:
            continue
        out = torch.full(reference.shape, float("nan") if w.out_dtype != "int32" else -1, device="cuda", dtype=mod(*inputs).dtype)
        mod(*inputs, out=out)
        assert max_relative_error(out, reference) <= BOUND[w.out_dtype], f"{dict(mod.config)}"
        assert torch.equal(out, mod(*inputs)), f"{dict(mod.config)}"


@pytest.mark.parametrize(
    "w", [dense(300, 520, 4096, "float16"), dense(1000, 1001, 1008, "int8"), dense(640, 130, 656, "float8_e4m3fn")]
)
def test_clusters_are_right(w: Gemm, tmp_path: Path) -> None:
    """An odd number of rows of tiles among them: the second block of the last cluster has nothing of its own to compute."""
    device, schedule = resolve_target("cuda"), registry.schedule("gemm_dense_wgmma")
    inputs = w.make_inputs(1, "cuda")
    reference = w.reference(*inputs)
    for i, (block_m, warpgroups, split_k) in enumerate([(64, 1, 1), (128, 2, 1), (192, 3, 1), (128, 1, 2), (64, 1, 3)]):
        promote = 2 if w.a_dtype.startswith("float8") else 0
        shape = {"block_m": block_m, "block_n": 64, "warpgroups": warpgroups, "split_k": split_k}
        config = {**shape, "stages": 4, "group": 1, "cluster": 2, "promote": promote, "pair": promote > 0, "pingpong": False}
        build_artefact(w, schedule, config, device, tmp_path / str(i))
        mod = TunedModule.from_artefact(tmp_path / str(i))
        for _ in range(3):
            assert max_relative_error(mod(*inputs), reference) <= BOUND[w.out_dtype], f"{config}"


@pytest.mark.parametrize("w", [dense(300, 520, 1003, "float16"), dense(129, 67, 77, "int8"), dense(65, 72, 515, "float8_e4m3fn")])
def test_rows_that_tma_cannot_read_are_copied_first(w: Gemm, tmp_path: Path) -> None:
    """Call after call with other values: the launches overlap, and each call's copies must be its own."""
    for seed in (None, 2):
        mod = built(w, "gemm_dense_wgmma", tmp_path / str(seed), seed)
        assert mod is not None
        calls = [w.make_inputs(i, "cuda") for i in range(8)]
        outs = [mod(*inputs) for _ in range(4) for inputs in calls]
        for out, inputs in zip(outs, calls * 4, strict=True):
            assert max_relative_error(out, w.reference(*inputs)) <= BOUND[w.out_dtype], f"{dict(mod.config)}"


def test_tensors_at_many_addresses_and_in_views(tmp_path: Path) -> None:
    """A tensor map holds an address: each new one must be encoded anew, and none may be served another's."""
    w = dense(64, 128, 64, "float16")
    mod = built(w, "gemm_dense_wgmma", tmp_path / "a")
    assert mod is not None
    pool = torch.randn(200, 64, 64, device="cuda").half()
    weight = torch.randn(128, 64, device="cuda").half()
    for _ in range(2):
        for x in pool:
            torch.testing.assert_close(mod(x, weight), x @ weight.T, rtol=1e-2, atol=1e-2)
    shifted = torch.randn(64 * 64 + 1, device="cuda").half()[1:].view(64, 64)  # 2 bytes past a 16-byte boundary
    torch.testing.assert_close(mod(shifted, weight), shifted @ weight.T, rtol=1e-2, atol=1e-2)


def test_a_captured_call_keeps_its_addresses(tmp_path: Path) -> None:
    w = dense(64, 128, 64, "bfloat16")
    mod = built(w, "gemm_dense_wgmma", tmp_path / "a")
    assert mod is not None
    x, weight = w.make_inputs(0, "cuda")
    out = torch.empty(64, 128, device="cuda", dtype=torch.bfloat16)
    mod(x, weight, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mod(x, weight, out=out)
    others = [w.make_inputs(seed, "cuda") for seed in range(1, 100)]
    for other in others:  # push the captured addresses out of the cache
        mod(*other)
    x.copy_(others[0][0])
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert max_relative_error(out, w.reference(x, weight)) <= BOUND["bfloat16"]


def test_int8_extremes_are_exact(tmp_path: Path) -> None:
    w = dense(128, 128, 131056, "int8", "int32")
    mod = built(w, "gemm_dense_wgmma", tmp_path / "a")
    assert mod is not None
    x = torch.full((128, w.k), -128, dtype=torch.int8, device="cuda")
    assert (mod(x, x) == 128 * 128 * w.k).all()
