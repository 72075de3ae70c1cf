"""HOW a workload is computed: one file a (family, technique)."""
