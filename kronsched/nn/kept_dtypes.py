"""`KeepsDtypes`: a module whose quantised buffers keep their dtype where a model is cast, such as by `half()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn


class KeepsDtypes(nn.Module):
    """A cast moves the buffers that `_kept` names to another device, if it does that, and leaves their values and dtype alone."""

    def _kept(self) -> Iterable[str]:
        """Names of buffers; all by default."""
        return list(self._buffers)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """What `to`, `half`, `type`, `cuda` and others come down to."""
        before = {name: self._buffers[name] for name in self._kept()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in before.items():
            after = self._buffers[name]
            if tensor is not None and after is not None and after.dtype != tensor.dtype:
                self._buffers[name] = tensor.to(after.device)
        return self
