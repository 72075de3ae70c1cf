"""`kronsched.quant.load`: every format round trip, what the values say against labels, and files, folders and indices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kronsched import quant
from kronsched.errors import ArgumentError
from tests.quant import checkpoint_cases as cases

NAME = "a.q_proj"


def same(source: Any, case: dict[str, Any], **options: Any) -> quant.Checkpoint:
    """The checkpoint of one layer, found to stand for the case's weights exactly."""
    found = quant.load(source, **options)
    assert list(found) == [NAME]
    assert torch.equal(found[NAME].unpack(), cases.dense(case))
    return found


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("k", "n", "group"), [(256, 64, 128), (384, 48, 32), (128, 40, -1), (192, 72, 64)])
@pytest.mark.parametrize("zeros", ["symmetric", "asymmetric"])
def test_gptq(version: int, k: int, n: int, group: int, zeros: str) -> None:
    case = cases.layer(k, n, group, zeros=zeros)
    found = same(cases.gptq(case, version), case)
    assert found.formats == {NAME: f"gptq_v{version}"}
    assert (found[NAME].zero_point, found[NAME].group_size) == (zeros, group)
    same(cases.gptq(case, version, g_idx=False), case)


def test_gptq_with_columns_that_do_not_fill_a_word() -> None:
    case = cases.layer(256, 44, 128)
    same(cases.gptq(case, 2), case)


def test_gptq_with_act_order() -> None:
    case = cases.layer(256, 48, 64)
    case["rows"] = case["rows"][torch.randperm(256, generator=torch.Generator().manual_seed(1))]
    case["q"] = cases.layer(256, 48, 64, seed=2)["q"]
    found = same(cases.gptq(case, 2), case, gptq_version=2)
    assert found[NAME].act_order and found[NAME].group_size == 64


@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("zeros", ["symmetric", "asymmetric"])
def test_gptq_values_win_over_the_label(write: Any, label: str, version: int, zeros: str) -> None:
    case = cases.layer(256, 64, 128, zeros=zeros)
    config = {"bits": 4, "group_size": 128, "sym": True, "desc_act": True, "checkpoint_format": label}
    same(write({"model.safetensors": cases.gptq(case, version)}, {"quantize_config.json": config}), case)


@pytest.mark.parametrize(("label", "offset"), [("gptq", 1), ("gptq_v2", 0)])
def test_gptq_label_counts_where_values_do_not_tell(write: Any, label: str, offset: int) -> None:
    case = cases.layer(256, 64, 128)
    case["q"] = (case["q"].int() + (torch.rand(256, 64) < 0.5)).clamp(max=15).to(torch.uint8)  # mean of q - zero: 0.5
    tensors = cases.gptq(case, 2)
    with pytest.raises(ArgumentError, match=r"do not tell GPTQ version 1 from 2.*pass gptq_version"):
        quant.load(tensors)
    config = {"bits": 4, "group_size": 128, "quant_method": "gptq", "checkpoint_format": label}
    case["zeros"] = case["zeros"] + offset
    same(write({"model.safetensors": tensors}, {"quantize_config.json": config}), case)
    same(tensors, case, gptq_version=2 - offset)


def test_gptq_v1_stored_15_is_16() -> None:
    case = cases.layer(128, 16, 64)
    case["zeros"][1, 3] = 16
    same(cases.gptq(case, 1), case, gptq_version=1)


def test_gptq_v1_made_by_one_subtraction_a_word() -> None:
    case = cases.layer(256, 64, 128)
    for group, column in ((0, 3), (1, 3), (1, 17), (0, 40), (0, 41)):
        case["zeros"][group, column] = 0
        rows = case["rows"] == group
        case["q"][rows, column] = (case["q"][rows, column].int() - 4).clamp(0, 15).to(torch.uint8)
    tensors = cases.gptq(case, 2)
    tensors["a.q_proj.qzeros"] = tensors["a.q_proj.qzeros"] - 0x11111111
    stored = tensors["a.q_proj.qzeros"]
    assert int(stored[0, 0] >> 12) & 15 == 15  # what was 0
    same(tensors, case, gptq_version=1)
    del tensors["a.q_proj.g_idx"]
    same(tensors, case, gptq_version=1)


def test_gptq_layers_that_disagree_are_refused() -> None:
    case = cases.layer(128, 16, 64, zeros="symmetric")
    both = {**cases.gptq(case, 1, "a."), **cases.gptq(case, 2, "b.")}
    with pytest.raises(ArgumentError, match=r"a\.qzeros is all 7 as in GPTQ version 1, b\.qzeros all 8.*pass gptq_version"):
        quant.load(both)


