"""What this process may use of the machine: its cores and memory, within the limits of control groups.

Containers, systemd units and jobs of a batch system are limited by control groups; neither the number of
processors nor the machine's memory shows that.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Usable:
    """Cores, which need not be whole; memory in bytes, and how much of it is free."""

    cores: float
    memory: int
    free: int

    @property
    def whole_cores(self) -> int:
        """How many threads can work at the same time; at least one."""
        return max(1, int(self.cores))


def usable(root: Path = ROOT) -> Usable:
    """What this process may use: by its threads' affinity, and by the control groups shown below `root`."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    machine = psutil.virtual_memory()
    # version 1 and version 2 of control groups; the limits of all of them hold
    groups, mounts = _own_groups(root / "proc/self/cgroup"), root / "sys/fs/cgroup"
    unified = [folder for top in (mounts, mounts / "unified") for folder in _chain(top, groups.get("", ""))]
    memory = [
        *_memory(unified, "memory.max", "memory.current", "inactive_file"),
        *_memory(
            _chain(mounts / "memory", groups.get("memory", "")),
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ]
    cores = [
        *(_share(_words(folder / "cpu.max")) for folder in unified),
        *(
            _share(_words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us"))
            for folder in _chain(mounts / "cpu", groups.get("cpu", ""))
        ),
    ]
    return Usable(
        cores=min([float(here), *(share for share in cores if share is not None)]),
        memory=min([machine.total, *(limit for limit, _ in memory)]),
        free=min([machine.available, *(max(0, limit - used) for limit, used in memory)]),
    )


def _own_groups(path: Path) -> dict[str, str]:
    """The process's group by controller of version 1, and under "" the one of version 2."""
    groups: dict[str, str] = {}
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, group = rest.partition(":")
            groups |= dict.fromkeys(controllers.split(","), group)
    return groups


def _chain(mount: Path, group: str) -> list[Path]:
    """The folder of a group, and of every group round it, whose limits hold for it as well. In a container
    the mount may begin at a group inside the path: then only the end of the path is there."""
    parts = [part for part in group.split("/") if part not in ("", "..")]
    for skipped in range(len(parts) + 1):
        folder = mount.joinpath(*parts[skipped:])
        if folder.is_dir():
            inside = len(parts) - skipped
            return [folder, *folder.parents[:inside]]
    return []


def _memory(folders: list[Path], limit: str, usage: str, cache: str) -> Iterator[tuple[int, int]]:
    """The limit of each group that has one, and what is used of it without the cached files."""
    for folder in folders:
        words = _words(folder / limit)
        if words and words[0].isdecimal():
            used = _words(folder / usage)
            stat = _words(folder / "memory.stat")
            kept = dict(zip(stat[::2], stat[1::2], strict=False))
            yield int(words[0]), int(used[0]) - int(kept.get(cache, 0)) if used else 0


def _share(words: list[str]) -> float | None:
    """Cores from quota and period in microseconds; None without a quota (`max`, or -1 in version 1)."""
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):
        return None
    return int(words[0]) / int(words[1])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return []
