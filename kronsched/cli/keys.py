"""`--key`: one workload of a log that holds several, by its key (as `kronsched show` prints it) or the beginning of that.

Read first: `only_key`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from kronsched.errors import ArgumentError

if TYPE_CHECKING:
    from kronsched.records import TuningRecord
    from kronsched.workloads.base import Workload

MOST_LISTED = 12
"""Keys that an error lists."""

key_option = click.Option(
    ["--key"], default=None, metavar="KEY", help="Only the workload of this key, or of what a key begins with; `show` lists keys."
)


def only_key(records: Sequence[TuningRecord], key: str | None) -> list[TuningRecord]:
    """The records of the one workload whose key is, or begins with, `key`; all where it is None.

    Raises ArgumentError, listing keys, when that is none or more than one.
    """
    if key is None:
        return list(records)
    keys = dict.fromkeys(record.workload_key for record in records)
    found = [known for known in keys if known == key] or [known for known in keys if known.startswith(key)]
    if len(found) != 1:
        what = "no workload of the log" if not found else f"{len(found)} workloads of the log"
        choices = found or list(keys)
        listed = ", ".join(choices[:MOST_LISTED]) + (f", … ({len(choices)} in all)" if len(choices) > MOST_LISTED else "")
        raise ArgumentError(f"key={key!r} names {what}: choose one of {listed or 'none, the log is empty'}")
    return [record for record in records if record.workload_key == found[0]]


def workload_of(log: str, key: str | None) -> Workload | None:
    """The workload of a log that the key names; None without a key."""
    from kronsched.records import read_log
    from kronsched.registry import workload_from_dict

    return None if key is None else workload_from_dict(only_key(list(read_log(log)), key)[0].workload)
