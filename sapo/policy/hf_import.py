"""Hugging Face's transformers as a node needs it: without what it imports only because it is installed.

    from sapo.policy.hf_import import transformers

A model class imports scikit-learn, scipy, boto3 and Triton where they are installed, as MLflow and torch
have them: 160 MB a process and seconds of processor time for what no node does.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

UNUSED = ("boto3", "scipy", "sklearn")
"""Packages that transformers and accelerate do without, at the price of features that sapo does not use."""


@contextmanager
def absent(*names: str) -> Iterator[None]:
    """Import something as if these packages were not installed; those that are loaded already stay.

    A name that stands for None in `sys.modules` is not found, by Python's own rule. Afterwards all can be
    imported, but what asked for one meanwhile may remember that it is not there, as transformers does.
    """
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None is allowed, not annotated
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


# What was imported before has decided for itself what is there, and would fail half-way if that changed.
_absent: tuple[str, ...] = () if "transformers" in sys.modules else UNUSED
if _absent and not torch.cuda.device_count():  # to count them leaves CUDA to processes forked later
    _absent += ("triton",)  # the compiler for GPUs
with absent(*_absent):
    import transformers
    import transformers.modeling_utils
    import transformers.models.auto.modeling_auto
    import transformers.models.auto.tokenization_auto

# imported with adapters where it is installed; it warns that kernels of weights in four bits are not there
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

__all__ = ["quiet", "transformers"]


@contextmanager
def quiet() -> Iterator[None]:
    """Without the library's progress bars and warnings, which would fill logs and break the live view."""
    log = transformers.utils.logging
    shown, level = log.is_progress_bar_enabled(), log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if shown:
            log.enable_progress_bar()
