"""NVIDIA's compute-sanitizer watches the Kronecker-sparse kernels at small odd batches, with every value of every knob."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest

from kronsched import KSMatmul, registry
from kronsched.errors import KronschedError
from kronsched.hardware import PRESETS, Device, resolve_target
from kronsched.measure.crew import Crew
from kronsched.runtime.cache import get_or_build
from kronsched.space import Candidate, SearchSpace

BATCHES = (1, 2, 7)
PATTERNS = {
    "batch_first": [
        ("float16", (2, 40, 24, 2)),
        ("float16", (2, 20, 36, 8)),
        ("float32", (3, 33, 17, 1)),
        ("float32", (1, 16, 48, 4)),
        ("float16", (2, 72, 64, 1)),
        ("float16", (1, 200, 192, 64)),
        ("float32", (1, 148, 144, 16)),
        ("float16", ((2, 16, 32, 1), (1, 24, 16, 2))),
    ],
    "batch_last": [("float16", (2, 40, 24, 2)), ("float32", (3, 33, 17, 1)), ("float16", (1, 72, 56, 4))],
}
TMA_BATCH = 40
"""TMA needs rows of 16 bytes of batch-last samples: a batch of 8, and not one that fills a tile."""
SANITIZER = "compute-sanitizer"
OUT_OF_BOUNDS = 86
"""Exit code that the sanitizer is told to use."""

RUN = """
import json, sys
import torch
from kronsched.measure.check import gate
from kronsched.runtime.module import TunedModule
for path in json.load(open(sys.argv[1])):
    module = TunedModule.from_artefact(path)
    w = module.workload
    inputs = w.make_inputs(0, "cuda")
    verdict = gate(module(*inputs), w.reference(*inputs), w.output.dtype)
    torch.cuda.synchronize()
    assert verdict.message is None, f"{w.label} {module.config}: {verdict.message}"
print("all right")
"""


def covering(space: SearchSpace, default: Candidate, seed: int = 0, draws: int = 300) -> Iterator[Candidate]:
    """The default, and for each value of each knob one valid config that has it, where the draws find one."""
    rng, left = random.Random(seed), {(k.name, v) for k in space.knobs for v in k.values}
    for candidate in [
        default,
        *(space.neighbour(default, rng) for _ in range(draws)),
        *(space.sample(rng, 200) for _ in range(draws)),
    ]:
        if candidate is not None and left & set(candidate.items):
            left -= set(candidate.items)
            yield candidate


def cases(device: Device) -> Iterator[tuple[KSMatmul, Candidate]]:
    for layout, listed in PATTERNS.items():
        for dtype, pattern in listed:
            for batch in (*BATCHES, *((TMA_BATCH,) if layout == "batch_last" else ())):
                w = KSMatmul(batch=batch, pattern=pattern, dtype=dtype, layout=layout)
                for schedule in registry.schedules_for(w, device):
                    space = schedule.space(w, device)
                    for candidate in covering(space, space.candidate(schedule.default_config(w, device))):
                        yield w, candidate


def built(w: KSMatmul, candidate: Candidate, device: Device) -> str | None:
    try:
        return str(get_or_build(w, candidate.space, candidate.config, device))
    except KronschedError:  # a config that the compiler refuses is no danger
        return None


def test_every_value_of_every_knob_is_covered() -> None:
    device = PRESETS["nvidia/h200"]
    w = KSMatmul(batch=7, pattern=(2, 40, 24, 2), dtype="float16")
    for schedule in registry.schedules_for(w, device):
        space = schedule.space(w, device)
        chosen = list(covering(space, space.candidate(schedule.default_config(w, device))))
        reached = {item for c in chosen for item in c.items}
        everything = {(k.name, v) for k in space.knobs for v in k.values}
        assert len(reached) >= 0.75 * len(everything), everything - reached
        assert all(space.invalid(c.config) is None for c in chosen)


@pytest.mark.cuda
@pytest.mark.slow
def test_no_kernel_leaves_its_tensors(tmp_path: Path) -> None:
    tool = shutil.which(SANITIZER) or next((str(p) for p in Path("/usr/local").glob(f"cuda*/bin/{SANITIZER}")), None)
    if tool is None:
        pytest.skip(f"{SANITIZER} is not installed")
    device = resolve_target("cuda")
    with Crew(device) as crew:
        builders = crew.workers()[0]
        futures = [builders.schedule(built, w, c, device, timeout=120) for w, c in cases(device)]
        wait(futures)
    paths = [path for f in futures if f.exception() is None and (path := f.result()) is not None]
    assert len(paths) > 0.8 * len(futures)
    listed = tmp_path / "paths.json"
    listed.write_text(json.dumps(paths))
    # Each tensor is an allocation of its own: the sanitizer cannot see inside torch's blocks.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # cuda-python asks the driver for functions that it may not have: no error of ours.
    options = ["--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", str(OUT_OF_BOUNDS)]
    command = [tool, *options, sys.executable, "-c", RUN, str(listed)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=env, timeout=1500, check=False)
    text = done.stdout + done.stderr
    if "all right" not in text and "Invalid __" not in text and ("not supported" in text or "Unable to" in text):
        pytest.skip(f"{SANITIZER} does not run here: {text.strip().splitlines()[-1][:200]}")
    assert done.returncode == 0 and "all right" in text and "ERROR SUMMARY: 0 errors" in text, text[-3000:]
