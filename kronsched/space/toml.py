"""Reading knob lists from search_spaces/*.toml. The files are data; users copy, edit and pass them as --space."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from kronsched.errors import ArgumentError
from kronsched.space.space import Knob


def spaces_dir() -> Path:
    """The folder of the shipped TOML files: inside an installed wheel, or at the top of a source checkout."""
    installed = Path(str(files("kronsched"))) / "_data" / "search_spaces"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[2] / "search_spaces"


def space_path(name: str) -> Path:
    """The shipped TOML of a space."""
    return spaces_dir() / f"{name}.toml"


def load_knobs(name: str, path: str | Path | None = None) -> list[Knob]:
    """The knobs of the space `name`, from `path` or the shipped file.

    The file has `space = "<name>"` and one table a knob: `[knobs.<knob>]` with `values = [...]` and `help`.
    Raises ArgumentError naming the file, the field and what is allowed.
    """
    where = Path(path) if path is not None else space_path(name)
    try:
        data: dict[str, Any] = tomllib.loads(where.read_text(encoding="utf-8"))
    except OSError as e:
        raise ArgumentError(f"space file {str(where)!r} cannot be read: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ArgumentError(f"space file {str(where)!r} is not valid TOML: {e}") from None
    if data.get("space") != name:
        raise ArgumentError(f"space file {str(where)!r}: space={data.get('space')!r} is not allowed here: {name!r} is needed")
    tables = data.get("knobs")
    if not isinstance(tables, dict) or not tables:
        raise ArgumentError(f"space file {str(where)!r}: a table [knobs.<name>] is needed for each knob")
    knobs = []
    for knob, table in tables.items():
        values = table.get("values") if isinstance(table, dict) else None
        if not isinstance(values, list) or not all(isinstance(v, int | float | str | bool) for v in values):
            raise ArgumentError(
                f"space file {str(where)!r}: knobs.{knob}.values={values!r} must be a list of numbers, strings or booleans"
            )
        knobs.append(Knob(knob, tuple(values), str(table.get("help", ""))))
    return knobs
