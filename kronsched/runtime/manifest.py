"""The description of one built module: what `manifest.json` in an artefact directory holds.

Read first: `Manifest`. Everything the executables need to run a module is here, so loading needs no compiler.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kronsched.errors import RecordError
from kronsched.runtime.tensor_map import TensorMap
from kronsched.workloads.base import TensorSpec

FORMAT = 1
FILE_NAME = "manifest.json"
_KINDS = ("cuda", "cpu")


@dataclass(frozen=True)
class LaunchSpec:
    """One call of a compiled function.

    symbol: the kernel name in the cubin, or the exported function of the shared library.  args: tensor names in the order
    of the function's parameters.  shapes, dtypes: of each argument as the function sees it (a tensor may be viewed with
    another shape).  grid, block: CUDA blocks and threads.  shared_bytes: dynamic shared memory.  overlap: see `Launch`.
    cluster: blocks of a thread block cluster along x.
    maps: tensor maps among the arguments: an argument with the name of one is passed as the map, by value, and its shape and
    dtype are those of the tensor it describes.
    """

    symbol: str
    args: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    dtypes: tuple[str, ...] = ()
    overlap: bool = False
    maps: tuple[TensorMap, ...] = ()
    cluster: int = 1

    @property
    def tensors(self) -> frozenset[str]:
        """Names of the tensors it uses, directly or through a tensor map."""
        named = {m.name: m.tensor for m in self.maps}
        return frozenset(named.get(a, a) for a in self.args)

    @property
    def threads(self) -> int:
        """Threads a block."""
        return self.block[0] * self.block[1] * self.block[2]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LaunchSpec:
        """Rebuild from JSON; raises KeyError, TypeError or ValueError on malformed data."""
        launch = cls(
            symbol=_text(data["symbol"]),
            args=tuple(_text(a) for a in data["args"]),
            shapes=tuple(tuple(_size(n) for n in shape) for shape in data["shapes"]),
            grid=_triple(data["grid"]),
            block=_triple(data["block"]),
            shared_bytes=_size(data["shared_bytes"]),
            dtypes=tuple(_text(d) for d in data["dtypes"]),
            overlap=_flag(data.get("overlap", False)),
            maps=tuple(TensorMap.from_dict(m) for m in data.get("maps", ())),
            cluster=_size(data.get("cluster", 1)),
        )
        if not len(launch.args) == len(launch.shapes) == len(launch.dtypes):
            raise ValueError(f"launch {launch.symbol}: args, shapes and dtypes differ in length")
        if not {m.name for m in launch.maps} <= set(launch.args):
            raise ValueError(f"launch {launch.symbol}: a tensor map is no argument")
        return launch


@dataclass(frozen=True)
class Manifest:
    """Everything known of one built module.

    kind: "cuda" or "cpu".  workload, space, config: what was built (`Workload.to_dict`, schedule name, knob values).
    arch, device: what it was built for.  source_sha256: digest of `source_file`.  binary_file: cubin or shared library; None
    when the module must be compiled in the process that loads it (a CPU without a linker).  inputs, scratch, output: tensors
    a call needs.  registers, spill_bytes (stores plus loads), shared_bytes (static plus dynamic): the largest over the
    kernels, None where unknown.  versions: of kronsched, tvm, compiler and platform.  created: UTC time, ISO 8601.
    binary_sha256: digest of `binary_file`, checked on loading: a library that was cut short takes the process down.
    expected_us, origin: filled in by `export`, so that an exported module knows its measured time and where it came from.
    """

    format: int
    kind: str
    workload: Mapping[str, Any]
    space: str
    config: Mapping[str, Any]
    arch: str
    device: str
    source_sha256: str
    source_file: str
    binary_file: str | None
    launches: tuple[LaunchSpec, ...]
    inputs: tuple[TensorSpec, ...]
    scratch: tuple[TensorSpec, ...]
    output: TensorSpec
    registers: int | None
    spill_bytes: int | None
    shared_bytes: int | None
    versions: Mapping[str, str]
    created: str
    expected_us: float | None = None
    origin: str = ""
    binary_sha256: str | None = None

    def save(self, directory: Path) -> None:
        """Write `manifest.json` into a directory."""
        text = json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)
        (directory / FILE_NAME).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Read and validate `manifest.json`; `RecordError` says in one line what is wrong with it."""
        where = Path(directory) / FILE_NAME
        try:
            data = json.loads(where.read_text(encoding="utf-8"))
            return cls._parse(data)
        except OSError as e:
            raise RecordError(f"{str(where)!r} cannot be read: {e.strerror}") from None
        except KeyError as e:
            raise RecordError(f"{str(where)!r}: field {e} is missing") from None
        except (ValueError, TypeError, AttributeError, RecursionError) as e:
            raise RecordError(f"{str(where)!r} is not a kronsched manifest: {e}") from None

    def constant_launches(self, bound: Collection[str]) -> tuple[int, ...]:
        """Positions of the launches that depend on the inputs `bound` alone, such as those that reorder weights.

        Each uses one of them, and else nothing but scratch that no other launch before it uses. What it leaves there is only
        read by the launches behind it; see `kronsched.schedules.base.Launch`.
        """
        scratch, used, found = {t.name for t in self.scratch}, set[str](), []
        for i, launch in enumerate(self.launches):
            if not launch.tensors.isdisjoint(bound) and launch.tensors <= {*bound, *scratch} - used:
                found.append(i)
            else:
                used |= launch.tensors - set(bound)
        return tuple(found)

    def read_binary(self, directory: Path) -> bytes:
        """The content of `binary_file`; `RecordError` when it is missing or is not what was built."""
        if self.binary_file is None:
            raise RecordError(f"{str(directory)!r} has no binary")
        where = Path(directory) / self.binary_file
        try:
            data = where.read_bytes()
        except OSError as e:
            raise RecordError(f"{str(where)!r} cannot be read: {e.strerror}") from None
        if hashlib.sha256(data).hexdigest() != self.binary_sha256:
            raise RecordError(f"{str(where)!r} is damaged: its content is not what {FILE_NAME} says")
        return data

    @classmethod
    def _parse(cls, data: Any) -> Manifest:
        if not isinstance(data, dict):
            raise ValueError("an object is needed")
        if data["format"] != FORMAT:
            raise ValueError(f"format={data['format']!r} is not {FORMAT}")
        if data["kind"] not in _KINDS:
            raise ValueError(f"kind={data['kind']!r} is not one of {', '.join(_KINDS)}")
        fields = {f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data}
        for name in ("arch", "device", "space", "source_sha256", "created"):
            _text(data[name])
        for name in ("workload", "config", "versions"):
            if not isinstance(data[name], dict):
                raise ValueError(f"{name} must be an object")
        for name in ("registers", "spill_bytes", "shared_bytes"):
            if data[name] is not None:
                _size(data[name])
        fields["source_file"] = _file(data["source_file"])
        fields["binary_file"] = None if data["binary_file"] is None else _file(data["binary_file"])
        fields["launches"] = tuple(LaunchSpec.from_dict(launch) for launch in data["launches"])
        fields["inputs"] = tuple(TensorSpec.from_dict(t) for t in data["inputs"])
        fields["scratch"] = tuple(TensorSpec.from_dict(t) for t in data["scratch"])
        fields["output"] = TensorSpec.from_dict(data["output"])
        known = {t.name for t in (*fields["inputs"], *fields["scratch"], fields["output"])}
        for launch in fields["launches"]:
            if not known.issuperset(launch.tensors):
                raise ValueError(f"launch {launch.symbol} uses tensors that are not described")
        return cls(**fields)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} must be a string")
    return value


def _file(value: Any) -> str:
    # A manifest may come from anywhere: it must not make us open files outside its own directory.
    if not isinstance(value, str) or Path(value).name != value or value in ("", ".", ".."):
        raise ValueError(f"{value!r} must be a plain file name")
    return value


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} must be an int ≥ 0")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} must be true or false")
    return value


def _triple(value: Any) -> tuple[int, int, int]:
    x, y, z = (_size(v) for v in value)
    return x, y, z
