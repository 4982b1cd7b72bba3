"""Child processes: they end with their parent, a stop ends, and nothing they started stays behind."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from waiting import until

from sapo.core.child_process import Child, alive, stop_all, stopping_on_signals, tail

WATCHED = "from sapo.core.child_process import watch_parent; watch_parent(grace=0.3)\n"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
WAIT = "import time; print('up', flush=True); time.sleep(60)\n"
GRANDCHILD = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
"""


def start(tmp_path: Path, code: str, name: str = "child") -> Child:
    return Child.start(name, ["-c", code], log=tmp_path / f"{name}.log", env=dict(os.environ))


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def test_a_child_gives_its_exit_code_and_its_output(tmp_path: Path) -> None:
    child = start(tmp_path, "print('some words'); raise SystemExit(7)")
    assert child.wait(20) == 7
    assert tail(child.log) == "some words"
    assert child.poll() == 7


def test_a_child_leads_its_own_session_so_that_ctrl_c_does_not_reach_it(tmp_path: Path) -> None:
    child = start(tmp_path, WAIT)
    assert os.getsid(child.pid) == child.pid != os.getsid(0)
    assert child.kill() == -signal.SIGKILL


def test_a_child_that_hears_is_stopped_without_being_killed(tmp_path: Path) -> None:
    code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n" + WAIT
    child = start(tmp_path, code)
    until(lambda: lines(child.log) == ["up"])
    assert child.stop(grace=20) == 5


def test_a_child_that_does_not_hear_is_ended_after_the_grace(tmp_path: Path) -> None:
    deaf, hears = start(tmp_path, STUBBORN + WAIT, "deaf"), start(tmp_path, WAIT, "hears")
    until(lambda: lines(deaf.log) == lines(hears.log) == ["up"])
    stop_all([deaf, hears], grace=0.3)
    assert (deaf.poll(), hears.poll()) == (-signal.SIGKILL, -signal.SIGTERM)


def test_what_a_child_left_behind_ends_with_it(tmp_path: Path) -> None:
    child = start(tmp_path, GRANDCHILD)
    assert child.wait(20) == 0
    until(lambda: not alive(int(lines(child.log)[0])))


def test_a_child_and_what_it_started_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    child_log = tmp_path / "inner.log"
    inner = WATCHED + STUBBORN + GRANDCHILD + "import os; print(os.getpid(), flush=True)\n" + WAIT
    outer = (
        "import os, time\nfrom pathlib import Path\nfrom sapo.core.child_process import Child\n"
        f"Child.start('inner', ['-c', {inner!r}], log=Path({str(child_log)!r}), env=dict(os.environ))\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", outer])
    until(lambda: len(lines(child_log)) == 3)
    pids = [int(text) for text in lines(child_log)[:2]]
    assert all(alive(pid) for pid in pids)
    parent.kill()
    parent.wait()
    until(lambda: not any(alive(pid) for pid in pids))


def test_a_process_started_by_hand_watches_nobody(tmp_path: Path) -> None:
    code = "import threading; from sapo.core.child_process import watch_parent; watch_parent()\n"
    code += "raise SystemExit(threading.active_count() - 1)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_first_signal_asks_and_the_second_insists() -> None:
    stop, insisted = threading.Event(), threading.Event()
    before = signal.getsignal(signal.SIGINT)
    with stopping_on_signals(stop, insisted.set):
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
        assert not insisted.is_set()
        signal.raise_signal(signal.SIGINT)
        assert insisted.is_set()
    assert signal.getsignal(signal.SIGINT) is before


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_text("".join(f"line {i}\n" for i in range(5000)))
    assert tail(log, 2) == "line 4998\nline 4999"
