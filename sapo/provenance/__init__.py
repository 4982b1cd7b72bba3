"""Replay, what-if and lineage: how a model came about."""
