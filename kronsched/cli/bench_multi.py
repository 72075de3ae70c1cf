"""`kronsched bench kron-multi [CASE …]`: scaling of a Kron-Matmul over the GPUs (or CPU processes) of this host, or of torchrun.

Read first: `BenchCommand` (how `bench` finds it), `_multi`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kronsched.cli.options import Seconds, json_option
from kronsched.cli.output import only_json, print_json, print_table, share_text, time_text
from kronsched.cli.shapes import check_output
from kronsched.errors import ArgumentError
from kronsched.hardware import resolve_target
from kronsched.hardware.presets import PRESETS

if TYPE_CHECKING:
    from kronsched.bench.kron_multi import Row
    from kronsched.bench.kron_multi_model import ModelRow
    from kronsched.distributed.cost import Link

NAME = "kron-multi"
CASES = ("64x64^4", "128x128^4")
"""The shapes of FastKron's scaling experiments."""
_START = time.perf_counter()


class BenchCommand(click.Command):
    """`bench`, whose first argument may also be `kron-multi`, a command with options of its own."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """The context of `bench`, or of the other command."""
        if args[:1] == [NAME]:
            return kron_multi.make_context(f"{info_name} {NAME}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


def _multi(
    *,
    cases: tuple[str, ...],
    ranks: int | None,
    device: str,
    dtype: str,
    modes: str,
    chunks: str,
    tries: int,
    repeats: int,
    timeout_s: float,
    model: str | None,
    measured: str | None,
    output: str | None,
    as_json: bool,
) -> int:
    from kronsched.bench import kron_multi as bench

    if model is not None or measured is not None:
        return _model(model, measured, as_json)
    kind = _kind(device)
    asked = [bench.case_of(text, dtype, kind) for text in cases or CASES]
    wanted = _modes(modes)
    pieces = _numbers("chunks", chunks)
    check_output(output)
    link: Link | None = None
    rows: list[Row] = []
    count = _count(ranks, kind)
    listed = bench.calls(asked, wanted, count, pieces, resolve_target(kind), tries or None)
    _note(f"{len(asked)} case(s) with {count} rank(s) of {kind}: {len(listed)} measurements")
    with only_json(as_json):
        for found in _results(bench.measure, count, kind, (listed, repeats), timeout_s):
            if isinstance(found, str):
                _note(found)
                continue
            if isinstance(found, bench.Row):
                rows.append(found)
                _note(_line(found))
            else:
                link = found
                _note(f"link: {link.gbs:.4g} GB/s leave each rank, latency {link.latency_us:.3g} µs")
            if output is not None:
                Path(output).write_text(json.dumps(_summary(kind, rows, link), indent=1) + "\n", encoding="utf-8")
    if not rows and _quiet_rank():
        return 0
    if as_json:
        print_json(_summary(kind, rows, link))
    else:
        _print(rows)
    return 0


def _model(ranks: str | None, measured: str | None, as_json: bool) -> int:
    """The model of scaling instead of a measurement."""
    from dataclasses import asdict

    from kronsched.bench.kron_multi import rows_of
    from kronsched.bench.kron_multi_model import link_of, model

    if measured is None:
        raise ArgumentError("--model needs --from: the JSON that `kronsched bench kron-multi -o` has written")
    try:
        data = json.loads(Path(measured).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ArgumentError(f"--from={measured!r} cannot be read: {e}") from None
    if not isinstance(data, dict):
        raise ArgumentError(f"--from={measured!r} is not a result of `kronsched bench kron-multi`")
    device = next((d for d in PRESETS.values() if d.name == data.get("device")), None) or resolve_target("cpu")
    rows = model(data, _numbers("model", ranks or "2,4,8,16,64,256,1024"), device, columns=(None, 2, 8))
    if as_json:
        print_json({"suite": f"{NAME}-model", "device": device.name, "rows": [asdict(row) for row in rows]})
        return 0
    if measured_rows := rows_of(data):
        _print(measured_rows)
        click.echo()
    _print_model(device.name, rows, link_of(data))
    return 0


def _print_model(name: str, rows: Sequence[ModelRow], link: Link) -> None:
    table = [
        [
            row.case,
            row.mode,
            str(row.ranks),
            f"{row.grid[0]}×{row.grid[1]}" + ("" if row.columns is None else f" (GK={row.columns})"),
            time_text(row.us),
            share_text(row.efficiency),
            time_text(row.exchange_us),
            f"{row.exchange_bytes / 1e6:.4g} MB",
        ]
        for row in rows
    ]
    columns = ["case", "mode", "GPUs", "grid", "time", "efficiency", "exchange", "sent by a GPU"]
    print_table(f"model of scaling on {name}; nothing is measured here", columns, table)
    click.echo(
        f"link: {link.gbs:.4g} GB/s, {link.latency_us:.3g} µs ({link.source}); hosts of 8, 45 GB/s a GPU between them (assumed)"
    )
    click.echo("kernels: the measured time of one GPU, shared out by flops; no contention, no stragglers: upper bounds")


def _count(ranks: int | None, kind: str) -> int:
    """How many ranks there will be, or are under torchrun."""
    from kronsched.distributed import launch

    if launch.under_torchrun():
        if ranks is not None:
            raise ArgumentError("--ranks is not allowed under torchrun, which says how many there are")
        return int(os.environ["WORLD_SIZE"])
    count = ranks or (launch.usable_ranks(kind) if kind == "cuda" else 2)
    launch.check_ranks(count, kind)
    return count


def _results(work: Any, ranks: int, kind: str, arguments: tuple[Any, ...], timeout_s: float) -> Iterator[Any]:
    """What rank 0 hands out: of new processes, or of this one under torchrun."""
    from kronsched.bench.kron_multi_kernels import prepare
    from kronsched.distributed import launch

    if not launch.under_torchrun():
        prepare(arguments[0], resolve_target(kind), _note)  # the ranks then find the kernels in the cache
        yield from launch.run_ranks(work, ranks, kind, arguments, timeout_s=timeout_s)
        return
    found: list[Any] = []
    with launch.joined(kind, timeout_s) as device:
        work(found.append if not _quiet_rank() else lambda _: None, device, *arguments)
    yield from found


def _note(text: str) -> None:
    """A line of progress with the time since the start: a run that is cut off tells where it was."""
    click.echo(f"{time.perf_counter() - _START:6.1f} s  {text}", err=True)


def _quiet_rank() -> bool:
    """Whether this is a rank of torchrun that prints nothing."""
    from kronsched.distributed.launch import under_torchrun

    return under_torchrun() and os.environ["RANK"] != "0"


def _kind(device: str) -> str:
    if device not in ("auto", "cuda", "cpu"):
        raise ArgumentError(f"device={device!r} is not allowed: choose one of auto, cuda, cpu")

    return resolve_target(device).kind


def _modes(text: str) -> list[str]:
    from kronsched.bench.kron_multi import MODES
    from kronsched.errors import choose

    found = [piece.strip() for piece in text.split(",") if piece.strip()]
    for mode in found:
        if mode not in MODES:
            raise choose("mode", mode, MODES)
    return found


def _numbers(name: str, text: str) -> list[int]:
    pieces = [piece.strip() for piece in text.split(",") if piece.strip()]
    if not pieces or not all(p.isdigit() and int(p) for p in pieces):
        raise ArgumentError(f"{name}={text!r} is not allowed: ints ≥ 1 with commas are needed")
    return [int(p) for p in pieces]


def _summary(kind: str, rows: list[Row], link: Link | None) -> dict[str, Any]:
    from kronsched.records.schema import versions

    measured = None if link is None else {"gbs": link.gbs, "latency_us": link.latency_us}
    name = resolve_target("cpu" if kind == "cpu" else "cuda").name
    listed = [row.to_dict() for row in rows]
    return {"suite": NAME, "device": name, "link": measured, "rows": listed, "versions": versions()}


def _line(row: Row) -> str:
    sent = "nothing exchanged" if not row.exchange_bytes else f"{row.exchange_bytes / 1e6:.4g} MB sent by a rank"
    error = "not checked" if row.error is None else f"error {row.error:.2g}"
    return (
        f"{row.case} {row.mode} grid {row.grid[0]}×{row.grid[1]}: {time_text(row.us)}, {row.speedup:.3g}× of one rank, "
        f"{row.chunks} piece(s), {sent}, {error}"
    )


def _print(rows: list[Row]) -> None:
    columns = ["case", "mode", "grid", "m", "time", "one rank", "speed-up", "efficiency", "pieces", "phases", "sent", "on paper"]
    table = []
    for row in rows:
        sent = f"{row.exchange_bytes / 1e6:.4g} MB" + ("" if row.exchange_bytes == row.least_bytes else " (not the least)")
        table.append(
            [
                row.case,
                row.mode,
                f"{row.grid[0]}×{row.grid[1]}",
                str(row.m),
                time_text(row.us),
                time_text(row.one_us),
                f"{row.speedup:.3g}×",
                share_text(row.efficiency),
                str(row.chunks),
                "+".join(map(str, row.phases)),
                sent,
                time_text(row.paper_us),
            ]
        )
    print_table(f"{NAME} on {rows[0].ranks if rows else 0} rank(s)", columns, table)
    for (case, mode), best in _best(rows).items():
        click.echo(f"{case} {mode}: {best.speedup:.3g}× of one rank with {best.ranks}, grid {best.grid[0]}×{best.grid[1]}")
    click.echo("weak: rows per rank as in `case`; strong: these rows over all ranks. one rank: those rows on one rank alone.")
    click.echo("A grid n×1 splits rows and exchanges nothing; with more columns, rows are split too and exchanged in each phase.")


def _best(rows: list[Row]) -> dict[tuple[str, str], Row]:
    """The quickest grid of each case and mode."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = row.case, row.mode
        found[key] = min(found.get(key, row), row, key=lambda r: r.us)
    return found


