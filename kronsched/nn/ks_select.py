"""Kernel or library: which of our kernels and torch's own formulations serves a Kronecker-sparse product fastest on a device.

What both took was measured for many patterns (`kronsched bench ks`) and kept in tables (`kronsched select`). A pattern of a table
gets what was fastest; another one what is predicted (ks_select_predict.py). Where nothing near was measured, our kernel runs.

Read first: `Selector.choose`, `choice_for` (to look at a choice), `LibraryCalls` (what `ks_matmul` asks).
"""

from __future__ import annotations

import functools
import json
import math
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronsched.errors import ArgumentError, RecordError, UnsupportedError, UserError, choose
from kronsched.nn.ks_select_predict import KERNEL, Entry, Predictor
from kronsched.records.schema import RecordWarning
from kronsched.workloads.ks import KSMatmul, Pattern

if TYPE_CHECKING:
    from torch import Tensor

    from kronsched.hardware import Device

FORMAT = 1
FOLDER = "library"
FILE = "ks*.json"
CLEARLY = 0.03
"""Share of our time that a measured library must save; less is noise."""


@dataclass(frozen=True)
class Choice:
    """name: "kernel" or a formulation.  how: "measured", "predicted" or "nothing near was measured"."""

    name: str
    how: str


class Selector:
    """Chooses for one device from what was measured on it."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        """Entries of one device; of one shape, the first counts."""
        self._exact: dict[str, Entry] = {}
        for entry in entries:
            self._exact.setdefault(entry.workload.key, entry)
        self._predictor = Predictor(list(self._exact.values()))

    def choose(self, workload: KSMatmul, kernel_us: float | None = None) -> Choice:
        """What to run. kernel_us: of our kernel, where a log knows better than the table."""
        kernel, library, how = self.times(workload, kernel_us)
        if how == "measured":
            return Choice(_fastest(kernel, library), how)
        times = {**library, **({KERNEL: kernel} if kernel else {})}
        return Choice(self._predictor.choose(workload, times), how)

    def times(self, workload: KSMatmul, kernel_us: float | None = None) -> tuple[float | None, Mapping[str, float], str]:
        """(time of our kernel, times of formulations, how they are known); arguments as those of `choose`."""
        entry = self._exact.get(workload.key)
        if entry is not None:
            return min((us for us in (entry.kernel_us, kernel_us) if us), default=None), entry.library_us, "measured"
        times = self._predictor.times(workload)
        if not times:
            return kernel_us, {}, "nothing near was measured"
        kernel = times.pop(KERNEL, None)
        return kernel_us or kernel, times, "predicted"


def _fastest(kernel_us: float | None, library_us: Mapping[str, float]) -> str:
    best = min(library_us, key=lambda name: library_us[name]) if library_us else None
    if best is None or (kernel_us is not None and library_us[best] > (1 - CLEARLY) * kernel_us):
        return KERNEL
    return best


# -- tables on disk -------------------------------------------------------------------------------------


def save_table(path: Path, device: str, entries: Sequence[Entry]) -> None:
    """Write a table. Raises ArgumentError when the path cannot be written."""
    lines = ",\n".join("  " + json.dumps(e.to_dict(), separators=(",", ":")) for e in entries)
    text = f'{{"format": {FORMAT}, "device": {json.dumps(device)}, "entries": [\n{lines}\n]}}\n'
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise ArgumentError(f"output={str(path)!r} cannot be written: {e.strerror}") from None


def read_table(path: Path) -> tuple[str, list[Entry]]:
    """(device, entries) of a table. Raises RecordError with one line."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"format={data['format']!r} is not supported, only {FORMAT}")
        return str(data["device"]), [_entry(item) for item in data["entries"]]
    except OSError as e:
        raise RecordError(f"table {str(path)!r} cannot be read: {e.strerror}") from None
    except UserError as e:
        raise RecordError(f"table {str(path)!r}: {e}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        raise RecordError(f"table {str(path)!r} is damaged: {type(e).__name__}: {e}") from None


def _entry(item: Mapping[str, Any]) -> Entry:
    from kronsched.nn.ks_select_library import FORMULATIONS

    workload = KSMatmul.from_fields(item["workload"])
    assert isinstance(workload, KSMatmul)
    kernel = item["kernel_us"]
    times = {str(name): float(us) for name, us in item["library_us"].items()}
    unknown = next((name for name in times if name not in FORMULATIONS), None)
    if unknown is not None:
        raise choose("library_us", unknown, list(FORMULATIONS))
    if not all(1e-3 < us < 1e12 for us in (*times.values(), 1.0 if kernel is None else float(kernel))):
        raise ValueError("a time is not between 0.001 and 1e12 µs")
    return Entry(workload, None if kernel is None else float(kernel), times)


@functools.lru_cache(maxsize=8)
def selector_for(device: str) -> Selector | None:
    """The selector of a device by name, from the user's and the shipped tables; None where no table is of it."""
    from kronsched.records.database import search_dirs

    entries: list[Entry] = []
    for folder in search_dirs():
        for path in sorted(folder.rglob(f"{FOLDER}/{FILE}")):
            try:
                name, found = read_table(path)
            except RecordError as e:
                warnings.warn(f"{e}; it is passed over", RecordWarning, stacklevel=2)
                continue
            entries += found if name == device else []
    return Selector(entries) if entries else None


def choice_for(workload: KSMatmul, device: str = "auto") -> Choice:
    """What `ks_matmul` runs for a workload on a device of this machine (or a preset), and why.

    A record of the logs counts where it is faster than the table says. Raises what `resolve_target` raises.
    """
    from kronsched.hardware import resolve_target
    from kronsched.records.database import find_best

    found = resolve_target(device)
    selector = selector_for(found.name) if found.kind == "cuda" else None
    if selector is None:
        return Choice(KERNEL, "nothing near was measured")
    record = find_best(workload, found)
    return selector.choose(workload, None if record is None else record.median_us)


# -- what ks_matmul asks --------------------------------------------------------------------------------


class LibraryCalls:
    """The batches of one chain that torch's own matmuls serve, and how."""

    def __init__(
        self,
        patterns: Sequence[Pattern],
        layout: str,
        dtype: str,
        device: Device,
        kernel_us: Callable[[int], float | None] = lambda batch: None,
    ) -> None:
        """Nothing is read before the first question. kernel_us: what logs say of our kernel for a batch."""
        self._kernel_us = kernel_us
        self._patterns, self._layout, self._dtype, self._device = tuple(patterns), layout, dtype, device
        self._names: dict[int, str | None] = {}
        self._lock = threading.Lock()
        self._prepared: Any = None

    def name(self, batch: int) -> str | None:
        """The formulation for a batch, None for our kernels."""
        if self._device.kind != "cuda":  # tables are of GPUs
            return None
        if batch not in self._names:
            self._names[batch] = self._choose(batch)
        return self._names[batch]

    def saved_us(self, batch: int) -> float | None:
        """Microseconds that the formulation for a batch saves; None where our kernels serve it."""
        name, selector = self.name(batch), selector_for(self._device.name)
        if name is None or selector is None:
            return None
        kernel, library, _ = selector.times(self._workload(batch), self._kernel_us(batch))
        return math.inf if kernel is None else kernel - library[name]

    def run(self, name: str, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Y of contiguous or other x by a formulation."""
        result: Tensor = self._call(name, weights)(x.contiguous())
        return result

    def _workload(self, batch: int) -> KSMatmul:
        return KSMatmul(batch=batch, pattern=self._patterns, dtype=self._dtype, layout=self._layout)

    def _choose(self, batch: int) -> str | None:
        selector = selector_for(self._device.name)
        if selector is None:
            return None
        from kronsched.nn.ks_select_library import serves

        try:
            workload = self._workload(batch)
        except UnsupportedError:
            return None
        name = selector.choose(workload, self._kernel_us(batch)).name
        first = self._layout == "batch_first"
        return name if name != KERNEL and all(serves(name, p, first) for p in self._patterns) else None

    def _call(self, name: str, weights: Sequence[Tensor]) -> Any:
        """The prepared formulation, kept while the weights live unchanged; never across the border of a CUDA graph."""
        import torch
        from torch.utils.weak import WeakIdKeyDictionary

        from kronsched.nn.ks_select_library import prepared

        capturing = weights[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing or any(w.is_inference() for w in weights):
            return prepared(name, weights, self._layout)
        state = (name, [(w._version, w.data_ptr()) for w in weights])
        with self._lock:
            if self._prepared is None:
                self._prepared = WeakIdKeyDictionary()
            known, call = self._prepared.get(weights[0], (None, None))
            if known != state:
                call = prepared(name, [w.detach() for w in weights], self._layout)
                self._prepared[weights[0]] = state, call
        return call
