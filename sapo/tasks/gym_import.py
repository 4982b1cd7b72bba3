"""ReasoningGYM as a task worker needs it: without matplotlib.

    from sapo.tasks.gym_import import reasoning_gym

cellpylib, which plays the game of life for two data sets, can also draw it and imports matplotlib for that:
38 MB and a third of a second in every worker, for pictures that are never drawn there.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType

DRAWING = {
    "matplotlib": (),
    "matplotlib.animation": (),
    "matplotlib.collections": (),
    "matplotlib.pyplot": (),
    "mpl_toolkits": (),
    "mpl_toolkits.mplot3d": ("Axes3D",),
}
"""Modules that cellpylib imports, and names from them; nothing of it is used until something is drawn."""


@contextmanager
def empty(modules: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Import something that is content with empty modules of these names, in which these are None; those
    loaded already stay.

    Afterwards the real ones can be imported; what was imported meanwhile keeps the empty ones.
    """
    made = {name: ModuleType(name) for name in modules if name not in sys.modules}
    for name, module in made.items():
        vars(module).update(dict.fromkeys(modules[name]))
        package, _, attribute = name.rpartition(".")
        if package in made:
            setattr(made[package], attribute, module)
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


with empty(DRAWING):
    import reasoning_gym

__all__ = ["reasoning_gym"]
