"""`kronsched show|replay|report LOG`: what a log holds, whether it still holds true, and a page about it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from kronsched.cli.keys import key_option, only_key, workload_of
from kronsched.cli.options import compiler_option, json_option
from kronsched.cli.output import config_text, counts_text, only_json, print_json, print_table, time_text

if TYPE_CHECKING:
    from kronsched.records import TuningRecord
    from kronsched.records.replay import ReplayResult

_LOG = click.Argument(["log"], type=click.Path())


def _show(*, log: str, key: str | None, top: int, as_json: bool) -> int:
    from kronsched.records import read_log

    with only_json(as_json):
        records = only_key(list(read_log(log)), key)
        groups: dict[tuple[str, str], list[TuningRecord]] = {}
        for record in records:
            groups.setdefault((record.workload_key, record.target["name"]), []).append(record)
        found = [_describe(group, top) for group in groups.values()]
    if as_json:
        print_json({"log": log, "records": len(records), "workloads": found})
        return 0
    for group in found:
        title = f"{group['label']} on {group['device']}: {group['records']} records, {counts_text(group['statuses'])}"
        title += f", key {group['key']}"
        rows = [[time_text(r["median_us"]), r["space"], config_text(r["config"]), r["timestamp"]] for r in group["best"]]
        print_table(title, ["time", "space", "config", "when"], rows)
    return 0


def _describe(records: list[TuningRecord], top: int) -> dict[str, Any]:
    """One workload on one device: counts by status and the fastest records."""
    best = sorted((r for r in records if r.ok), key=lambda r: r.median_us or 0.0)[:top]
    return {
        "workload": records[0].workload,
        "key": records[0].workload_key,
        "label": _label(records[0]),
        "device": records[0].target["name"],
        "records": len(records),
        "statuses": dict(Counter(r.status for r in records)),
        "best": [
            {
                "median_us": r.median_us,
                "space": r.space["name"],
                "config": r.config,
                "max_relative_error": r.result.get("max_relative_error"),
                "noise": r.result.get("noise"),
                "timestamp": r.timestamp,
            }
            for r in best
        ],
    }


def _label(record: TuningRecord) -> str:
    """The workload's own label, or its fields when the family is not known here (a log may come from elsewhere)."""
    from kronsched import registry
    from kronsched.errors import KronschedError

    try:
        return registry.workload_from_dict(record.workload).label
    except (KronschedError, TypeError, KeyError):
        return config_text(record.workload)


def _replay(*, log: str, key: str | None, measure: bool, verify: bool, best: bool, compiler: str, as_json: bool) -> int:
    from kronsched.records.replay import replay as run_replay

    def say(result: ReplayResult) -> None:
        click.echo(f"{result.status}: {_label(result.record)} {config_text(result.record.config)}", err=True)

    with only_json(as_json):
        workload = workload_of(log, key)
        results = run_replay(log, workload=workload, measure=measure, verify=verify, best=best, compiler=compiler, progress=say)
    counts = Counter(r.status for r in results)
    if as_json:
        print_json({"log": log, "counts": dict(counts), "results": [r.to_dict() for r in results]})
    else:
        rows = [
            [
                r.status,
                _label(r.record),
                time_text(r.recorded_us),
                time_text(r.measured_us),
                f"{r.ratio:.2f}" if r.ratio is not None else "–",
                r.error or "",
            ]
            for r in results
        ]
        print_table(f"{log}: {counts_text(counts)}", ["status", "workload", "recorded", "now", "ratio", "note"], rows)
    if results and all(r.status == "skipped" for r in results):
        why = "; ".join(dict.fromkeys(r.error for r in results if r.error))
        click.echo(
            f"kronsched: all {len(results)} record(s) were skipped, what was asked could not be checked here: {why}", err=True
        )
        return 1
    # Beside others, a record that could not be checked here is no failure; one that does not hold is.
    return 0 if all(r.status in ("reproduced", "skipped") for r in results) and results else 1


def _report(*, log: str, out: str, as_json: bool) -> int:
    from kronsched.report import write_report

    with only_json(as_json):
        path = write_report(log, out)
    if as_json:
        print_json({"log": log, "report": str(path)})
    else:
        click.echo(path)
    return 0


def _thin(*, log: str, out: str, best: int | None, as_json: bool) -> int:
    from kronsched.records.thin import best_log, thin_log

    with only_json(as_json):
        kept = thin_log(log, out) if best is None else best_log(log, out, best)
    if as_json:
        print_json({"log": log, "table": out, "records": kept})
    else:
        click.echo(f"{out}: {kept} records")
    return 0


show = click.Command(
    "show",
    params=[
        _LOG,
        key_option,
        click.Option(["--top"], type=click.IntRange(1), default=10, help="Fastest records to list a workload. [default: 10]"),
        json_option,
    ],
    callback=_show,
    help="Show what a log holds.",
)
replay = click.Command(
    "replay",
    params=[
        _LOG,
        key_option,
        click.Option(["--measure"], is_flag=True, help="Time each record again and compare."),
        click.Option(["--verify"], is_flag=True, help="Check each record's result against the reference."),
        click.Option(["--best"], is_flag=True, help="Only the fastest record of each workload and device."),
        compiler_option,
        json_option,
    ],
    callback=_replay,
    help="Rebuild the records of a log and compare source, numbers and time.",
)
report = click.Command(
    "report",
    params=[
        _LOG,
        click.Option(["-o", "--out"], type=click.Path(), default="report.html", help="Page to write. [default: report.html]"),
        json_option,
    ],
    callback=_report,
    help="Write one self-contained HTML page about a log.",
)
thin = click.Command(
    "thin",
    params=[
        _LOG,
        click.Option(["-o", "--out"], type=click.Path(), required=True, help="Table to write, *.jsonl.gz; with --best *.jsonl."),
        click.Option(["--best"], type=click.IntRange(1), default=None, help="Only so many of the fastest of each workload."),
        json_option,
    ],
    callback=_thin,
    help="Write a log as a small table for `kronsched simulate`: medians instead of all samples. With --best, a log for `load`.",
)
