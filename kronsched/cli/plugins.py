"""Imports modules named by `--plugin`, so that parts from outside register themselves."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from kronsched.errors import ArgumentError


def import_plugin(name: str) -> None:
    """Import a module by dotted name (the current directory counts) or by the path of a .py file.

    Its directory goes on sys.path, which worker processes inherit, so that they can import the same module.
    Raises ArgumentError naming what is wrong.
    """
    path = Path(name)
    if path.suffix == ".py":
        if not path.is_file():
            raise ArgumentError(f"plugin={name!r} is not allowed: there is no such file")
        folder, module = str(path.resolve().parent), path.stem
    else:
        folder, module = str(Path.cwd()), name
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        imported = importlib.import_module(module)
    except Exception as e:  # whatever a user's module raises is the user's mistake to see
        raise ArgumentError(f"plugin={name!r} cannot be imported: {type(e).__name__}: {e}") from e
    source = getattr(imported, "__file__", None)
    if path.suffix == ".py" and (source is None or Path(source).resolve() != path.resolve()):
        raise ArgumentError(f"plugin={name!r} is not allowed: the name {module!r} is already taken by {source}; rename the file")
