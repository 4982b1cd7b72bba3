"""Which system calls a process may make: filters in the kernel's classic BPF, for x86_64 and aarch64.

The worker's filter lists what is allowed, so that calls of kernels to come are refused by not being named.
The child's stands on top of it (the kernel takes the stricter answer) and names what is refused besides.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from sapo.tasks.sandbox import syscalls

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* as `seccomp_data.arch` has it: calls in another mode of the processor have others."""
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, ABSENT = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
"""`ABSENT` makes libc take an older call, whose arguments a filter can see."""
X32 = 0x40000000
"""Bit of the numbers by which x86_64 offers the same calls a second time."""

THIS_PROCESS = 0x7FABCDEF
"""Stands for the id of the process that installs a filter; above the highest that Linux gives."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_SET_MODE_FILTER = 1
_SIZE = 8

Instruction = tuple[int, int, int, int]
"""Code, instructions to skip if true, if false, and the constant."""


@dataclass(frozen=True, slots=True)
class Clear:
    """Allowed where the argument has none of these bits. Arguments are seen as the kernel sees an int."""

    argument: int
    bits: int


@dataclass(frozen=True, slots=True)
class Among:
    """Allowed where the argument is one of these values."""

    argument: int
    values: tuple[int, ...]


Rule = int | Clear | Among
"""What becomes of a call: an answer, or a condition on one argument and a refusal otherwise."""

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | 0o20000000
"""With the bit of O_TMPFILE that O_DIRECTORY does not share."""
_NEW_NAMESPACE = 0x7E020080
_FCNTL = (0, 1, 2, 3, 4, 1030, 1032)
"""Copies and flags of a descriptor; not its owner and signal (F_SETOWN, F_SETSIG), which kill others."""
_IOCTL = (0x5401, 0x5450, 0x5451, 0x541B, 0x5421, 0x5413)
"""TCGETS, FIONCLEX, FIOCLEX, FIONREAD, FIONBIO, TIOCGWINSZ; not TIOCSTI, which types into a terminal."""
_PRCTL = (1, 2, 3, 15, 16, 38)
"""Death signal, dumpable (read), name, no_new_privs."""

_CONDITIONS: dict[str, Rule] = {
    "open": Clear(1, _WRITING),
    "openat": Clear(2, _WRITING),
    "openat2": ABSENT,
    "faccessat2": ABSENT,
    "clone": Clear(0, _NEW_NAMESPACE),
    "clone3": ABSENT,
    "vfork": REFUSE,
    "fcntl": Among(1, _FCNTL),
    "ioctl": Among(1, _IOCTL),
    "prctl": Among(0, _PRCTL),
    "prlimit64": Among(0, (0,)),
    "seccomp": Among(0, (_SET_MODE_FILTER,)),
}
_NEVER = ("unshare", "capset", "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self")
_OPENING = ("open", "openat")
_BREEDING = ("clone", "fork")


def worker_rules() -> dict[str, Rule]:
    """What a task worker may do: read, compute, fork. Whatever is not named is refused."""
    return {name: _CONDITIONS.get(name, ALLOW) for name in syscalls.NUMBERS if name not in _NEVER}


def child_rules(may_open: bool) -> dict[str, Rule]:
    """What a child may not do of that: no process, no thread, no signal but to itself, no new rights, and no
    file opened unless `may_open`."""
    refused = [*_BREEDING, "prctl", "seccomp", "prlimit64", "setrlimit", *([] if may_open else _OPENING)]
    rules: dict[str, Rule] = dict.fromkeys(refused, REFUSE)
    return rules | {"kill": Among(0, (THIS_PROCESS,)), "tgkill": Among(0, (THIS_PROCESS,))}


def program(rules: Mapping[str, Rule], others: int, machine: str) -> list[Instruction]:
    """The filter that answers by `rules`, and `others` to calls that they don't name. A call in another mode
    of the processor ends the process, as no number in `rules` is meant for it."""
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        code += [(_AT_LEAST, 0, 1, X32), (_RETURN, 0, 0, REFUSE)]
    for name, rule in rules.items():
        number = syscalls.number(name, machine)
        if number is not None:
            answer = _answer(rule)
            code += [(_EQUAL, 0, len(answer), number), *answer]
    return [*code, (_RETURN, 0, 0, others)]


def _answer(rule: Rule) -> list[Instruction]:
    if isinstance(rule, int):
        return [(_RETURN, 0, 0, rule)]
    load = (_LOAD, 0, 0, _ARGUMENTS + 8 * rule.argument)
    if isinstance(rule, Clear):
        return [load, (_ANY_BIT, 0, 1, rule.bits), (_RETURN, 0, 0, REFUSE), (_RETURN, 0, 0, ALLOW)]
    left = range(len(rule.values), 0, -1)
    tests = [(_EQUAL, skip, 0, value) for skip, value in zip(left, rule.values, strict=True)]
    return [load, *tests, (_RETURN, 0, 0, REFUSE), (_RETURN, 0, 0, ALLOW)]


def packed(rules: Mapping[str, Rule], others: int) -> bytes:
    """The filter for this machine, as the kernel reads it. Raises `OSError` where its calls are not known."""
    machine = syscalls.machine()
    if machine is None:
        raise OSError(f"the system calls of {os.uname().machine} are not known here")
    return b"".join(struct.pack("=HBBI", *one) for one in program(rules, others, machine))


class Filter:
    """A filter laid out in memory once, so that a fork which installs it has next to nothing left to do."""

    def __init__(self, rules: Mapping[str, Rule], others: int) -> None:
        code = packed(rules, others)
        self._code = ctypes.create_string_buffer(code, len(code))
        head = struct.pack("@HP", len(code) // _SIZE, ctypes.addressof(self._code))
        self._head = ctypes.create_string_buffer(head, len(head))
        ends = range(4, len(code), _SIZE)
        self._own = [end for end in ends if code[end : end + 4] == struct.pack("=I", THIS_PROCESS)]

    def install(self) -> None:
        """Put it on this process and what it forks, for good; it must be unable to gain privileges. Raises
        `OSError` where the kernel refuses."""
        for place in self._own:
            struct.pack_into("=I", self._code, place, os.getpid())
        syscalls.call("seccomp", _SET_MODE_FILTER, 0, self._head)
