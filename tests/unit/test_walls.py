"""The kernel's walls: real processes that try what a text which took them over would try."""

import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from walled import NOBODY, here, in_child, needs, run, standing

from sapo.core.errors import UserError
from sapo.tasks import sandbox
from sapo.tasks.sandbox import landlock
from sapo.tasks.sandbox.escape_attempts import DEEDS
from sapo.tasks.sandbox.self_test import Probe, probe

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel walls are Linux's")
ALL = list(sandbox.WALLS)


TRAPS_OF_PROBES = (335, 336) if os.uname().machine == "x86_64" else ()
"""Calls (uretprobe, uprobe) that newer kernels show to no filter; made by a program itself, they end it."""


@pytest.fixture(scope="module")
def behind() -> Probe:
    return probe()


def done(found: dict[str, Any]) -> set[str]:
    return {name for name, refusal in found["deeds"].items() if refusal is None}


@pytest.mark.parametrize("deed", DEEDS)
def test_what_a_text_would_try_is_refused(behind: Probe, deed: str) -> None:
    assert behind.deeds[deed] is not None


def test_the_walls_of_this_machine_suffice(behind: Probe) -> None:
    assert sandbox.sufficient(behind.standing), behind.walls
    assert behind.standing == here()


@pytest.mark.parametrize("user", [None, NOBODY])
@pytest.mark.parametrize(
    ("refused", "lacking"),
    [
        (["unshare"], ["namespaces"]),
        (["landlock_create_ruleset"], ["landlock"]),
        (["landlock_restrict_self"], ["landlock"]),
        (["unshare", "landlock_create_ruleset"], ["namespaces", "landlock"]),
    ],
)
def test_a_wall_that_the_machine_refuses_is_left_out_and_the_others_hold(
    refused: list[str], lacking: list[str], user: int | None
) -> None:
    if user is not None and os.geteuid() != 0:
        pytest.skip("already an ordinary user")
    found = run("probe.main()", refused=refused, user=user)
    assert standing(found) == [name for name in here(user) if name not in lacking]
    refusals = {wall["name"]: wall["detail"] for wall in found["walls"] if wall["name"] in lacking}
    assert all("Operation not permitted" in detail for name, detail in refusals.items() if name in here(user))
    assert done(found) == set()
    assert sandbox.sufficient(standing(found))


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has no such rights")
def test_a_worker_of_root_s_gives_up_root_s_rights_also_where_it_gets_no_namespace() -> None:
    found = run(
        """
from sapo.tasks import sandbox as walls
standing = [wall.name for wall in walls.around_worker() if wall.stands]
with open("/proc/self/status") as status:
    say([standing, [line.split()[1] for line in status if line.startswith("CapEff")]])
""",
        refused=["unshare", "landlock_create_ruleset"],
    )
    assert found == [["limits", "seccomp"], ["0" * 16]]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root reads what is closed to everybody else")
def test_a_wall_that_would_keep_the_worker_from_its_libraries_is_left_out(tmp_path: Path) -> None:
    needs("namespaces")
    closed = tmp_path / "site-packages"
    closed.mkdir()
    (closed / "library.py").write_text("found = 42")
    os.chown(closed, NOBODY, NOBODY)
    closed.chmod(0o700)
    found = run(
        f"""
from sapo.tasks import sandbox as walls
sys.path.append({str(closed)!r})
built = walls.around_worker()
import library
say([library.found, [[wall.stands, wall.detail] for wall in built]])
"""
    )
    assert found[0] == 42
    assert [stands for stands, _ in found[1]] == [name in here() and name != "namespaces" for name in ALL]
    assert "libraries" in found[1][1][1]


def test_a_worker_forks_and_reads_its_libraries_and_nothing_else() -> None:
    needs("landlock")
    found = run(
        """
import subprocess
from sapo.tasks import sandbox as walls
from sapo.tasks.sandbox import escape_attempts as deeds
starter = os.getppid()
walls.around_worker()
import sqlite3, decimal
with open(json.__file__) as source: source.read()
say(deeds.try_all(starter))
"""
    )
    new = landlock.version() >= landlock.WITH_SIGNALS
    allowed = {"start a process"} if new else {"start a process", "signal another process"}
    assert {name for name, refusal in found.items() if refusal is None} == allowed


def test_of_a_checkout_only_the_loaded_packages_stay_readable(tmp_path: Path) -> None:
    needs("landlock")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "late.py").write_text("found = 42")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "key.pem").write_text("secret")
    found = run(
        f"""
sys.path.insert(0, {str(tmp_path)!r})
import package
from sapo.tasks import sandbox as walls
walls.around_worker()
import package.late
try:
    open({str(tmp_path / "runs" / "key.pem")!r})
except PermissionError:
    say(package.late.found)
"""
    )
    assert found == 42


