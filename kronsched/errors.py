"""The exceptions kronsched raises on purpose. The CLI turns `UserError` into one line and exit code 2."""

from __future__ import annotations


class KronschedError(Exception):
    """Base of every error kronsched raises itself."""


class UserError(KronschedError):
    """A user's mistake. The message is one line: field, value, what is allowed."""


class ArgumentError(UserError, ValueError):
    """An argument has a value that is not allowed."""


class ArgumentTypeError(UserError, TypeError):
    """An argument has the wrong type, dtype or device."""


class UnsupportedError(ArgumentError):
    """A valid request that no schedule of this version can serve on this device."""


class InvalidConfig(KronschedError):
    """A config breaks a constraint of its search space; found before anything is built."""


class CompileError(KronschedError):
    """Lowering, NVRTC, nvcc or the host linker failed on a candidate."""


class RecordError(KronschedError):
    """A tuning record cannot be used (wrong schema, unknown family or space)."""


def choose(field: str, value: object, allowed: object) -> ArgumentError:
    """The standard message for a value outside a closed set."""
    return ArgumentError(f"{field}={value!r} is not allowed: choose one of {', '.join(map(str, allowed))}")  # type: ignore[call-overload]
