"""Swarm sAmpling Policy Optimization (arXiv:2509.08721): RL post-training as a swarm."""

import os

from sapo.core.determinism import fix
from sapo.core.loopback import never_by_proxy

__version__ = "0.1.0"

fix(os.environ)
never_by_proxy(os.environ)

# OpenMP reads this when torch is loaded. Threads that spin while they wait make a step ten times slower as
# soon as a swarm has more threads than cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
