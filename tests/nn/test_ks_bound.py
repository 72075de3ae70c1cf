"""Weights kept in a kernel's order: when they are used and when not, and that what is kept serves every call."""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kronsched.dtypes import DTYPES
from kronsched.hardware import PRESETS
from kronsched.measure.check import max_relative_error
from kronsched.nn import KSLinear, ks_bound, ks_matmul
from kronsched.nn.ks_dynamic import KSKernels
from kronsched.runtime.bound import BoundModule
from kronsched.runtime.lower import lower
from kronsched.runtime.manifest import Manifest
from kronsched.runtime.module import TunedModule
from kronsched.schedules.ks_cuda_mma import KSCudaMma, KSCudaMmaLast
from kronsched.schedules.ks_cuda_tma import KSCudaTma
from kronsched.workloads.ks import KSMatmul
from tests.emulator.build import available
from tests.emulator.run import POISON, run_lowered
from tests.nn.ks_cases import LAYOUTS, ONE, data

H200 = PRESETS["nvidia/h200"]


class Noted:
    """A CUDA module as far as `serving` looks at it."""

    def __init__(self, constant: tuple[int, ...] = (0,)) -> None:
        self.artefact, self.device, self.bound = Path(f"/a/{id(self)}"), "cuda:0", 0
        names = [SimpleNamespace(name=name) for name in ("x", "w0", "w1")]
        self.manifest = SimpleNamespace(kind="cuda", inputs=names, constant_launches=lambda names: constant)

    def bind(self, **tensors: Tensor) -> BoundModule:
        assert list(tensors) == ["w0", "w1"] and not any(isinstance(t, nn.Parameter) for t in tensors.values())
        self.bound += 1
        made = object.__new__(BoundModule)
        made.bound = tensors
        return made


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ks_bound.clear()
    yield
    ks_bound.clear()


def _serves(module: Any, weights: list[Any]) -> bool:
    return isinstance(ks_bound.serving(module, weights), BoundModule)


def _parameters() -> list[nn.Parameter]:
    made = [nn.Parameter(torch.ones(2, 3)) for _ in range(2)]
    ks_bound.allow(made)
    return made


def test_nothing_is_kept_unasked() -> None:
    module, layer = Noted(), KSLinear([(2, 3, 1, 2), (2, 3, 3, 2)], bias=False)
    weights = list(layer.weights)
    assert not any(_serves(module, weights) for _ in range(3))
    assert layer.keep_packed() is layer
    assert [_serves(module, weights) for _ in range(3)] == [False, True, True]
    weights[0].data.zero_()  # not seen
    layer.keep_packed()
    assert [_serves(module, weights) for _ in range(2)] == [False, True]
    layer.keep_packed(False)
    assert not any(_serves(module, weights) for _ in range(3))


def test_bound_at_the_second_call() -> None:
    module, weights = Noted(), _parameters()
    assert [_serves(module, weights) for _ in range(4)] == [False, True, True, True] and module.bound == 1
    other = Noted()  # another batch
    assert [_serves(other, weights) for _ in range(2)] == [False, True]
    assert _serves(module, weights) and module.bound == 1


def _in_place(w: nn.Parameter) -> None:
    with torch.no_grad():
        w.mul_(2.0)


def _loaded(w: nn.Parameter) -> None:
    holder = nn.ParameterList([w])
    holder.load_state_dict({"0": torch.zeros(2, 3)})


def _stepped(w: nn.Parameter) -> None:
    w.grad = torch.ones_like(w)
    torch.optim.SGD([w], 0.1).step()


def _moved(w: nn.Parameter) -> None:
    w.data = torch.zeros(2, 3)


@pytest.mark.parametrize("change", [_in_place, _loaded, _stepped, _moved])
@pytest.mark.parametrize("which", [0, 1])
def test_a_changed_weight_is_packed_anew(change: Callable[[nn.Parameter], None], which: int) -> None:
    module, weights = Noted(), _parameters()
    for _ in range(2):
        assert [_serves(module, weights) for _ in range(2)] == [False, True]
        change(weights[which])
    assert module.bound == 2


