"""`kronsched doctor`: what works on this machine and what to do about the rest."""

from __future__ import annotations

import click

from kronsched.cli.options import json_option
from kronsched.cli.output import only_json, print_json


def _doctor(*, as_json: bool) -> int:
    from kronsched.doctor import diagnose

    with only_json(as_json):
        checks = diagnose()
    broken = [c for c in checks if c.status == "broken"]
    if as_json:
        print_json({"ok": not broken, "checks": [c.to_dict() for c in checks]})
    else:
        marks = {"ok": "ok    ", "absent": "absent", "broken": "BROKEN"}
        for check in checks:
            click.echo(f"{marks[check.status]}  {check.name:<16} {check.detail}")
            if check.advice:
                click.echo(f"{'':24} → {check.advice}")
        click.echo("all that is needed works" if not broken else f"{len(broken)} broken: see the advice above")
    return 1 if broken else 0


doctor = click.Command("doctor", params=[json_option], callback=_doctor, help="Say what works on this machine, and what to do.")
