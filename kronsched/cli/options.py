"""Commands and options generated from the registry and from the fields of each workload, so that a family needs no CLI code.

Read first: `FamilyGroup`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from kronsched import registry
from kronsched.errors import ArgumentError, UserError
from kronsched.workloads.base import Workload

_TYPES: dict[Any, click.ParamType[Any]] = {int: click.INT, float: click.FLOAT, str: click.STRING}


class Seconds(click.FloatRange):
    """A finite number: NaN is in every range, and nothing ever takes longer."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As click's."""
        seconds: float = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{seconds} is not a finite number.", param, ctx)
        return seconds


class FamilyGroup(click.Group):
    """A group with one command a family, made when asked for: families from plugins and entry points are included.

    body: called as body(workload, **own options).  own: the options that the command has besides the workload's fields.
    fallback: a command that takes a first argument that names no family (for `emit LOG`), or None.
    """

    def __init__(
        self,
        name: str,
        body: Callable[..., Any],
        own: Sequence[click.Parameter],
        fallback: click.Command | None = None,
        **attrs: Any,
    ) -> None:
        """Make the group; `attrs` go to click.Group."""
        super().__init__(name, subcommand_metavar="FAMILY [OPTIONS]" if fallback is None else "FAMILY|LOG [OPTIONS]", **attrs)
        self.body = body
        self.own = list(own)
        self.fallback = fallback

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The known families."""
        return registry.family_names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a family."""
        if cmd_name not in registry.family_names():
            return None
        cls = registry.family(cmd_name)

        def callback(**values: Any) -> Any:
            workload = workload_from_options(cls, values)
            return self.body(workload, **values)

        summary = (cls.__doc__ or "").strip().split("\n")[0]
        return click.Command(cmd_name, params=[*workload_options(cls), *self.own], callback=callback, help=summary)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, but an unknown name is one clear line, or the fallback's first argument."""
        name = args[0]
        if name not in registry.family_names() and not name.startswith("-"):
            if self.fallback is None:
                registry.family(name)  # raises: lists the known families
            return self.fallback.name, self.fallback, args  # type: ignore[union-attr]
        return super().resolve_command(ctx, args)


def workload_options(cls: type[Workload]) -> list[click.Option]:
    """One option a field. Values are validated by the workload itself, so that the API and the CLI say the same."""
    hints = typing.get_type_hints(cls)
    shown = [f for f in dataclasses.fields(cls) if f.metadata.get("cli", "") is not None]  # type: ignore[arg-type]
    return [_option(cls.__name__, f, hints[f.name]) for f in shown]


def _option(owner: str, f: dataclasses.Field[Any], hint: Any) -> click.Option:
    flag = "--" + str(f.metadata.get("cli", f.name.replace("_", "-")))
    attrs: dict[str, Any] = {"help": str(f.metadata.get("help", ""))}
    if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
        attrs["required"] = True
    else:
        attrs["default"] = None  # "not given": the field's own default counts
        if isinstance(f.default, int | float | str):
            attrs["help"] = f"{attrs['help']} [default: {f.default}]".strip()
    plain = [t for t in typing.get_args(hint) or (hint,) if t is not type(None)]
    kind = plain[0] if len(plain) == 1 else hint  # `int | None` is an int that may be left out
    if kind is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}", _parameter(f.name)], **attrs)
    if "parse" in f.metadata:
        kind = str
    if kind not in _TYPES:
        raise ArgumentError(f"{owner}.{f.name} is not allowed: a field must be int, float, str, bool or have `parse`")
    return click.Option([flag, _parameter(f.name)], type=_TYPES[kind], **attrs)


def workload_from_options(cls: type[Workload], values: dict[str, Any]) -> Workload:
    """Take the workload's values out of `values` and build it; an option not given keeps the field's default."""
    fields: dict[str, Any] = {}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        value = values.pop(_parameter(f.name), None)
        if value is None:
            continue
        value = f.metadata["parse"](value) if "parse" in f.metadata else value
        fields.update(zip(f.metadata["sets"], value, strict=True) if "sets" in f.metadata else [(f.name, value)])
    return cls(**fields)


def _parameter(field_name: str) -> str:
    """The keyword of a workload's field, kept apart from the command's own (a family may have a field "seed")."""
    return f"workload_{field_name}"


@contextlib.contextmanager
def errors_name_options(**fields: str) -> Iterator[None]:
    """Within it, an error about a field, such as "seed=-1 is not allowed", names the running command's option: "--seed=-1 …".

    fields: the options of fields that are called otherwise, such as strategy="--peer-strategy".
    """
    try:
        yield
    except UserError as e:
        spelled = {p.name: p.opts[-1] for p in click.get_current_context().command.params if p.opts[-1].startswith("--")} | fields
        field, _, rest = str(e).partition("=")
        if field not in spelled:
            raise
        raise type(e)(f"{spelled[field]}={rest}") from None


target_option = click.Option(
    ["--target"], default="auto", help='"auto", "cpu", "cuda", "cuda:N" or a preset such as nvidia/h200. [default: auto]'
)
compiler_option = click.Option(
    ["--compiler"],
    type=click.Choice(["nvrtc", "nvcc"]),
    default="nvrtc",
    help="nvrtc, or nvcc where a CUDA toolkit is installed. [default: nvrtc]",
)
json_option = click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object on stdout, all else on stderr.")
