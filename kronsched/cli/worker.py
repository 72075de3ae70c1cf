"""`kronsched worker`: measure for tuners on other machines (`kronsched tune … --cluster ADDRESS`)."""

from __future__ import annotations

import click


def _worker(*, listen: str, devices: str, key: str | None, builders: int | None) -> int:
    from kronsched.hardware import measure_ceilings, resolve_target
    from kronsched.measure.farm_protocol import cluster_key, default_key_file, parse_address
    from kronsched.measure.farm_worker import Worker
    from kronsched.search.places import names

    address = parse_address(listen)
    found = [measure_ceilings(resolve_target(name)) for name in names("devices", devices)]
    worker = Worker(address, cluster_key(key, make=True), found, builders, say=lambda line: click.echo(line, err=True))
    where = f"{address[0]}:{worker.port}"
    listed = ", ".join(d.torch_device for d in found)
    click.echo(f"worker on {where} with {listed} ({found[0].name}); key in {key or default_key_file()}")
    try:
        worker.serve()
    finally:
        worker.close()
    return 0


worker = click.Command(
    "worker",
    params=[
        click.Option(
            ["--listen"],
            default="127.0.0.1:7433",
            help="0.0.0.0:7433 for other machines, in a trusted network: nothing is encrypted. [default: 127.0.0.1:7433]",
        ),
        click.Option(["--devices"], default="auto", help='Devices of one model, such as "cuda:0,cuda:1". [default: auto]'),
        click.Option(
            ["--key"], type=click.Path(dir_okay=False), default=None, help="File with the shared key, made when missing."
        ),
        click.Option(["--builders"], type=click.IntRange(1), default=None, help="Build processes. [default: the usable cores]"),
    ],
    callback=_worker,
    help="Measure for tuners on other machines: `kronsched tune … --cluster ADDRESS`.",
)
