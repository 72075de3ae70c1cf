"""Named suites of shapes, and what kronsched and its peers take for them.

Read first: `run.run_suite`. A suite is a JSON file in `suites/`; a peer is one function in `peers/`.
"""
