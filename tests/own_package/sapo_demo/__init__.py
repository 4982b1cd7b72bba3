"""A task, a sampler and a loss for swarms."""
