"""Building, checking and timing candidates.

Read first: `base` (what a measurement is), `live` (how one is made), `worker.run` (the checks a candidate goes through).
"""
