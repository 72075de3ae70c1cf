"""Compile, cache, load and call modules: from a config to a function on torch tensors or numpy arrays."""
