"""Swarm sAmpling Policy Optimization (arXiv:2509.08721): RL post-training as a swarm."""

__version__ = "0.1.0"
