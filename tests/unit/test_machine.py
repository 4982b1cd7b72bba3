"""What a process may use of the machine, from made-up trees of control groups."""

from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from sapo.core.machine import usable

GB = 2**30
NONE_V1 = "9223372036854771712"


def tree(root: Path, own: str, files: Mapping[str, object]) -> Path:
    """A root with /proc/self/cgroup and files of /sys/fs/cgroup."""
    for path, text in {
        "proc/self/cgroup": own,
        **{f"sys/fs/cgroup/{k}": v for k, v in files.items()},
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")
    return root


V2 = {"memory.max": GB, "cpu.max": "50000 100000"}
V1 = {"memory/memory.limit_in_bytes": GB, "cpu/cpu.cfs_quota_us": 50000, "cpu/cpu.cfs_period_us": 100000}


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/", V2),
        ("", V2),
        ("0::/user.slice/job.scope", {f"user.slice/job.scope/{name}": text for name, text in V2.items()}),
        (
            "0::/user.slice/job.scope",
            {"user.slice/job.scope/x": "", **{f"user.slice/{k}": V2[k] for k in V2}},
        ),
        ("0::/docker/4f/inner", {f"inner/{name}": text for name, text in V2.items()}),
        ("0::/docker/4f", V2),
        ("0::/../../other", V2),
        ("1:name=systemd:/\n0::/job", {f"unified/job/{name}": text for name, text in V2.items()}),
        ("4:memory:/\n3:cpu,cpuacct:/", V1),
        ("4:memory:/docker/4f\n3:cpu,cpuacct:/docker/4f\n0::/", V1),
        (
            "4:memory:/batch/job\n3:cpuacct,cpu:/batch/job",
            {
                "memory/memory.limit_in_bytes": NONE_V1,
                "memory/batch/job/memory.limit_in_bytes": GB,
                "cpu/cpu.cfs_quota_us": -1,
                "cpu/cpu.cfs_period_us": 100000,
                "cpu/batch/job/cpu.cfs_quota_us": 50000,
                "cpu/batch/job/cpu.cfs_period_us": 100000,
            },
        ),
    ],
)
def test_the_limits_of_a_control_group_are_what_a_process_may_use(
    tmp_path: Path, own: str, files: Mapping[str, object]
) -> None:
    found = usable(tree(tmp_path, own, files))
    assert (found.cores, found.memory) == (0.5, min(GB, psutil.virtual_memory().total))
    assert found.free <= found.memory
    assert found.whole_cores == 1
