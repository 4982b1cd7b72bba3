"""Which files Python and the libraries need: what a walled worker may still read."""

import os
import site
import sys
import sysconfig
from collections.abc import Iterator

_SYSTEM = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/usr/share/zoneinfo",
    "/dev/null",
    "/dev/urandom",
)


def libraries() -> list[str]:
    """The folders and files of Python, of what is installed beside it and of what is loaded, links resolved.
    Not the folders on `sys.path` themselves: one of them may be a checkout with a swarm's keys in it."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    places = [sysconfig.get_path(name) for name in names]
    places += [os.path.dirname(os.__file__), os.path.join(sys.base_prefix, "lib"), *site.getsitepackages()]
    places += [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    found = {os.path.realpath(path) for path in [*places, *_SYSTEM, *_loaded()]}
    kept: list[str] = []
    for path in sorted(path for path in found if path != "/" and os.path.exists(path)):
        if not kept or os.path.commonpath([kept[-1], path]) != kept[-1]:
            kept.append(path)
    return kept


def _loaded() -> Iterator[str]:
    """The folder of each package that is loaded, the file of each module that stands alone."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if "." in name or not isinstance(path, str):
            continue
        real = os.path.realpath(path)
        yield os.path.dirname(real) if os.path.basename(real).startswith("__init__.") else real