def test_training_forgets_what_was_kept() -> None:
    module, weights = Noted(), _parameters()
    assert [_serves(module, weights) for _ in range(2)] == [False, True]
    ks_bound.forget(weights[:1])
    assert [_serves(module, weights) for _ in range(2)] == [False, True]
    weights[1] = nn.Parameter(weights[1].detach())  # the same memory and version, another parameter
    ks_bound.allow(weights[1:])
    assert not _serves(module, weights)


def test_what_is_never_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [torch.ones(2, 3), torch.ones(2, 3)]
    vain = Noted(())
    with torch.inference_mode():
        frozen = _parameters()
    for module, weights in ((Noted(), plain), (vain, _parameters()), (Noted(), frozen)):
        assert not any(_serves(module, weights) for _ in range(3))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    weights = _parameters()
    assert not any(_serves(Noted(), weights) for _ in range(3))


def test_nothing_is_kept_of_a_dead_parameter() -> None:
    weights = _parameters()
    module = Noted()
    assert [_serves(module, weights) for _ in range(2)] == [False, True]
    assert len(ks_bound._kept) == 1
    del weights
    gc.collect()
    assert len(ks_bound._kept) == 0


def test_layers_ask_only_where_no_gradient_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, asked = KSLinear((2, 3, 1, 2), bias=False), []

    def kernels(self: KSKernels, x: Tensor, weights: Any, bias: Any = None, residual: Any = None, keep: bool = False) -> Tensor:
        asked.append(keep)
        return x.new_zeros(x.shape[0], 12)

    monkeypatch.setattr(KSKernels, "__call__", kernels)
    x = torch.ones(2, 4)
    layer(x)
    with torch.no_grad():
        layer(x)
        ks_matmul(x, list(layer.weights), bias=torch.ones(12))
    assert asked == [False, True, True]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [4, 5])  # one call, and rows in two or columns in a larger bucket
def test_every_way_of_calling_takes_bound_modules(monkeypatch: pytest.MonkeyPatch, layout: str, n: int) -> None:
    """On a CPU, where a module that is bound to weights is the module itself."""
    made: list[BoundModule] = []

    def bind(module: TunedModule, weights: list[Tensor]) -> BoundModule:
        names = [spec.name for spec in module.manifest.inputs[1 : 1 + len(weights)]]
        made.append(module.bind(**{name: w.detach() for name, w in zip(names, weights, strict=True)}))
        return made[-1]

    monkeypatch.setattr(TunedModule, "bind_executable", lambda module, tensors: module._executable)
    monkeypatch.setattr(ks_bound, "serving", bind)
    layer = KSLinear(ONE, layout=layout, dtype=torch.float64, bias=False)
    x = data(n, layer.in_features, layout)
    with torch.no_grad():
        y = layer(x)
        want = x @ layer.dense_weight().T if layout == "batch_first" else layer.dense_weight() @ x
    torch.testing.assert_close(y, want)
    assert made and all(bound.once for bound in made)


# -- what is kept serves every call -----------------------------------------------------------------------

MMA = {"mt": 1, "warps_m": 2, "warps_j": 1, "warps_l": 1, "pairs": 1, "lunits": 1, "ksteps": 1, "stages": 3, "groups": 1,
       "weights": "resident", "store": "direct", "min_blocks": 1, "waves": 1, "mma": "sync"}  # fmt: skip
LAST = {"mj": 1, "units": 1, "warps_j": 2, "warps_n": 2, "ksteps": 1, "stages": 3, "weights": "stream", "min_blocks": 1,
        "waves": 1, "mma": "sync", "vector": 16}  # fmt: skip
TMA = {"block_m": 64, "block_n": 64, "warpgroups": 1, "stages": 2, "pingpong": False}
CASES = [
    (KSCudaMma(), MMA, KSMatmul(40, ((2, 16, 24, 1), (1, 16, 16, 2)), "float16")),
    pytest.param(KSCudaMmaLast(), LAST, KSMatmul(64, (2, 20, 24, 2), "float16", "batch_last"), marks=pytest.mark.slow),
    pytest.param(KSCudaTma(), TMA, KSMatmul(64, (1, 64, 64, 2), "float16", "batch_last"), marks=pytest.mark.slow),
]


