"""`kronsched emit LOG|FAMILY … -o DIR`: write the source, the binary and the manifest of a kernel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kronsched.cli.keys import key_option, workload_of
from kronsched.cli.options import FamilyGroup, compiler_option, json_option, target_option
from kronsched.cli.output import config_text, only_json, print_json

if TYPE_CHECKING:
    from kronsched.workloads.base import Workload

_OUT = click.Option(["-o", "--out"], type=click.Path(), required=True, help="Directory to write.")
_OWN = (_OUT, target_option, compiler_option, json_option)


def _emit(what: Workload | str, *, out: str, target: str, compiler: str, as_json: bool, key: str | None = None) -> int:
    from kronsched.runtime.export import emit as run_emit
    from kronsched.runtime.manifest import Manifest

    with only_json(as_json):
        workload = workload_of(what, key) if isinstance(what, str) else None
        files = [str(path) for path in run_emit(what, out, target, workload=workload, compiler=compiler)]
        manifest = Manifest.load(Path(out))
    if as_json:
        about = {"space": manifest.space, "config": manifest.config, "origin": manifest.origin, "device": manifest.device}
        print_json({"out": out, "files": files, **about})
    else:
        click.echo("\n".join(files))
        click.echo(f"{manifest.space}: {config_text(manifest.config)}")
        click.echo(f"for {manifest.device}; {manifest.origin}")
    return 0


def _emit_log(*, log: str, **options: object) -> int:
    return _emit(log, **options)  # type: ignore[arg-type]


emit = FamilyGroup(
    "emit",
    _emit,
    _OWN,
    fallback=click.Command("LOG", params=[click.Argument(["log"], type=click.Path()), key_option, *_OWN], callback=_emit_log),
    help="Write source, binary and manifest of the best kernel of a log, or of a shape.",
)