def test_awq() -> None:
    for shape in ((256, 64, 128), (96, 24, 32), (128, 16, -1)):
        case = cases.layer(*shape)
        assert same(cases.awq(case), case).formats == {NAME: "awq"}
    assert quant.load(cases.awq(cases.layer(64, 16, 32, zeros="symmetric")))[NAME].zero_point == "symmetric"


def test_compressed_tensors() -> None:
    for k, n, group in ((256, 64, 128), (96, 20, 32), (100, 12, -1)):
        case = cases.layer(k, n, group)
        assert same(cases.compressed(case), case).formats == {NAME: "compressed-tensors"}
        case = cases.layer(k, n, group, zeros="symmetric")
        assert same(cases.compressed(case, symmetric=True), case)[NAME].zero_point == "symmetric"
    case = cases.layer(256, 20, 64)
    unpacked = cases.compressed(case) | {f"{NAME}.weight_zero_point": (case["zeros"].T - 8).to(torch.int8)}
    same(unpacked | {f"{NAME}.weight_g_idx": torch.full((256,), -1)}, case)
    case["rows"] = case["rows"].flip(0)
    assert same(cases.compressed(case, act_order=True), case)[NAME].act_order


@pytest.mark.parametrize("encoded", [True, False])
def test_hqq(encoded: bool) -> None:
    for shape in ((256, 64, 64), (96, 20, -1)):
        case = cases.layer(*shape, zeros="float")
        found = same(cases.hqq(case, encoded), case)
        assert (found.formats[NAME], found[NAME].zero_point) == ("hqq", "float")
    tensors = cases.hqq(case, encoded)
    same(tensors | {f"{NAME}.W_q": tensors[f"{NAME}.W_q"].view(torch.float16)}, case)


def test_a_short_last_group_needs_a_config(write: Any) -> None:
    case = cases.layer(320, 16, 128)
    config = {"quantize_config.json": {"bits": 4, "group_size": 128}}
    for tensors in (cases.gptq(case, 2, g_idx=False), cases.awq(case)):
        with pytest.raises(ArgumentError, match="has 3 groups, which do not divide k=320"):
            quant.load(tensors)
        assert same(write({"model.safetensors": tensors}, config), case)[NAME].group_size == 128
    assert same(cases.gptq(case, 2), case)[NAME].group_size == 128  # g_idx says it


def test_files_folders_and_indices(write: Any) -> None:
    a, b = cases.layer(128, 16, 64), cases.layer(64, 24, 32, seed=1)
    first, second = cases.gptq(a, 2, "model.a."), cases.gptq(b, 2, "model.b.")
    bias = torch.arange(16).half()
    first |= {"model.a.bias": bias, "model.norm.weight": torch.ones(3)}
    moved = "model.b.scales"  # a layer may be spread over files
    files = {"x.safetensors": first | {moved: second[moved]}, "y.safetensors": {n: t for n, t in second.items() if n != moved}}
    folder = write(files)
    found = quant.load(folder)
    assert list(found) == ["model.a", "model.b"] and list(found.biases) == ["model.a"]
    assert torch.equal(found.biases["model.a"], bias)
    assert torch.equal(found["model.b"].unpack(), cases.dense(b))
    assert repr(found) == "<Checkpoint of 2 layers: gptq_v2>"
    assert list(quant.load(str(folder), layers="*.b")) == ["model.b"]
    assert list(quant.load(folder / "x.safetensors", layers="model.a")) == ["model.a"]
    index = {"weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "z.safetensors").write_bytes(b"not in the index")
    for source in (folder, folder / "model.safetensors.index.json"):
        assert torch.equal(quant.load(source)["model.a"].unpack(), cases.dense(a))


def test_configs_of_every_method(write: Any) -> None:
    case = cases.layer(256, 64, 128)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": False}
    configs: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (cases.awq, {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}),
        (
            cases.compressed,
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            },
        ),
        (
            lambda c: cases.gptq(c, 2),
            {"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": {"+:.*": {"group_size": 128}}},
        ),
    ]
    for writer, section in configs:
        same(write({"m.safetensors": writer(case)}, {"config.json": {"quantization_config": section}}), case)
    case = cases.layer(256, 64, 64, zeros="float")
    section = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}}
    same(write({"m.safetensors": cases.hqq(case, True)}, {"config.json": {"quantization_config": section}}), case)
    old = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
    case = cases.layer(256, 64, 128)
    same(write({"m.safetensors": cases.awq(case)}, {"quant_config.json": old, "config.json": {"hidden_size": 64}}), case)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes safetensors files and JSON configs into a new folder."""
    pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    def folder(files: dict[str, dict[str, Any]], configs: dict[str, Any] | None = None) -> Path:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        path.mkdir()
        for name, tensors in files.items():
            save_file(tensors, path / name)
        for name, content in (configs or {}).items():
            (path / name).write_text(json.dumps(content))
        return path

    return folder
