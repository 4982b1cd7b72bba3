"""Bit for bit: what an update depends on besides its inputs, fixed before torch is used and recorded.

Importing `sapo` calls `fix`, so every process that trains or repeats has the same settings, whoever started
it and whatever its caller's environment holds. Importing this module does not import torch.
"""

import ctypes
import platform
from collections.abc import Mapping, MutableMapping
from functools import cache
from pathlib import Path

FIXED: Mapping[str, str] = {"MKL_CBWR": "AUTO", "MKL_DYNAMIC": "FALSE", "OMP_DYNAMIC": "FALSE"}
"""MKL's reproducible mode: the best code path of the CPU at hand, with fixed cache sizes, reductions in one
order and static scheduling, wherever the data lies in memory. It asks for a fixed number of threads besides,
so neither library may give fewer than asked for."""
BANNED = ("OMP_THREAD_LIMIT",)
"""Would silently give fewer threads than the config asks for."""
MODES = {1: "OFF", 2: "AUTO", 3: "COMPATIBLE"}
"""What MKL calls its modes; the others name instruction sets."""


UPDATE = "5"
"""The arithmetic of an update, raised with every release that makes other bits of the same batch.

1 took the logits of a micro-batch at once; 2 took the head in blocks of the vocabulary; 3 divides `dr_grpo`
by all completions of the batch, clips `cispo` from above only, and lets guards see own completions that are
not trained; 4 gives ids that no token has probability 0, and undoes a step after which weights are
beyond all bounds; 5 bounds what a foreign group does (`learn.foreign_bound`) and computes what all prompts
begin with once, where that is 64 tokens or more. Every other batch of 2 or 3 has the
same bits in 4, and in 5."""


def fix(environment: MutableMapping[str, str]) -> None:
    """Put the settings into an environment; in a process's own, before torch first computes anything."""
    environment.update(FIXED)
    for name in BANNED:
        environment.pop(name, None)


def arithmetic(device: str = "cpu") -> dict[str, str]:
    """What the bits of an update in this process depend on, besides its inputs and the number of threads.

    `cpu` is the instruction set torch uses, `mkl` the mode that MKL is in, or `absent`; `device` where the
    model lives, with the name of a GPU.
    """
    import torch

    return {
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "device": device if device == "cpu" else f"{device} {torch.cuda.get_device_name()}",
        "mkl": _mkl_mode(),
        "processor": _processor(),
        "torch": str(torch.__version__),
        "update": UPDATE,
    }


def differences(recorded: Mapping[str, str | int] | None, device: str = "cpu") -> str:
    """What is other here than where a round was recorded: `torch was 2.13.0, is 2.14.0`; empty if nothing.

    `device` is the kind of device the model lives on here. Only what both know is compared: a record of an
    older release holds less.
    """
    import torch

    from sapo.core import own_code

    if not recorded:
        return ""
    own = own_code.versions(own_code.recorded(recorded))
    return changed(recorded, {**arithmetic(device), "threads": torch.get_num_threads(), **own})


def changed(before: Mapping[str, str | int] | None, after: Mapping[str, str | int]) -> str:
    """What is other in one record of `arithmetic` than in another; what either does not know is left out."""
    known: dict[str, str | int] = {"update": "1", **(before or {})}  # the first did not record it
    return ", ".join(
        f"{name} was {known[name]}, is {value}"
        for name, value in after.items()
        if name in known and known[name] != value
    )


@cache
def _mkl_mode() -> str:
    import torch

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        mode = int(ctypes.CDLL(str(library)).mkl_serv_cbwr_get(ctypes.c_int(1)))
    except (OSError, AttributeError):
        return "absent"
    return MODES.get(mode, str(mode))


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def thread_settings(threads: int) -> dict[str, str]:
    """Environment that holds numerical libraries to so many threads and to the same arithmetic every time."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {**dict.fromkeys(names, str(threads)), **FIXED, "TOKENIZERS_PARALLELISM": "false"}
