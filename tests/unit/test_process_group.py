"""The crew: crashes are answered with a bounded number of restarts, requests to stop with an end."""

import threading
from pathlib import Path

import pytest
from waiting import until

from sapo.core.child_process import alive
from sapo.core.config.home import Home
from sapo.core.config.load import parse
from sapo.ops.process import Process
from sapo.ops.process_group import OWING, ProcessGroup, SwarmState

STEP = "import sys, time, signal, pathlib\nhere = pathlib.Path({here!r})\n"
ENDS_WELL = "print('done')"
CRASHES = "print('out of luck'); raise SystemExit(9)"
WAITS = "print('up', flush=True); time.sleep(60)"
STOPS_WELL = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); " + WAITS
AFTER_ARCHIVE = """
log = here / "logs" / "archive.log"
while not (log.exists() and "up" in log.read_text()):
    time.sleep(0.02)
"""
COUNTS = "f = here / 'starts'; n = len(f.read_text()) if f.exists() else 0; f.write_text('x' * (n + 1)); "


def crew_of(
    tmp_path: Path, codes: dict[str, str], nodes: int = 1, backoff: tuple[float, ...] = (0.0,)
) -> ProcessGroup:
    home = Home(tmp_path)
    home.logs.mkdir(exist_ok=True)
    config = parse({"swarm": {"nodes": nodes}})
    prefix = STEP.format(here=str(tmp_path))
    everything = {"archive": ENDS_WELL, "evaluate": ENDS_WELL} | codes
    return ProcessGroup(
        Process(home, config, threading.Event()),
        command=lambda name: ["-c", prefix + everything[name]],
        backoff_s=backoff,
    )


def starts(tmp_path: Path) -> int:
    return len((tmp_path / "starts").read_text())


def test_a_swarm_whose_processes_end_well_has_finished(tmp_path: Path) -> None:
    crew = crew_of(tmp_path, {"n0": AFTER_ARCHIVE, "n1": ENDS_WELL, "archive": STOPS_WELL}, nodes=2)
    state = crew.run()
    assert state.phase == "finished"
    assert {name: member.state for name, member in state.members.items()} == {
        "n0": "finished",
        "n1": "finished",
        "archive": "finished",
        "evaluate": "finished",
    }
    assert SwarmState.read(crew.home) == state


def test_a_process_that_crashes_is_restarted_a_bounded_number_of_times(tmp_path: Path) -> None:
    crew = crew_of(tmp_path, {"n0": COUNTS + CRASHES}, backoff=(0.0, 0.0, 0.0))
    member = crew.run_node("n0")
    assert (member.state, member.restarts, member.exit_code) == ("failed", 3, 9)
    assert starts(tmp_path) == 4
    assert member.note.endswith("out of luck")


def test_a_process_that_recovers_after_a_crash_has_finished(tmp_path: Path) -> None:
    crew = crew_of(tmp_path, {"n0": COUNTS + "sys.exit(0 if n == 1 else 9)"}, backoff=(0.0, 0.0))
    member = crew.run_node("n0")
    assert (member.state, member.restarts, member.exit_code) == ("finished", 1, 0)


def test_one_node_that_fails_for_good_leaves_the_others_to_finish_and_is_told(tmp_path: Path) -> None:
    state = crew_of(tmp_path, {"n0": CRASHES, "n1": ENDS_WELL}, nodes=2).run()
    assert (state.phase, state.members["n0"].state) == ("failed", "failed")
    assert {state.members[name].state for name in ("n1", "archive", "evaluate")} == {"finished"}


def test_a_process_that_was_killed_says_by_which_signal(tmp_path: Path) -> None:
    crew = crew_of(tmp_path, {"n0": "print('at work', flush=True); signal.raise_signal(signal.SIGKILL)"})
    note = crew.run_node("n0").note
    assert note.splitlines()[-1] == "killed by signal 9 (Killed; the machine may be out of memory)"


@pytest.mark.parametrize(("code", "expected"), [(2, "failed"), (3, "paused")])
def test_bad_input_and_a_pause_are_no_crashes(tmp_path: Path, code: int, expected: str) -> None:
    crew = crew_of(tmp_path, {"n0": COUNTS + f"sys.exit({code})"})
    assert crew.run_node("n0").state == expected
    assert starts(tmp_path) == 1


def test_a_node_that_owes_at_its_end_is_not_restarted_and_the_swarm_has_not_finished(tmp_path: Path) -> None:
    crew = crew_of(tmp_path, {"n0": COUNTS + f"print('still owes'); sys.exit({OWING})"})
    state = crew.run()
    assert (state.phase, state.members["n0"].state) == ("owing", "owing")
    assert state.members["n0"].note == "still owes"
    assert starts(tmp_path) == 1


def run_beside(crew: ProcessGroup) -> tuple[threading.Thread, list[SwarmState]]:
    ended: list[SwarmState] = []
    thread = threading.Thread(target=lambda: ended.append(crew.run()))
    thread.start()
    return thread, ended


@pytest.mark.parametrize("by", ["event", "flag"])
def test_a_request_to_stop_ends_all_and_skips_the_evaluation(tmp_path: Path, by: str) -> None:
    codes = {"n0": STOPS_WELL, "n1": STOPS_WELL, "archive": STOPS_WELL, "evaluate": COUNTS + ENDS_WELL}
    crew = crew_of(tmp_path, codes, nodes=2)
    thread, ended = run_beside(crew)
    logs = [crew.home.logs / f"{name}.log" for name in ("n0", "n1", "archive")]
    until(lambda: all(log.exists() and log.read_text() == "up\n" for log in logs))
    pids = [crew.member(name).pid for name in ("n0", "n1", "archive")]
    crew.stop.set() if by == "event" else crew.home.stop_flag.touch()
    thread.join(20)
    assert ended[0].phase == "stopped"
    assert {crew.member(name).state for name in ("n0", "n1")} == {"stopped"}
    assert not (tmp_path / "starts").exists()
    assert not any(alive(pid) for pid in pids if pid is not None)
