"""System calls by name, through libc's `syscall`: what Python has no function for. Linux only."""

import ctypes
import functools
import os

_MACHINES = ("x86_64", "aarch64")
NUMBERS: dict[str, tuple[int | None, int | None]] = {
    # open files
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "close": (3, 57), "close_range": (436, 436), "lseek": (8, 62), "fstat": (5, 80),
    "fadvise64": (221, 223), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None),
    "pipe2": (293, 59), "fcntl": (72, 25), "ioctl": (16, 29),
    # files by name
    "open": (2, None), "openat": (257, 56), "openat2": (437, 437), "stat": (4, None), "lstat": (6, None),
    "newfstatat": (262, 79), "statx": (332, 291), "access": (21, None), "faccessat": (269, 48),
    "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78), "getcwd": (79, 17),
    "getdents64": (217, 61), "statfs": (137, 43), "fstatfs": (138, 44),
    # waiting
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72),
    "epoll_create": (213, None), "epoll_create1": (291, 20), "epoll_ctl": (233, 21),
    "epoll_wait": (232, None), "epoll_pwait": (281, 22), "eventfd2": (290, 19), "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115), "pause": (34, None), "restart_syscall": (219, 128),
    # memory
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216), "madvise": (28, 233),
    "brk": (12, 214), "msync": (26, 227), "mincore": (27, 232), "membarrier": (324, 283),
    "get_mempolicy": (239, 236),
    # signals and timers
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136), "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132), "alarm": (37, None), "setitimer": (38, 103), "getitimer": (36, 102),
    "kill": (62, 129), "tgkill": (234, 131),
    # threads and processes
    "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293), "set_tid_address": (218, 96),
    "arch_prctl": (158, None), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121), "sched_getscheduler": (145, 120), "getcpu": (309, 168),
    "exit": (60, 93), "exit_group": (231, 94), "wait4": (61, 260), "waitid": (247, 95),
    "clone": (56, 220), "clone3": (435, 435), "fork": (57, None), "vfork": (58, None),
    # clocks and facts
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None),
    "times": (100, 153), "getrusage": (98, 165), "getrandom": (318, 278), "getpid": (39, 172),
    "gettid": (186, 178), "getppid": (110, 173), "getpgrp": (111, None), "getpgid": (121, 155),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getgroups": (115, 158), "getresuid": (118, 148), "getresgid": (120, 150), "uname": (63, 160),
    "sysinfo": (99, 179), "getrlimit": (97, 163), "setrlimit": (160, 164), "prlimit64": (302, 261),
    "umask": (95, 166),
    # walls
    "prctl": (157, 167), "seccomp": (317, 277), "unshare": (272, 97), "capset": (126, 91),
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}  # fmt: skip
"""Number of a system call on x86_64 and on aarch64; None where there is no such call."""


def machine() -> str | None:
    """The processor's architecture as far as its system calls are known here."""
    found = os.uname().machine
    return found if found in _MACHINES else None


def number(name: str, machine: str) -> int | None:
    """The number of a system call on an architecture; None where there is no such call."""
    return NUMBERS[name][_MACHINES.index(machine)]


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: int | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a system call. Raises `OSError` with its error, or where this machine has no such call."""
    here = machine()
    code = None if here is None else number(name, here)
    if code is None:
        raise OSError(f"{name}: unknown on {os.uname().machine}")
    passed = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result: int = _libc().syscall(ctypes.c_long(code), *passed)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


PR_SET_NO_NEW_PRIVS = 38


def no_new_privileges() -> None:
    """Nothing this process runs gains rights any more: what Landlock and seccomp ask of one without root."""
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
