"""Tuning records: schema, append-only journal, look-up, replay. A leaf package on the load path: no TVM, no torch at import.

Read first: `TuningRecord` (one measured candidate) and `Journal` (the file that holds them).
"""

from kronsched.records.database import best_in, default_log, find_best, search_dirs
from kronsched.records.journal import Journal, read_log
from kronsched.records.schema import RecordWarning, TuningRecord, record_of

__all__ = [
    "Journal",
    "RecordWarning",
    "TuningRecord",
    "best_in",
    "default_log",
    "find_best",
    "read_log",
    "record_of",
    "search_dirs",
]
