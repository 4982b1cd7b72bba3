"""Prefect flows: node, swarm, archive, evaluate. Thin: what they do lies in `sapo`.

A process of flows that the supervisor started ends with it, from the first moment on, which is before the
seconds that importing Prefect takes.
"""

from sapo.core.child_process import watch_parent

watch_parent()
