"""The seccomp filters, run call by call as the kernel would, for both architectures."""

import os
import struct

import pytest

from sapo.tasks.sandbox import seccomp, syscalls
from sapo.tasks.sandbox.seccomp import ABSENT, ALLOW, ARCHITECTURES, KILL, REFUSE, X32, Filter, Instruction

MACHINES = sorted(ARCHITECTURES)
LIMIT = 4096
"""Instructions that the kernel takes at most (BPF_MAXINSNS)."""


def answer(code: list[Instruction], number: int, arguments: tuple[int, ...] = (), arch: int = 0) -> int:
    """What a filter answers to one call: the kernel's classic BPF machine, as far as filters use it."""
    values = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, arch, 0, *values)
    register, place = 0, 0
    while True:
        operation, if_true, if_false, constant = code[place]
        place += 1
        if operation == 0x20:
            (register,) = struct.unpack_from("=I", data, constant)
        elif operation == 0x06:
            return constant
        else:
            tests = {0x15: register == constant, 0x35: register >= constant, 0x45: bool(register & constant)}
            place += if_true if tests[operation] else if_false


def worker(machine: str, name: str, *arguments: int) -> int:
    code = seccomp.program(seccomp.worker_rules(), REFUSE, machine)
    number = syscalls.number(name, machine)
    assert number is not None
    return answer(code, number, arguments, ARCHITECTURES[machine])


@pytest.mark.parametrize("machine", MACHINES)
def test_a_call_that_is_not_named_is_refused(machine: str) -> None:
    code = seccomp.program(seccomp.worker_rules(), REFUSE, machine)
    named = {syscalls.number(name, machine) for name in seccomp.worker_rules()}
    others = {number for number in range(1024) if answer(code, number, arch=ARCHITECTURES[machine]) == REFUSE}
    assert others >= set(range(1024)) - named
    assert len(code) <= LIMIT


@pytest.mark.parametrize("machine", MACHINES)
def test_a_call_in_another_mode_of_the_processor_ends_the_process(machine: str) -> None:
    code = seccomp.program(seccomp.worker_rules(), REFUSE, machine)
    i386, arm = 0x40000003, 0x40000028
    others = [arch for name, arch in ARCHITECTURES.items() if name != machine]
    for arch in (i386, arm, 0, *others):
        assert {answer(code, number, arch=arch) for number in range(500)} == {KILL}


def test_the_second_set_of_numbers_of_x86_is_refused() -> None:
    code = seccomp.program(seccomp.child_rules(may_open=True), ALLOW, "x86_64")
    arch = ARCHITECTURES["x86_64"]
    assert {answer(code, X32 | number, arch=arch) for number in range(600)} == {REFUSE}


@pytest.mark.parametrize("machine", MACHINES)
def test_files_are_opened_for_reading_alone(machine: str) -> None:
    directory = -100 & 0xFFFFFFFF
    for harmless in (os.O_RDONLY, os.O_CLOEXEC, os.O_DIRECTORY | os.O_NONBLOCK):
        assert worker(machine, "openat", directory, 1, harmless) == ALLOW
    for writing in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, 0o20000000):
        assert worker(machine, "openat", directory, 1, writing | os.O_CLOEXEC) == REFUSE
    assert worker(machine, "openat2", directory, 1) == ABSENT, "its flags lie where no filter can look"


@pytest.mark.parametrize("machine", MACHINES)
def test_a_fork_takes_no_new_namespace(machine: str) -> None:
    assert worker(machine, "clone", 0x01200011) == ALLOW
    assert worker(machine, "clone", 0x003D0F00) == ALLOW, "a thread"
    for namespace in (0x10000000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000, 0x00020000):
        refused = worker(machine, "clone", namespace | 17) == REFUSE
        assert refused, hex(namespace)
    assert worker(machine, "clone3") == ABSENT, "its flags lie where no filter can look"


@pytest.mark.parametrize("machine", MACHINES)
def test_limits_are_set_on_oneself_alone(machine: str) -> None:
    assert worker(machine, "prlimit64", 0, 7) == ALLOW
    assert worker(machine, "prlimit64", 1, 7) == REFUSE


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("may_open", [False, True])
def test_a_child_s_filter_only_takes_away(machine: str, may_open: bool) -> None:
    code = seccomp.program(seccomp.child_rules(may_open), ALLOW, machine)

    def says(name: str, *arguments: int) -> int:
        number = syscalls.number(name, machine)
        return REFUSE if number is None else answer(code, number, arguments, ARCHITECTURES[machine])

    refused = ("clone", "fork", "prctl", "seccomp", "prlimit64", "setrlimit")
    assert {says(name) for name in refused} == {REFUSE}
    assert says("openat") == (ALLOW if may_open else REFUSE)
    assert says("kill", seccomp.THIS_PROCESS) == says("tgkill", seccomp.THIS_PROCESS) == ALLOW
    assert {says("kill", other) for other in (0, 1, 0xFFFFFFFF, 12345)} == {REFUSE}
    assert {says(name) for name in ("read", "write", "futex", "exit_group", "mmap")} == {ALLOW}


@pytest.mark.parametrize("place", [0, 1])
def test_no_number_stands_for_two_calls(place: int) -> None:
    numbers = [pair[place] for pair in syscalls.NUMBERS.values() if pair[place] is not None]
    assert len(numbers) == len(set(numbers))


def test_a_filter_for_an_unknown_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "machine", lambda: None)
    with pytest.raises(OSError, match="not known"):
        Filter(seccomp.worker_rules(), REFUSE)
