"""Where a checkpoint's tensors come from: a safetensors file, a folder of them with or without an index, or a dict.

Read first: `open_source`, `Tensors`. Tensors are read when they are asked for, so that a folder larger than memory can be read
layer by layer. Every error is one line that names the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronsched.errors import ArgumentError, ArgumentTypeError, UnsupportedError

if TYPE_CHECKING:
    import torch

CONFIG_FILES = ("quantize_config.json", "quant_config.json", "config.json")


class Tensors:
    """Named tensors and the JSON configs beside them.

    files: the file of each tensor's name; values of a dict are in `held` instead.  configs: the content of each of `CONFIG_FILES`
    that is there.  name: what to call all of it in an error.
    """

    def __init__(
        self,
        name: str,
        files: Mapping[str, Path],
        configs: Mapping[str, Mapping[str, Any]] | None = None,
        held: Mapping[str, Any] | None = None,
    ) -> None:
        """Nothing is read yet."""
        self.name = name
        self.configs = dict(configs or {})
        self._files = dict(files)
        self._held = dict(held or {})
        self._open: tuple[Path, Any] | None = None

    def __iter__(self) -> Iterator[str]:
        return iter({**self._files, **self._held})

    def __contains__(self, name: str) -> bool:
        return name in self._files or name in self._held

    def where(self, name: str) -> str:
        """The file that holds a tensor, or would."""
        return str(self._files.get(name, self.name))

    def raw(self, name: str) -> Any:
        """A tensor, or what a dict holds under the name."""
        if name in self._held:
            return self._held[name]
        path = self._files[name]
        if self._open is None or self._open[0] != path:
            self._open = (path, _safe_open(path))
        with _clear_errors(path):
            return self._open[1].get_tensor(name)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor; ArgumentTypeError for anything else that a dict may hold."""
        import torch

        value = self.raw(name)
        if isinstance(value, torch.Tensor):
            return value.detach()
        if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
            return torch.as_tensor(value)
        raise ArgumentTypeError(f"{self.name}: {name} is of type {type(value).__name__}: a tensor is needed")


def open_source(source: Any) -> Tensors:
    """The tensors of a path (file or folder), or of a mapping of names to tensors. Raises ArgumentError naming what is wrong."""
    if isinstance(source, Mapping):
        for name in source:
            if not isinstance(name, str):
                raise ArgumentTypeError(f"source has the key {name!r}: names of tensors are needed")
        return Tensors("tensors", {}, held=source)
    if not isinstance(source, str | Path):
        raise ArgumentTypeError(f"source is of type {type(source).__name__}: a path or a mapping of tensors is needed")
    path = Path(source)
    if path.is_dir():
        return Tensors(str(path), _folder(path), _configs(path))
    if not path.is_file():
        raise ArgumentError(f"{path}: no such file or folder")
    if path.name.endswith(".safetensors.index.json"):
        return Tensors(str(path.parent), _indexed(path), _configs(path.parent))
    if path.suffix != ".safetensors":
        raise UnsupportedError(f"{path}: only .safetensors files, and folders of them, are supported")
    return Tensors(str(path), dict.fromkeys(_keys(path), path), _configs(path.parent))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ArgumentError naming the file when there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path}: cannot be read as JSON: {_first_line(error)}") from None
    if not isinstance(content, dict):
        raise ArgumentError(f"{path}: holds a JSON {type(content).__name__}, an object is needed")
    return content


def _configs(folder: Path) -> dict[str, Mapping[str, Any]]:
    return {str(folder / name): read_json(folder / name) for name in CONFIG_FILES if (folder / name).is_file()}


def _folder(folder: Path) -> dict[str, Path]:
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        raise ArgumentError(f"{folder}: holds {len(indices)} index files, pass the one to read: {_names(indices)}")
    if indices:
        return _indexed(indices[0])
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ArgumentError(f"{folder}: holds no .safetensors file")
    files: dict[str, Path] = {}
    for path in paths:
        for name in _keys(path):
            if name in files:
                raise ArgumentError(f"{path}: tensor {name} is also in {files[name].name}; pass one file, or add an index")
            files[name] = path
    return files


def _indexed(index: Path) -> dict[str, Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ArgumentError(f"{index}: weight_map is missing: an object of tensor names and file names is needed")
    files = {}
    for file in sorted(set(weight_map.values())):
        path = index.parent / file
        if Path(file).name != file:
            raise ArgumentError(f"{index}: weight_map names {file!r}: a file of the same folder is needed")
        if not path.is_file():
            raise ArgumentError(f"{index}: weight_map names {file}, which is not there")
        there = set(_keys(path))
        wanted = [name for name, where in weight_map.items() if where == file]
        missing = [name for name in wanted if name not in there]
        if missing:
            raise ArgumentError(f"{path}: tensor {missing[0]} is missing, {index.name} says that it is here")
        files.update(dict.fromkeys(wanted, path))
    return files


def _keys(path: Path) -> list[str]:
    return list(_safe_open(path).keys())


def _safe_open(path: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise UnsupportedError(f"{path}: reading it needs the package safetensors: pip install safetensors") from None
    with _clear_errors(path):
        return safe_open(str(path), framework="pt", device="cpu")


@contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    """What safetensors raises, as one line that names the file."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ArgumentError(f"{path}: truncated, or no safetensors file: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _names(paths: Iterable[Path]) -> str:
    return ", ".join(path.name for path in paths)
