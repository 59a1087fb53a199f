"""Takes from this process, for good, what code of a model must not have.

It uses the standard library only, so that a program that does nothing else starts quickly. Afterwards the
process can read and write one folder, if any, and read Python's own library (Landlock). It can start no
process, open no socket and send no signal (seccomp), and its memory and processor time are bounded (resource
limits). Where the kernel has no Landlock or no seccomp, :func:`restrict` raises.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import subprocess
import sys
import sysconfig
from functools import cache

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
# Access rights of the versions of Landlock's interface, and those of reading.
_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}
_READ_FILE, _READ_FOLDER, _WRITE_FILE = 1 << 2, 1 << 3, 1 << 1

# Calls that reach other processes or files without opening them: prlimit64, scheduling and priorities,
# ownership, modes, times and attributes of files, truncate, shared memory of System V, request_key.
_OTHERS_X86 = (
    302, 203, 144, 142, 314, 141, 251, 90, 91, 268, 452, 92, 93, 94, 260, 132, 235, 261, 280, 76,
    188, 189, 190, 197, 198, 199, 463, 466, 469, 30, 31, 67, 65, 66, 220, 69, 70, 71, 249,
)  # fmt: skip
_OTHERS_ARM = (
    261, 122, 119, 118, 274, 140, 30, 52, 53, 452, 54, 55, 88, 45, 5, 6, 7, 14, 15, 16, 463, 466,
    469, 187, 188, 189, 191, 192, 193, 195, 196, 197, 218,
)  # fmt: skip
# fcntl by its number, and the commands with which the kernel would send a signal to another process.
_FCNTL = {"x86_64": 72, "aarch64": 25}
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15
_IOCTL = {"x86_64": 16, "aarch64": 29}
_FIOSETOWN, _SIOCSPGRP, _FIOASYNC = 0x8901, 0x8902, 0x5452

# Machine -> its number in seccomp, and numbers of the calls that fail: processes, programs, sockets, signals,
# other processes' memory, and the interfaces that do the same in other ways. clone is handled apart.
_MACHINES: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "x86_64": (
        0xC000003E,
        56,
        # fork vfork execve execveat socket socketpair connect kill tkill tgkill ptrace process_vm_*
        # pidfd_* io_uring_* bpf userfaultfd perf_event_open mount unshare setns keyctl add_key
        # shmget semget msgget mq_open, which would outlive the process
        (57, 58, 59, 322, 41, 53, 42, 62, 200, 234, 129, 297, 101, 310, 311, 424, 434, 438, 425, 426, 427,
         321, 323, 298, 165, 272, 308, 250, 248, 29, 64, 68, 240, *_OTHERS_X86),
    ),
    "aarch64": (
        0xC00000B7,
        220,
        (221, 281, 198, 199, 203, 129, 130, 131, 138, 240, 117, 270, 271, 424, 434, 438, 425, 426, 427,
         280, 282, 241, 40, 97, 268, 219, 217, 194, 190, 186, 180, *_OTHERS_ARM),
    ),
}  # fmt: skip
_CLONE3, _CLONE_THREAD = 435, 0x10000
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


class Unavailable(Exception):
    """The kernel cannot restrict a process."""


def limit(max_bytes: int, cpu_seconds: int, max_file_bytes: int = 2**20, max_open_files: int = 64) -> None:
    """Bound what this process may use, for good.

    Args:
        max_bytes: size of its address space.
        cpu_seconds: seconds of processor time.
        max_file_bytes: size of a file that it writes.
        max_open_files: number of files that it has open.
    """
    for resource_limit, value in (
        (resource.RLIMIT_AS, max_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, max_file_bytes),
        (resource.RLIMIT_NOFILE, max_open_files),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(resource_limit, (value, value))


def restrict(folder: str | None) -> None:
    """Give up files, processes, sockets and signals, for good. This process dies with its parent.

    Files that are open already stay usable.

    Args:
        folder: folder whose files stay usable; None for no folder. Python's library stays readable.

    Raises:
        Unavailable: the kernel cannot.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)
    if _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise Unavailable("this system has no prctl of Linux")
    _drop_capabilities()
    _restrict_files(folder)
    _restrict_calls()


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    none = (ctypes.c_uint32 * 6)()
    _LIBC.capset(header, none)


def _restrict_files(folder: str | None) -> None:
    version = _LIBC.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        raise Unavailable("this kernel has no Landlock, which came with Linux 5.13")
    rights = _RIGHTS[min(version, 5)]
    handled = ctypes.c_uint64(rights)
    ruleset = _LIBC.syscall(_LANDLOCK_CREATE, ctypes.byref(handled), 8, 0)
    if ruleset < 0:
        raise Unavailable("Landlock is switched off in this kernel")
    allowed = {} if folder is None else {folder: rights}
    paths = sysconfig.get_paths()
    library = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    library += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", f"{sys.base_prefix}/lib", "/usr/share/zoneinfo"]
    for place in library:
        allowed[place] = _READ_FILE | _READ_FOLDER
    for device in ("/dev/null", "/dev/urandom", "/dev/random"):
        allowed[device] = _READ_FILE | (_WRITE_FILE if device == "/dev/null" else 0)
    for place, right in allowed.items():
        try:
            opened = os.open(place, os.O_PATH)
        except OSError:
            continue
        rule = struct.pack("=Qi", right & rights, opened)
        failed = _LIBC.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0)
        os.close(opened)
        if failed:
            raise Unavailable(f"Landlock does not accept {place}")
    if _LIBC.syscall(_LANDLOCK_RESTRICT, ruleset, 0):
        raise Unavailable("Landlock cannot restrict this process")
    os.close(ruleset)


def _restrict_calls() -> None:
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise Unavailable(f"the calls of {platform.machine()} are not known")
    number, clone, forbidden = machine
    # seccomp_data: number of the call, machine, instruction pointer, six arguments of 64 bits.
    program = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, number),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        # The second set of calls of x86_64 would go around the list.
        (_AT_LEAST, 0, 1, 0x40000000),
        (_RETURN, 0, 0, _EPERM),
        # Its argument is in memory that a filter cannot read. The library then uses clone.
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ENOSYS),
        (_EQUAL, 0, 4, clone),
        (_LOAD, 0, 0, 16),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for call, commands in (
        (_FCNTL[platform.machine()], (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX)),
        (_IOCTL[platform.machine()], (_FIOSETOWN, _SIOCSPGRP, _FIOASYNC)),
    ):
        # Of these two calls only some commands fail: the second argument.
        program.append((_EQUAL, 0, 2 + 2 * len(commands), call))
        program.append((_LOAD, 0, 0, 24))
        for command in commands:
            program += [(_EQUAL, 0, 1, command), (_RETURN, 0, 0, _EPERM)]
        program.append((_RETURN, 0, 0, _ALLOW))
    for call in forbidden:
        program += [(_EQUAL, 0, 1, call), (_RETURN, 0, 0, _EPERM)]
    program.append((_RETURN, 0, 0, _ALLOW))
    packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    code = ctypes.create_string_buffer(packed, len(packed))
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    if _LIBC.prctl(_PR_SET_SECCOMP, 2, filters, 0, 0):
        raise Unavailable("this kernel has no seccomp")


@cache
def why_unavailable() -> str | None:
    """Say why this machine cannot restrict a process; None if it can. The answer is computed once."""
    done = subprocess.run([sys.executable, "-I", "-B", __file__], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip() or f"a process ended with {done.returncode}"


if __name__ == "__main__":
    try:
        restrict(None)
    except Unavailable as error:
        sys.exit(str(error))
