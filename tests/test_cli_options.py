"""Options are made from workload fields, whatever types a family from outside uses."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import click
import pytest

from kronsched import register_family
from kronsched.cli.options import FamilyGroup, workload_from_options, workload_options
from kronsched.errors import ArgumentError
from kronsched.workloads.base import Workload
from kronsched.workloads.conv2d import Conv2d

CONV_OPTIONS = {"n": 1, "c_in": 8, "c_out": 8, "kernel": "3x5", "groups": None}


class Bare(Workload):
    """A workload of which only the fields matter here."""

    inputs = output = flops = label = property(lambda self: None)  # type: ignore[assignment]

    def reference(self, *inputs: Any) -> Any:
        raise NotImplementedError

    def program(self) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Many(Bare):
    """All kinds of fields."""

    family = "many"
    rows: int
    scale: float = 1.5
    group_size: int | None = None
    bias: bool = False
    fused: bool = True
    layout: str = field(default="first", metadata={"cli": "order", "help": "which comes first"})
    hw: tuple[int, ...] = field(default=(1, 1), metadata={"parse": lambda text: tuple(map(int, text.split("x")))})
    seed: int = 7  # the command has an option of that name too


def parsed(*args: str) -> tuple[Workload, dict[str, Any]]:
    register_family(Many)
    seen: list[Any] = []
    own = [click.Option(["--json", "as_json"], is_flag=True)]
    group = FamilyGroup("do", lambda workload, **options: seen.extend([workload, options]), own)
    group.main(["many", *args], standalone_mode=False)
    return seen[0], seen[1]


def test_defaults_are_the_fields_own() -> None:
    assert parsed("--rows", "3") == (Many(3), {"as_json": False})


def test_every_kind_of_field() -> None:
    numbers = ["--rows", "3", "--scale", "2", "--group-size", "64", "--seed", "9", "--hw", "5x6"]
    args = [*numbers, "--bias", "--no-fused", "--order", "last", "--json"]
    assert parsed(*args) == (Many(3, 2.0, 64, True, False, "last", (5, 6), 9), {"as_json": True})


def test_a_required_field_is_asked_for() -> None:
    with pytest.raises(click.MissingParameter) as found:
        parsed()
    assert found.value.format_message() == "Missing option '--rows'."


def test_a_field_no_option_can_be_made_from() -> None:
    @dataclass(frozen=True)
    class Odd(Bare):
        family = "odd"
        table: dict = field(default_factory=dict)  # type: ignore[type-arg]

    with pytest.raises(ArgumentError, match=r"Odd\.table is not allowed"):
        workload_options(Odd)


def test_workloads_survive_json() -> None:
    assert Many.from_fields(json.loads(json.dumps(Many(3, hw=(2, 2)).to_dict()))).rows == 3  # type: ignore[attr-defined]


def test_one_option_may_set_two_fields() -> None:
    conv = workload_from_options(Conv2d, {f"workload_{n}": v for n, v in CONV_OPTIONS.items()} | {"workload_h": "9x7"})
    assert isinstance(conv, Conv2d)
    assert (conv.h, conv.w, conv.kernel, conv.has_scale) == (9, 7, (3, 5), True)
    flags = [option.opts[0] for option in workload_options(Conv2d)]
    assert "--hw" in flags
    assert "--w" not in flags
    with pytest.raises(ArgumentError, match="'9x' is not allowed"):
        workload_from_options(Conv2d, {f"workload_{n}": v for n, v in CONV_OPTIONS.items()} | {"workload_h": "9x"})
