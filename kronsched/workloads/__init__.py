"""WHAT is computed: one file a family."""
