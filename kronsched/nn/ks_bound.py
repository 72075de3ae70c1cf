"""Weights in the order that kernels read, kept for inference.

A kernel call reorders its weights first. Where a layer asked for it (`allow`), it is called again with the same parameters,
unchanged, and no gradient is recorded, they are bound to the kernel (`TunedModule.bind`), and later calls read what was kept. It
is forgotten when a parameter changes, which is when torch says so (its version, also after an optimiser or load_state_dict) or
its memory is another, and when a gradient is recorded. What is written past torch, such as through `parameter.data`, is not
seen: therefore nothing is kept unasked.

Read first: `serving`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kronsched.runtime.bound import BoundModule
from kronsched.runtime.module import TunedModule

if TYPE_CHECKING:
    from torch import Tensor

_lock = threading.Lock()
_kept: Any = None
"""For the first parameter of a chain: by artefact and device, the state of the chain's parameters and the bound module."""
_allowed: Any = None
"""Parameters of the layers that asked, weakly held."""
_vain: set[tuple[str, str]] = set()
"""Modules that compute nothing of the weights alone."""


def serving(module: TunedModule, weights: Sequence[Tensor]) -> TunedModule | BoundModule:
    """A `BoundModule`, to call without the weights, or the module. It is bound at the second call with the same weights."""
    import torch
    from torch.utils.weak import WeakIdKeyDictionary

    global _kept
    if not _allowed or any(w not in _allowed for w in weights):
        return module
    key = (str(module.artefact), module.device)
    if key in _vain or module.manifest.kind != "cuda" or any(type(w) is not torch.nn.Parameter for w in weights):
        return module
    if any(w.is_inference() for w in weights) or torch.cuda.is_current_stream_capturing():
        return module  # a graph reads weights that change after its capture
    state = [(id(w), w._version, w.data_ptr()) for w in weights]
    with _lock:
        if _kept is None:
            _kept = WeakIdKeyDictionary()
        kept = _kept.setdefault(weights[0], {})
        seen, bound = kept.get(key, (None, None))
        if seen != state:
            kept[key] = state, None
            return module
        if bound is None:
            bound = _bound(module, weights)
            if bound is None:
                _vain.add(key)
                return module
            kept[key] = state, bound
    result: BoundModule = bound
    return result


def allow(weights: Sequence[Tensor], allowed: bool = True) -> None:
    """Let parameters be kept in the order that kernels read, or not any more."""
    from torch.utils.weak import WeakIdKeyDictionary

    global _allowed
    forget(weights)
    with _lock:
        if _allowed is None:
            _allowed = WeakIdKeyDictionary()
        for w in weights:
            if allowed:
                _allowed[w] = True
            else:
                _allowed.pop(w, None)


def forget(weights: Sequence[Tensor]) -> None:
    """Keep nothing of these weights."""
    if _kept:
        with _lock:
            for w in weights:
                _kept.pop(w, None)


def clear() -> None:
    """Keep nothing."""
    global _kept
    with _lock:
        _kept = None
        _vain.clear()


def _bound(module: TunedModule, weights: Sequence[Tensor]) -> BoundModule | None:
    names = [spec.name for spec in module.manifest.inputs[1 : 1 + len(weights)]]
    if not module.manifest.constant_launches(names):
        return None
    # Detached: a parameter must not be kept alive by what is kept for it. Their memory is, so that its address stays its own.
    return module.bind(**dict(zip(names, (w.detach() for w in weights), strict=True)))
