"""`kronsched train --family F -o DIR`: train the cost models that tuning and `load` start from, from logs and tables."""

from __future__ import annotations

from pathlib import Path

import click

from kronsched.cli.options import json_option
from kronsched.cli.output import only_json, print_json


def _train(*, logs: tuple[str, ...], family: str, out: str | None, seed: int, as_json: bool) -> int:
    from kronsched.cost_model.pretrained import model_dirs, train
    from kronsched.cost_model.transfer import logs_in
    from kronsched.records.database import search_dirs

    given = [Path(p) for p in logs]
    for path in given:
        if not path.exists():
            raise click.BadParameter(f"{str(path)!r} does not exist", param_hint="LOG")
    found = [p for p in given if p.is_file()] + logs_in([p for p in given or search_dirs() if p.is_dir()], tables=True)
    with only_json(as_json):
        done = train(family, found, Path(out) if out is not None else model_dirs()[0], seed)
    if as_json:
        models = [{"space": d.schedule, "shapes": d.shapes, "records": d.records, "files": [*map(str, d.files)]} for d in done]
        print_json({"family": family, "logs": [*map(str, found)], "models": models})
    else:
        for d in done:
            click.echo(f"{d.schedule}: {d.records} records of {d.shapes} shapes -> {d.files[0]}")
    return 0


train = click.Command(
    "train",
    params=[
        click.Argument(["logs"], type=click.Path(), nargs=-1, metavar="[LOG|DIR]..."),
        click.Option(["--family"], required=True, help="The family whose schedules get a model each."),
        click.Option(["-o", "--out"], type=click.Path(), default=None, help="Folder to write. [default: beside your logs]"),
        click.Option(["--seed"], type=click.IntRange(0), default=0, help="Seed of the training. [default: 0]"),
        json_option,
    ],
    callback=_train,
    help="Train the cost models that tuning starts from. Without LOG: from your logs, the shipped ones and their tables.",
)
