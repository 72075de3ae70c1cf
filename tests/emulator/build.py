"""g++ and the cache of what it built.

Read first: `load`. The runtime (objects and a precompiled header) is built once, a kernel once for each source, into a directory
of the user's under the temporary directory; the name of each product is a digest of all it depends on.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from kronsched.runtime.nvrtc import include_dirs
from tests.emulator.errors import EmulatorError
from tests.emulator.translate import translate_source

RUNTIME = Path(__file__).parent / "runtime"
_FLAGS = (
    "-std=c++17",
    "-march=native",
    "-fPIC",
    "-w",
    "-fno-strict-aliasing",
    "-fwrapv",
    "-fno-threadsafe-statics",
    "-U_FORTIFY_SOURCE",
)
# The handlers of these two checks are in runtime/checks.cpp.
_KERNEL_FLAGS = ("-O1", "-fsanitize=alignment,bounds")
_ERROR_LINES = 3
_KEPT = 400
"""Built kernels that stay in the cache; the oldest go first."""


def available() -> str | None:
    """None when kernels can be emulated on this machine, else one line saying what is missing."""
    if os.uname().machine != "x86_64":
        return "the CUDA emulator needs an x86-64 machine"
    if shutil.which("g++") is None:
        return "the CUDA emulator needs g++"
    try:
        include_dirs()
    except Exception as e:
        return str(e)
    return None


def load(source: str) -> ctypes.CDLL:
    """All kernels of a CUDA source as a loaded library. `EmulatorError` when it cannot be translated or compiled."""
    missing = available()
    if missing:
        raise EmulatorError(missing)
    text = translate_source(source)
    runtime = _runtime()
    library = runtime / f"{_digest(text)}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=runtime) as scratch:
            cpp, built = Path(scratch) / "kernel.cpp", Path(scratch) / "kernel.so"
            cpp.write_text(text, encoding="utf-8")
            _compile(*_KERNEL_FLAGS, f"-I{runtime}", *_includes(), "-c", str(cpp), "-o", f"{built}.o")
            objects = [str(p) for p in sorted(runtime.glob("*.o"))]
            _compile("-shared", "-Wl,-Bsymbolic", f"{built}.o", *objects, "-o", str(built))
            built.replace(library)
        for old in sorted(runtime.glob("*.so"), key=_age)[:-_KEPT]:
            old.unlink(missing_ok=True)
    return ctypes.CDLL(str(library))


@functools.cache
def _runtime() -> Path:
    """The directory with the runtime's objects, its precompiled header, and kernels built against them."""
    sources = sorted(RUNTIME.iterdir())
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    cpu = subprocess.run(["g++", "-march=native", "-Q", "--help=target"], capture_output=True, text=True, check=True).stdout
    parts = [version, cpu, *_FLAGS, *_KERNEL_FLAGS, *_includes(), *(p.read_text(encoding="utf-8") for p in sources)]
    root = Path(tempfile.gettempdir()) / f"kronsched-emulator-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise EmulatorError(f"{str(root)!r} belongs to another user")
    directory = root / _digest("\0".join(parts))
    if not directory.exists():
        building = Path(tempfile.mkdtemp(dir=root))
        for path in sources:
            shutil.copy(path, building)
        for path in building.glob("*.cpp"):
            _compile("-O2", f"-I{building}", *_includes(), "-c", str(path), "-o", str(path.with_suffix(".o")))
        header = building / "emu.hpp"
        _compile(*_KERNEL_FLAGS, "-x", "c++-header", f"-I{building}", *_includes(), str(header), "-o", f"{header}.gch")
        try:
            building.rename(directory)
        except OSError:  # another process was faster
            shutil.rmtree(building)
    return directory


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process removed it
        return 0.0


def _includes() -> list[str]:
    return [f"-isystem{d}" for d in include_dirs()]


def _compile(*arguments: str) -> None:
    done = subprocess.run(["g++", *_FLAGS, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise EmulatorError("g++ on the translated kernel: " + " | ".join(errors[:_ERROR_LINES]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]
