"""The `kronsched` command: parses, calls the public API, prints. Nothing here imports torch or TVM at import.

Read first: `main` (exit codes and error lines), `options.FamilyGroup` (commands generated from the registry).
"""

from kronsched.cli.root import main

__all__ = ["main"]
