"""Where kronsched keeps build products on this system. A leaf: standard library and platformdirs only."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """Artefact cache: `KRONSCHED_CACHE_DIR`, else the user's cache directory. May not exist yet."""
    return Path(os.environ.get("KRONSCHED_CACHE_DIR") or platformdirs.user_cache_dir("kronsched", appauthor=False))
