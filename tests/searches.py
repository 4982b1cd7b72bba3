"""How random searches begin: from fixed seeds in `make test`, longer and from a new one in `make soak`."""

import os
from typing import Any

from hypothesis import settings

SEED = int(os.environ.get("SAPO_SEED", "6"))
"""Of searches that draw without hypothesis; `make soak` gives a new one."""
SOAK = "soak"
TIMES = 20
"""How many times as many examples soak tries, where a test does not say it."""


def register_profiles() -> None:
    """Have hypothesis search from fixed seeds, and know the profile of `make soak`."""
    settings.register_profile("fixed", settings.get_profile("ci"), max_examples=100)
    settings.register_profile(SOAK, settings.get_profile("ci"), derandomize=False, max_examples=TIMES * 100)
    settings.load_profile("fixed")


def searching(examples: int, soak: int = 0, **changes: Any) -> settings:
    """Settings of a search that tries so many examples in `make test`, and `soak` of them in `make soak`."""
    if settings.get_current_profile_name() == SOAK:
        examples = soak or TIMES * examples
    return settings(max_examples=examples, **changes)
