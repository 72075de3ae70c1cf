"""Every example runs, each in a process and a home of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert {"quickstart.py", "add_a_family.py"} <= {p.name for p in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "right" in done.stdout


def test_readme_example_runs_after_the_first_command(tmp_path: Path) -> None:
    """The README's tune command (with few trials) writes the log that its Python example loads."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [arguments] = re.findall(r"^python3 -m venv .*kronsched (tune kron .*)$", readme, re.MULTILINE)
    [code] = re.findall(r"<!-- python example -->\n```python\n(.*?)```", readme, re.DOTALL)
    command = [sys.executable, "-m", "kronsched", *arguments.split(), "--trials", "2"]
    tuned = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert tuned.returncode == 0, tuned.stderr
    for promised in ("best time", "GFLOP/s", "of the roofline", "speed-up", "shuffle", "log "):
        assert promised in tuned.stdout
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "None" not in done.stdout, "the tuned record was not found"