@pytest.mark.skipif(available() is not None, reason=str(available()))
@pytest.mark.parametrize(("schedule", "config", "workload"), CASES)
def test_kernels_read_what_was_packed_before(schedule: Any, config: dict[str, Any], workload: KSMatmul) -> None:
    """In the emulator: the packing once, then two calls with other samples, which leave it as it is."""
    lowered = lower(workload, schedule, config, H200)
    names = [spec.name for spec in workload.inputs[1:]]
    manifest: Any = SimpleNamespace(launches=lowered.launches, scratch=lowered.scratch)
    constant = Manifest.constant_launches(manifest, names)
    assert len(constant) == len(workload.patterns)
    used = frozenset[str]().union(*(lowered.launches[i].tensors for i in constant))
    own = {t.name: np.full(t.nbytes, POISON, np.uint8) for t in lowered.scratch if t.name in used}
    inputs = workload.make_inputs(0)
    weights = {name: _bytes(t) for name, t in zip(names, inputs[1:], strict=True)}
    once = dataclasses.replace(lowered, launches=tuple(lowered.launches[i] for i in constant), scratch=())
    run_lowered(once, {**weights, **own})
    packed = copy.deepcopy(own)
    rest = tuple(launch for i, launch in enumerate(lowered.launches) if i not in constant)
    call = dataclasses.replace(lowered, launches=rest, scratch=tuple(t for t in lowered.scratch if t.name not in used))
    for seed in (1, 2):
        x = workload.make_inputs(seed)[0]
        y = torch.full(workload.output.shape, float("nan"), dtype=DTYPES[workload.dtype].torch())
        run_lowered(call, {"x": _bytes(x), "y": _bytes(y), **own}, order="random")
        assert max_relative_error(y, workload.reference(x, *inputs[1:])) < 2e-3
        assert all(np.array_equal(own[name], packed[name]) for name in own)


def _bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


# -- on a GPU ---------------------------------------------------------------------------------------------


@pytest.fixture
def layer() -> KSLinear:
    torch.manual_seed(0)
    return KSLinear((1, 768, 192, 2), device="cuda", dtype=torch.float16).keep_packed()


def _right(layer: KSLinear, x: Tensor) -> bool:
    want = x.double() @ layer.dense_weight().detach().double().T + layer.bias.detach().double()  # type: ignore[union-attr]
    with torch.no_grad():
        return all(max_relative_error(layer(x), want) < 1e-2 for _ in range(3))


@pytest.mark.cuda
def test_gpu_results_follow_the_weights(layer: KSLinear) -> None:
    x = torch.randn(1024, 384, device="cuda", dtype=torch.float16)
    assert _right(layer, x) and len(ks_bound._kept) == 1
    _, bound = next(iter(ks_bound._kept[layer.weights[0]].values()))
    assert bound.once
    with torch.no_grad():
        layer.weights[0].mul_(-0.5)
    assert _right(layer, x)
    assert _right(layer, x[:197])  # two kernel calls
    layer.load_state_dict(KSLinear(layer.patterns, device="cuda", dtype=torch.float16).state_dict())
    assert _right(layer, x)
    layer(x).sum().backward()
    assert layer.weights[0] not in ks_bound._kept
    torch.optim.SGD(layer.parameters(), 1e-3).step()
    assert _right(layer, x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert _right(layer, x)
    torch.cuda.current_stream().wait_stream(side)


@pytest.mark.cuda
def test_gpu_calls_one_behind_the_other_see_what_the_one_before_wrote() -> None:
    """Kernels may start early: none may read what the call before it still writes."""
    x = torch.randn(16_384, 384, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        square = KSLinear((1, 192, 192, 2), device="cuda", dtype=torch.float16).keep_packed()
        for _ in range(3):
            want = [x]
            for _ in range(8):
                want.append(square(want[-1]))
                torch.cuda.synchronize()
            for _ in range(5):
                y = x
                for _ in range(8):
                    y = square(y)
                assert torch.equal(y, want[-1])


@pytest.mark.cuda
def test_gpu_a_graph_reads_weights_that_change_after_its_capture(layer: KSLinear) -> None:
    x = torch.randn(1024, 384, device="cuda", dtype=torch.float16)
    assert _right(layer, x)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = layer(x)
    with torch.no_grad():
        layer.weights[0].mul_(2.0)
    graph.replay()
    with torch.no_grad():
        torch.testing.assert_close(y, layer(x), rtol=0, atol=0)
