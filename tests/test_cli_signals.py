"""What is left when the command line is told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TUNE = ["tune", "ks", "--batch", "64", "--pattern", "2,8,8,2", "--trials", "200", "--target", "cpu"]


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="SIGTERM is for POSIX")
def test_a_terminated_run_leaves_no_process_folder_or_semaphore(tmp_path: Path) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    command = [sys.executable, "-m", "kronsched", *TUNE, "--log", str(tmp_path / "log.jsonl")]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(scratch)})
    assert run.stderr is not None
    said = run.stderr.readline() + next(line for line in run.stderr if line.startswith("[1/200]"))
    run.send_signal(signal.SIGTERM)
    said += run.stderr.read()  # until its last process has ended
    assert run.wait(timeout=30) == 143 and "leaked" not in said and "Traceback" not in said
    assert not [p.name for p in scratch.iterdir() if p.name.startswith("kronsched")]
