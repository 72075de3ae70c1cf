"""Ablations: which parts of a space they are, and what an outcome says."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from kronsched import Conv2d, registry
from kronsched.bench import ablation
from kronsched.bench.ablation import ABLATIONS, WHOLE, Outcome, _toml, ablate, parts_of
from kronsched.cli.root import cli
from kronsched.errors import ArgumentError, UnsupportedError
from kronsched.hardware import PRESETS, resolve_target
from kronsched.space import load_knobs

DEVICE = PRESETS["nvidia/h200"]
LAYER = Conv2d(32, 14, 14, 256, 256, 3, padding=1)
POINTWISE = Conv2d(32, 7, 7, 2048, 512, 1)


@pytest.mark.parametrize("name", list(ABLATIONS))
def test_parts_lack_one_idea_each(name: str) -> None:
    space = registry.schedule(name).space(LAYER, DEVICE)
    parts = parts_of(space)
    assert list(parts) == [WHOLE, *ABLATIONS[name]]
    for idea, fixed in ABLATIONS[name].items():
        part = {k.name: k.values for k in parts[idea].knobs}
        assert {k.name for k in space.knobs if part[k.name] != k.values} == set(fixed)
        config = next(iter(parts[idea])).config
        assert space.invalid(config) is None
    assert {c["vector"] for c in (x.config for x in parts["packing off"])} == {2}


def test_what_changes_nothing_is_left_out() -> None:
    """A kernel of 1x1 reads nothing twice."""
    parts = parts_of(registry.schedule("conv2d_cuda_mma").space(POINTWISE, DEVICE))
    assert "duplicate-aware off" not in parts
    assert "packing off" in parts


def test_the_file_of_a_part_is_read_back() -> None:
    part = parts_of(registry.schedule("conv2d_cuda_mma").space(LAYER, DEVICE))["packing off"]
    assert tomllib.loads(_toml(part))["space"] == "conv2d_cuda_mma"
    assert {k.name for k in part.knobs} == {k.name for k in load_knobs("conv2d_cuda_mma")}


def test_worth_is_relative_to_the_whole_space() -> None:
    us = {WHOLE: 10.0, "packing off": 12.5, "warp knobs fixed": None}
    assert Outcome(LAYER, "conv2d_cuda_mma", us, {}, {}).worth == {"packing off": 1.25}
    assert Outcome(LAYER, "conv2d_cuda_mma", {}, {}, {}, "no").worth == {}


def test_what_cannot_be_ablated_is_refused() -> None:
    with pytest.raises(ArgumentError, match="kron_cpu"):
        ablate([LAYER], "kron_cpu", DEVICE, 4)
    with pytest.raises(UnsupportedError, match="not on this machine"):
        ablate([LAYER], "conv2d_cuda_mma", DEVICE, 4)
    with pytest.raises(UnsupportedError, match="conv2d_cuda_mma is for cuda"):
        ablate([LAYER], "conv2d_cuda_mma", resolve_target("cpu"), 4)


@pytest.mark.slow
def test_every_part_is_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On this CPU, with an ablation made up for it: sums of one channel at a time are no vectors, and slower."""
    monkeypatch.setattr(ablation, "ABLATIONS", {"conv2d_cpu": {"no vectors": {"channels": 1}}})
    suite, out = tmp_path / "one.json", tmp_path / "out.json"
    suite.write_text(json.dumps([Conv2d(8, 16, 16, 64, 64, 3).to_dict(), Conv2d(8, 4, 4, 32, 32, 3, layout="NHWCnc").to_dict()]))
    options = ["--schedule", "conv2d_cpu", "--target", "cpu", "--trials", "6", "--builders", "1", "-o", str(out)]
    assert CliRunner().invoke(cli, ["ablate", str(suite), *options], standalone_mode=False).return_value == 0
    row, refused = json.loads(out.read_text())["rows"]
    assert row["trials"] == {"whole": 6, "no vectors": 6}
    assert row["us"]["whole"] > 0
    assert row["worth"]["no vectors"] > 1.2
    assert refused["error"] == "layout=NHWCnc: it reads NHWC"
