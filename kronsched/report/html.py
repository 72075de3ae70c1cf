"""Writes the report: one HTML file with its style and figures inside, which loads nothing from anywhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

import kronsched
from kronsched.errors import ArgumentError
from kronsched.records.journal import read_log
from kronsched.records.schema import TuningRecord
from kronsched.report.summary import sections_of

# Characters HTML does not allow even when escaped.
_CONTROLS = dict.fromkeys([*range(9), 11, 12, *range(14, 32), 127, 0xFFFE, 0xFFFF], "\ufffd")


def write_report(log: str | os.PathLike[str], out_html: str | os.PathLike[str]) -> Path:
    """Read a tuning log and write its report; returns the path of the page.

    A section for each workload and device: the best config, best time so far against trials and against wall time, the 20 fastest
    configs, failures by kind, the values tried of each knob, versions. All text from the log is escaped. Raises ArgumentError
    when the log cannot be read or the page cannot be written.
    """
    out = Path(out_html)
    page = render(read_log(log), Path(log).name)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except (OSError, ValueError) as e:  # ValueError: a NUL in the path
        raise ArgumentError(f"output={str(out)!r} cannot be written: {getattr(e, 'strerror', None) or e}") from None
    return out


def render(records: Sequence[TuningRecord], title: str) -> str:
    """The page as text."""
    from jinja2 import Environment, StrictUndefined

    from kronsched.report.svg import draw

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(draw=draw, us=_us, percent=_percent, number=_number)
    template = environment.from_string((files("kronsched.report") / "template.html.j2").read_text(encoding="utf-8"))
    page = template.render(
        title=title,
        sections=sections_of(records),
        records=len(records),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=kronsched.__version__,
    )
    return page.translate(_CONTROLS)


def _us(value: float | None) -> str:
    """Microseconds with four significant digits in a readable unit."""
    if value is None:
        return "–"
    for scale, unit in ((1e6, "s"), (1e3, "ms"), (1.0, "µs")):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value * 1e3:.4g} ns"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.3g}%"


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return "–" if value is None else str(value)
