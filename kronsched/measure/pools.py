"""Worker processes that may be killed: pebble's process pool, started so that nothing outlives or disturbs the tuner.

Read first: `Workers`. What is added to pebble: workers do not run the user's script again, die with the tuner (also when it
is killed with SIGKILL), end at once when told to, and write to a log file instead of the tuner's stdout and stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from importlib.machinery import ModuleSpec
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

from pebble import ProcessPool

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

PR_SET_PDEATHSIG = 1
LOG_TAIL_BYTES = 600
_main_lock = threading.Lock()


class Workers:
    """A pool of `count` equal worker processes, replaced as a whole when it breaks or when `replace` is called.

    log: file that gets what the workers print.  set_up: called with no arguments in each new worker.  import_main: whether
    workers must import the user's script to unpickle what is defined there (it then needs a `__main__` guard).
    """

    def __init__(self, count: int, log: Path, set_up: Callable[[], None], import_main: bool = False) -> None:
        """Start nothing yet."""
        self._count, self._log, self._set_up = count, log, set_up
        self._context = SpawnContext() if import_main else _SpawnWithoutMain()
        self._pool: ProcessPool | None = None
        self._log_read = 0

    def schedule(self, function: Callable[..., Any], *args: Any, timeout: float) -> Future[Any]:
        """Run a top-level function in a worker. The time-out, in seconds, counts from the start of the call in the worker.

        The future raises TimeoutError, `pebble.ProcessExpired` (the worker died), BrokenProcessPool (a worker died at another
        moment; the call may not have run), or what the function raised.
        """
        if self._pool is None or not self._pool.active:
            self.replace()
            # Spawned workers take seconds to start; pebble starts them at the first call.
            self._pool = ProcessPool(
                self._count,
                initializer=_start_worker,
                initargs=(os.getpid(), str(self._log), self._set_up),
                context=self._context,
            )
        future: Future[Any] = self._pool.schedule(function, args=args, timeout=timeout)
        return future

    def replace(self) -> None:
        """Kill the workers, losing what they hold and what is queued. The next call starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()  # type: ignore[no-untyped-call]
            pool.join()

    def log_tail(self) -> str:
        """The end of what workers printed since the last call, as one line; "" when nothing."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(self._log_read, self._log.stat().st_size - LOG_TAIL_BYTES))
                text = file.read().decode(errors="replace")
                self._log_read = file.tell()
        except OSError:
            return ""
        return " | ".join(line.strip() for line in text.splitlines() if line.strip())


def describe_exit(code: int) -> str:
    """Such as "ended by SIGSEGV" or "exit code 3"."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"ended by {signal.Signals(-code).name}"
    return f"exit code {code}"


def die_with(parent: int) -> None:
    """From now on, on Linux, this process is killed when the thread that started it ends, however it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died before prctl
            os._exit(1)


def _start_worker(parent: int, log: str, set_up: Callable[[], None]) -> None:
    """First thing in a new worker."""
    # Pebble's handler is Python code, which does not run while a kernel loops for ever.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with(parent)
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # writing a core file takes long, and crashes are expected here
    # `--json` promises that nothing but the result is on stdout, and crash messages belong to a candidate.
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    set_up()


class _ProcessWithoutMain(SpawnProcess):
    def start(self) -> None:
        with _main_hidden():
            super().start()


class _SpawnWithoutMain(SpawnContext):
    """Spawn that does not import the user's script in the child, so that scripts need no `__main__` guard."""

    Process = _ProcessWithoutMain


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """For the time of a start, `__main__` looks like the `__main__.py` of a package, which multiprocessing never imports again.

    See `get_preparation_data` and `_fixup_main_from_name` in multiprocessing/spawn.py.
    """
    main = sys.modules["__main__"]
    with _main_lock:
        spec = getattr(main, "__spec__", None)
        main.__spec__ = ModuleSpec("__main__", None)
        try:
            yield
        finally:
            main.__spec__ = spec
