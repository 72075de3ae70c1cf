"""The workload interface: WHAT is computed, for one fixed shape.

Read first: `Workload` (the interface a family fills in), `TensorSpec`.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kronsched.dtypes import DTYPES
from kronsched.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    import torch
    import tvm


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of one dense row-major tensor that a module takes, returns or needs as scratch."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        n = 1
        for extent in self.shape:
            n *= extent
        return n

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.size * DTYPES[self.dtype].itemsize

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TensorSpec:
        """The inverse of `to_dict`."""
        return cls(str(data["name"]), tuple(int(n) for n in data["shape"]), str(data["dtype"]))


class Workload(abc.ABC):
    """A program of one family at one shape. Subclasses are frozen dataclasses whose fields are JSON values.

    A field's `dataclasses.field(metadata=...)` drives the command line, so that a family needs no CLI code:
    `cli` (option name without dashes; default the field name with dashes; None: no option), `help`, `parse` (str -> value),
    `sets` (names of the fields that the parsed value's items go to; default the field itself).
    Fields must be int, float, str, bool, or have `parse`; values must survive a JSON round trip up to
    list/tuple (`__post_init__` normalises).
    """

    family: ClassVar[str]
    """Registry name and CLI name, such as "kron"."""

    @property
    @abc.abstractmethod
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The input tensors, flat, in the order of a call."""

    @property
    @abc.abstractmethod
    def output(self) -> TensorSpec:
        """The output tensor."""

    @property
    @abc.abstractmethod
    def flops(self) -> int:
        """Floating-point operations of the cheapest evaluation order (a multiply-add counts 2)."""

    @property
    def min_bytes(self) -> int:
        """Bytes moved when each input is read once and the output is written once."""
        return sum(t.nbytes for t in self.inputs) + self.output.nbytes

    @property
    def compute_dtype(self) -> str:
        """The dtype whose peak rate bounds the arithmetic (storage dtype of the main operand)."""
        return self.inputs[0].dtype

    @property
    def slack(self) -> float:
        """How many times the output dtype's tolerance (`kronsched.dtypes`) a result may be off: more than 1 for long chains."""
        return 1.0

    @property
    def weight_names(self) -> tuple[str, ...]:
        """Inputs that stay the same over many calls: in a benchmark every side prepares them once, before it is timed."""
        return ()

    @property
    def plain(self) -> Workload:
        """The same without an epilogue: its records have configs for this one. Itself where there is none."""
        return self

    @property
    @abc.abstractmethod
    def label(self) -> str:
        """One short human-readable line, such as "kron m=1024 8x8^5 float16"."""

    @abc.abstractmethod
    def reference(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The result in float64 (complex: complex128) on the inputs' own device, computed from flat inputs in torch."""

    @abc.abstractmethod
    def program(self) -> tvm.IRModule:
        """The unscheduled TensorIR program: one PrimFunc "main" over `inputs` then `output`."""

    def make_inputs(self, seed: int, device: str = "cpu") -> list[torch.Tensor]:
        """Fresh random inputs (standard normal, rounded to the storage dtype) for checks and timing."""
        import torch

        gen = torch.Generator(device=device).manual_seed(seed)
        out = []
        for spec in self.inputs:
            dtype = DTYPES[spec.dtype].torch()
            draw = dtype if spec.dtype in ("float64", "complex64", "complex128") else torch.float32
            out.append(torch.randn(spec.shape, generator=gen, device=device, dtype=draw).to(dtype))
        return out

    def flatten_args(self, args: Sequence[Any]) -> list[Any]:
        """Turn the arguments of a public call into the flat list of `inputs` (default: as they are)."""
        return list(args)

    def flatten_named(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """As `flatten_args`, of a call with keywords; a family without optional inputs refuses them."""
        raise ArgumentTypeError(f"{next(iter(named))!r} was given: a module of {self.family} takes no keyword but out")

    # -- identity -----------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description with the family name; `from_dict` of the registry inverts it."""
        fields = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {"family": self.family, **fields}

    @classmethod
    def from_fields(cls, data: Mapping[str, Any]) -> Workload:
        """Build from `to_dict` output; unknown fields are an `ArgumentError` naming them."""
        known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        given = {k: v for k, v in data.items() if k != "family"}
        unknown = sorted(set(given) - known)
        if unknown:
            raise ArgumentError(f"{cls.family}: unknown field {unknown[0]!r}, allowed: {', '.join(sorted(known))}")
        return cls(**given)

    @property
    def key(self) -> str:
        """A stable identity: family and a digest of the canonical JSON, such as "kron-1f2e3d4c5b6a7988"."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return f"{self.family}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, tuple | list) else value