@pytest.mark.parametrize(("refused", "reads"), [([], True), (["landlock_create_ruleset"], False)])
def test_a_child_reads_the_libraries_only_where_the_kernel_holds_it_to_them(
    refused: list[str], reads: bool
) -> None:
    code = """
try:
    open(json.__file__).close()
    say(True)
except PermissionError:
    say(False)
"""
    if reads:
        needs("landlock")
    assert run(in_child(code), refused=refused) is reads


WAYS_OUT = [
    "import fcntl; fcntl.fcntl(0, 8, os.getppid())  # F_SETOWN: whom a signal goes to",
    "import fcntl; fcntl.fcntl(0, 10, 9)  # F_SETSIG: which",
    "import fcntl; fcntl.ioctl(0, 0x5412, b'x')  # TIOCSTI: types into a terminal",
    "os.open('.', os.O_RDWR | 0o20200000)  # O_TMPFILE: a file without a name",
    "os.truncate('a', 0)",
    "os.chmod('a', 0o777)",
    "os.utime('a')",
    "os.unlink('a')",
    "os.mkdir('a')",
    "os.symlink('a', 'b')",
    "os.rename('a', 'b')",
    "os.mkfifo('a')",
    "os.memfd_create('a')",
    "os.pidfd_open(os.getppid())",
    "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "os.sched_setaffinity(os.getppid(), {0})",
    "os.chroot('/')",
    "os.posix_spawn('/bin/true', ['true'], {})",
    "import resource; resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (99, 99))",
]


@pytest.fixture(scope="module")
def ways_out() -> dict[str, int | None]:
    """The error that each way out met; None where it was open."""
    code = f"""
met = {{}}
for way in {WAYS_OUT!r}:
    try:
        exec(way)
        met[way] = None
    except OSError as error:
        met[way] = error.errno
say(met)
"""
    met: dict[str, int | None] = run(in_child(code))
    return met


@pytest.mark.parametrize("way", WAYS_OUT)
def test_a_text_has_no_other_way_out(ways_out: dict[str, int | None], way: str) -> None:
    assert ways_out[way] == errno.EPERM


def test_this_kernel_refuses_every_system_call_that_is_not_named() -> None:
    before = f"import ctypes\ntraps = {list(TRAPS_OF_PROBES)}"
    code = """
named = {kernel.number(name, kernel.machine()) for name in seccomp.worker_rules()}
named -= {kernel.number(name, kernel.machine()) for name in ("clone", "fork", "vfork")}
second = range(seccomp.X32, seccomp.X32 + 600) if kernel.machine() == "x86_64" else []
libc, answers = ctypes.CDLL(None, use_errno=True), {}
for number in [*set(range(1024)) - named - set(traps), *second]:
    result = libc.syscall(*map(ctypes.c_long, (number, -1, -1, -1, -1, -1, -1)))
    answers.setdefault(ctypes.get_errno() if result < 0 else "done", []).append(number)
say(answers)
"""
    assert run(in_child(code, before)).keys() == {str(errno.EPERM)}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="other processors have no such mode")
def test_a_system_call_in_the_processor_s_old_mode_ends_the_process() -> None:
    before = "import ctypes, mmap"
    code = """
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))  # getpid, by the gate of 32-bit programs
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
say("done")
"""
    ended = run(in_child(code, before) + "\nsay(os.WTERMSIG(status))")
    assert ended in (signal.SIGSYS, signal.SIGSEGV), "the second where the kernel has no such gate"


def test_a_text_makes_no_thread() -> None:
    code = """
import _thread
try:
    _thread.start_new_thread(print, ())
    say("done")
except RuntimeError:
    say("refused")
"""
    assert run(in_child(code)) == "refused"


@pytest.mark.parametrize(
    ("bomb", "most"),
    [("bytearray(1 << 20)", 512), ("mmap.mmap(-1, 16 << 20)", 32), ("os.dup(1)", 32), ("os.pipe()", 16)],
)
def test_bombs_burst_at_the_limits(bomb: str, most: int) -> None:
    before = """
import mmap, resource
resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
kept = []
"""
    code = f"""
try:
    while True: kept.append({bomb})
except (MemoryError, OSError):
    count = len(kept)
    kept.clear()
    say(count)
"""
    assert 0 < run(in_child(code, before)) < most


def test_a_text_that_spins_and_heeds_no_signal_is_ended() -> None:
    before = "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))"
    spin = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    code = in_child(spin, before) + "\nsay(os.WTERMSIG(status))"
    assert run(code) == signal.SIGKILL


@pytest.mark.parametrize(
    ("standing", "enough"),
    [
        ([], False),
        (["limits"], False),
        (["limits", "namespaces", "landlock"], False),
        (["limits", "seccomp"], True),
        (ALL, True),
    ],
)
def test_foreign_text_wants_a_kernel_wall_against_network_files_and_processes(
    standing: list[str], enough: bool
) -> None:
    assert sandbox.sufficient(standing) is enough
    if enough:
        sandbox.require(standing)
        return
    with pytest.raises(UserError) as caught:
        sandbox.require(standing)
    assert caught.value.field == "workers.unwalled"
    assert "seccomp" in caught.value.problem
    assert "sapo doctor" in caught.value.remedy
