"""Wrong checkpoints: one clear line each that names file, tensor and value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kronsched import quant
from kronsched.errors import ArgumentError, ArgumentTypeError, UnsupportedError, UserError
from tests.quant import checkpoint_cases as cases

NAME = "a.q_proj"


def line(source: Any, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        quant.load(source, **options)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    return text


def gptq(**changes: Any) -> dict[str, Any]:
    tensors = cases.gptq(cases.layer(256, 64, 128), 2)
    for name, value in changes.items():
        tensors[f"{NAME}.{name}"] = value
    return {name: t for name, t in tensors.items() if t is not None}


@pytest.mark.parametrize("missing", ["qzeros", "scales"])
def test_missing_tensor(missing: str) -> None:
    assert line(gptq(**{missing: None})) == f"tensors: {NAME}.{missing} is missing"
    awq = cases.awq(cases.layer(256, 64, 128))
    del awq[f"{NAME}.{missing}"]
    assert line(awq) == f"tensors: {NAME}.{missing} is missing"


def test_k_not_a_multiple_of_8() -> None:
    assert "a.q_proj.g_idx has 252 values: k must be a multiple of 8" in line(gptq(g_idx=torch.zeros(252, dtype=torch.int32)))
    assert "a.q_proj.g_idx has shape (248,): (256,) is needed" in line(gptq(g_idx=torch.zeros(248, dtype=torch.int32)))


@pytest.mark.parametrize("value", [2, -1])
def test_g_idx_out_of_range(value: int) -> None:
    g_idx = torch.arange(256, dtype=torch.int32) // 128
    g_idx[7] = value
    assert line(gptq(g_idx=g_idx)) == f"tensors: {NAME}.g_idx holds the value {value}: groups 0 to 1 are needed"


@pytest.mark.parametrize("value", [-7, 2, 2**31 - 1])
def test_g_idx_of_compressed_tensors_out_of_range(value: int) -> None:
    tensors = cases.compressed(cases.layer(256, 64, 128), act_order=True)
    tensors[f"{NAME}.weight_g_idx"][7] = value
    assert line(tensors) == f"tensors: {NAME}.weight_g_idx holds the value {value}: groups 0 to 1 are needed"
    tensors[f"{NAME}.weight_g_idx"] = torch.zeros(255, dtype=torch.int32)
    assert f"{NAME}.weight_g_idx has shape (255,): (256,) is needed" in line(tensors)


def test_g_idx_that_is_no_integer() -> None:
    assert f"{NAME}.g_idx has dtype float32, an integer dtype is needed" in line(gptq(g_idx=torch.zeros(256)))


def test_a_group_too_full() -> None:
    g_idx = torch.arange(256, dtype=torch.int32) // 128
    g_idx[200] = 0
    with pytest.raises(UnsupportedError, match=r"layer 'a\.q_proj': g_idx puts 129 rows in group 0"):
        quant.load(gptq(g_idx=g_idx), gptq_version=2)


def test_shapes_that_do_not_fit() -> None:
    assert "qzeros has shape (2, 16): (2, 8) is needed for 4 bits" in line(gptq(qzeros=torch.zeros(2, 16, dtype=torch.int32)))
    assert "qweight has shape (32, 64), scales (2, 60): for 4 bits" in line(gptq(scales=torch.ones(2, 60).half()))
    assert "qweight has dtype int64, int32 is needed" in line(gptq(qweight=torch.zeros(32, 64, dtype=torch.int64)))
    assert "scales has shape (64,): 2 dimensions" in line(gptq(scales=torch.ones(64)))
    assert "scales holds NaN or infinity" in line(gptq(scales=torch.full((2, 64), torch.nan)))
    bias = cases.gptq(cases.layer(256, 64, 128), 2) | {f"{NAME}.bias": torch.zeros(63)}
    assert "bias has shape (63,): (64,) is needed" in line(bias)


def test_group_size_that_does_not_divide(write: Any) -> None:
    tensors = cases.gptq(cases.layer(256, 64, 64), 2, g_idx=False)
    folder = write(tensors, {"bits": 4, "group_size": 96})
    text = line(folder)
    assert f"{NAME}.scales has 4 groups for k=256, which group_size=96 of {folder}/quantize_config.json does not give" in text
    assert "model.safetensors: " in text
    (folder / "quantize_config.json").unlink()
    scales = torch.ones(3, 64).half()
    text = line({**tensors, f"{NAME}.scales": scales, f"{NAME}.qzeros": torch.zeros(3, 8, dtype=torch.int32)}, gptq_version=2)
    assert text == f"tensors: {NAME}.scales has 3 groups, which do not divide k=256: a config with group_size is needed"
    text = line(cases.awq(cases.layer(64, 16, 16)))
    assert text == f"tensors: layer '{NAME}': group_size=16 is not allowed: -1 (one group) or a multiple of 32 is needed"


def test_compressed_and_hqq() -> None:
    tensors = cases.compressed(cases.layer(256, 64, 128))
    wrong = tensors | {f"{NAME}.weight_shape": torch.tensor([64, 128])}
    assert "weight_packed has shape (64, 32): (64, 16) is needed for 4 bits and weight_shape=64, 128" in line(wrong)
    assert "3 dimensions" in line(tensors | {f"{NAME}.weight_packed": torch.zeros(2, 64, 32, dtype=torch.int32)})
    assert "weight_zero_point has shape (4, 2): (8, 2)" in line(
        tensors | {f"{NAME}.weight_zero_point": torch.zeros(4, 2, dtype=torch.int32)}
    )
    tensors = cases.hqq(cases.layer(256, 64, 64, zeros="float"), True)
    assert "nbits is 8: only 4 is supported" in line(tensors | {f"{NAME}.nbits": torch.tensor(8)})
    assert "axis is 0: only 1 is supported" in line(tensors | {f"{NAME}.axis": torch.tensor(0)})
    assert "shape is missing" in line({n: t for n, t in tensors.items() if not n.endswith("shape")})
    assert "do not make up shape=64, 128" in line(tensors | {f"{NAME}.shape": torch.tensor([64, 128])})
    packing = torch.tensor([ord(c) for c in "3bit_32"], dtype=torch.uint8)
    assert "packing is '3bit_32'" in line(tensors | {f"{NAME}.packing": packing})


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"bits": 8, "group_size": 128}, "bits=8 is not supported: 4 is needed"),
        ({"bits": 4, "group_size": "128"}, "group_size='128' is not allowed"),
        ({"bits": 4, "group_size": 0}, "group_size=0 is not allowed"),
        ({"bits": 4, "checkpoint_format": "marlin"}, "weights laid out for marlin are not supported"),
        ({"bits": 4, "quant_method": "bitsandbytes"}, "quant_method='bitsandbytes' is not allowed: choose one of gptq"),
        ({"bits": 4, "quant_method": "awq"}, "qweight is of format gptq, but"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "format='int-quantized' is not allowed"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups is missing"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}},
            },
            "config_groups.g: 8 bits of type int: 4 bits of type int are needed",
        ),
    ],
)
def test_configs(write: Any, config: dict[str, Any], text: str) -> None:
    found = line(write(gptq(), config))
    assert text in found and "quantize_config.json" in found


def test_configs_that_disagree(write: Any) -> None:
    folder = write(gptq(), {"bits": 4, "group_size": 128})
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"bits": 4, "group_size": 64}}))
    text = line(folder)
    assert "config.json: group_size" in text and "(64,), but (128,) in" in text
    (folder / "config.json").write_text("{")
    assert "config.json: cannot be read as JSON" in line(folder)
    (folder / "config.json").write_text("[]")
    assert "config.json: holds a JSON list, an object is needed" in line(folder)


def test_files(write: Any, tmp_path: Path) -> None:
    folder = write(gptq())
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        for source in (path, folder):
            assert line(source).startswith(f"{path}: truncated, or no safetensors file: ")
    path.write_bytes(whole)
    header = int.from_bytes(whole[:8], "little")
    for broken in (whole[:8] + b"x" * header + whole[8 + header :], (2**40).to_bytes(8, "little") + whole[8:]):
        path.write_bytes(broken)
        assert line(path).startswith(f"{path}: truncated, or no safetensors file: ")
    path.write_bytes(whole)
    (folder / "copy.safetensors").write_bytes(whole)
    assert "is also in copy.safetensors" in line(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x.qweight": "copy.safetensors"}}))
    assert "copy.safetensors: tensor x.qweight is missing, model.safetensors.index.json says that it is here" in line(folder)
    index.write_text(json.dumps({"weight_map": {"x.qweight": "model-2.safetensors"}}))
    assert "weight_map names model-2.safetensors, which is not there" in line(folder)
    index.write_text(json.dumps({"weight_map": {"x.qweight": "../model.safetensors"}}))
    assert "a file of the same folder is needed" in line(folder)
    index.write_text("{}")
    assert "weight_map is missing" in line(folder)
    assert line(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'}: no such file or folder"
    assert "only .safetensors files" in line(index.rename(folder / "model.bin"))
    (tmp_path / "empty").mkdir()
    assert "holds no .safetensors file" in line(tmp_path / "empty")


def test_arguments() -> None:
    assert "holds no 4-bit layer" in line({"a.weight": torch.ones(2, 2)})
    assert "layers='b*' matches none of 1 layers in tensors, such as 'a.q_proj'" in line(gptq(), layers="b*")
    assert "gptq_version=3 is not allowed: choose one of None, 1, 2" in line(gptq(), gptq_version=3)
    for source, text in (
        (3, "source is of type int"),
        ({1: torch.ones(1)}, "source has the key 1"),
        (gptq(qzeros="x"), "type str"),
    ):
        with pytest.raises(ArgumentTypeError, match=text):
            quant.load(source)
    with pytest.raises(ArgumentError):
        quant.load({})


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes one safetensors file and quantize_config.json into a folder."""
    pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    def folder(tensors: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
        path = tmp_path / "checkpoint"
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
        if config is not None:
            (path / "quantize_config.json").write_text(json.dumps(config))
        return path

    return folder
