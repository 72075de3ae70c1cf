"""One self-contained HTML page from a tuning log.

Path of the data: records -> `summary.Report` and `curves.Curve` (what is shown) -> `svg` and `template.html.j2` (how).
"""

from kronsched.report.html import write_report

__all__ = ["write_report"]