kron_multi = click.Command(
    NAME,
    params=[
        click.Argument(["cases"], metavar="[CASE]...", nargs=-1),
        click.Option(["--ranks"], type=click.IntRange(1), default=None, help="Processes. [default: one a GPU; on CPUs 2]"),
        click.Option(["--device"], default="auto", help="auto, cuda (NCCL) or cpu (gloo). [default: auto]"),
        click.Option(["--dtype"], default="float32", help="[default: float32]"),
        click.Option(["--modes"], default="weak,strong", help="[default: weak,strong]"),
        click.Option(["--chunks"], default="1,2,4,8", help="Numbers of pieces to try. [default: 1,2,4,8]"),
        click.Option(
            ["--tries"],
            type=click.IntRange(0),
            default=3,
            help="Ways to split a grid's work that are measured, the best on paper; 0 is all. [default: 3]",
        ),
        click.Option(["--repeats"], type=click.IntRange(1), default=5, help="Timed calls. [default: 5]"),
        click.Option(["--timeout", "timeout_s"], type=Seconds(1), default=120.0, help="Seconds. [default: 120]"),
        click.Option(["--model"], default=None, metavar="RANKS", help="A model of scaling to so many ranks, such as 16,1024."),
        click.Option(
            ["--from", "measured"], type=click.Path(), default=None, help="The measured JSON that the model is made from."
        ),
        click.Option(["-o", "--output"], type=click.Path(dir_okay=False), default=None, help="Store the JSON here as it grows."),
        json_option,
    ],
    callback=_multi,
    help="Weak and strong scaling over ranks. CASE: factors and rows a rank, such as 64x64^4:16 or 8x4,4x8:1000.",
)
