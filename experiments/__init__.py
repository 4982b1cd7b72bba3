"""Experiments: grids of arms and seeds, run in one process each, deterministic, compared with intervals."""
