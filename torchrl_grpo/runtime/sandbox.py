"""Takes from this process, for good, what code of a model must not have.

It uses the standard library only, so that a program that does nothing else starts quickly. Afterwards the
process can read and write one folder, if any, and read the libraries of Python and of the system (Landlock).
It can start no process, open no socket and send no signal (seccomp), and its memory and processor time are
bounded (resource limits). A shell may also run the system's programs, in processes of its own group. Where
the kernel has no Landlock or no seccomp, :func:`restrict` raises.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache

from torchrl_grpo.runtime.seccomp import ask_about_calls, restrict_calls

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
# All access rights by version of Landlock's interface, and those to read a file or folder and write a file.
_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}
_READ_FILE, _READ_FOLDER, _WRITE_FILE, _EXECUTE = 1 << 2, 1 << 3, 1 << 1, 1 << 0
# Folders of programs and of what they read. Others of /usr may have files of the user.
_PROGRAMS = (
    *(f"{start}/{name}" for start in ("", "/usr", "/usr/local", sys.base_prefix) for name in ("bin", "sbin")),
    "/usr/libexec",
    "/usr/include",
    "/usr/share",
    "/usr/local/lib",
    "/etc/alternatives",
)
# Program that restricts itself. -I leaves this project out of the path.
_CHECK = """
import sys
sys.path.insert(0, sys.argv[1])
from torchrl_grpo.runtime import sandbox
try:
    sandbox.restrict(None)
except sandbox.Unavailable as error:
    sys.exit(str(error))
"""


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
        most = resource.getrlimit(resource_limit)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(resource_limit, (value, value))


def ask_about_new(*, of_shell: bool = False) -> int:
    """Let each new thread, file and folder of this process wait for another process, which counts them.

    Args:
        of_shell: whether that process also decides about processes, signals and the rights of files.

    Returns:
        The file descriptor on which that process gets questions (:func:`.seccomp.receive`). Close it here.

    Raises:
        Unavailable: the kernel cannot.
    """
    _give_up_privileges()
    try:
        return ask_about_calls(of_shell=of_shell)
    except OSError as error:
        raise Unavailable(str(error)) from error


def restrict(folder: str | None, parent: int | None = None, *, of_shell: bool = False) -> None:
    """Give up files, other processes, sockets and signals, for good. This process dies with its parent.

    The libraries of Python and of the system stay readable, and files that are open already stay usable.
    Without a folder, this process cannot start threads either. Threads that run already are not restricted.

    Args:
        folder: folder whose files stay usable; None for none.
        parent: number of the parent. If it has died already, this process ends.
        of_shell: whether this process may start processes, and run programs of the system.

    Raises:
        Unavailable: the kernel cannot.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
    _give_up_privileges()
    _restrict_files(folder, _PROGRAMS if of_shell else ())
    try:
        restrict_calls(may_create=folder is not None, of_shell=of_shell)
    except OSError as error:
        raise Unavailable(str(error)) from error


def _give_up_privileges() -> None:
    if _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise Unavailable("this system has no prctl of Linux")
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    none = (ctypes.c_uint32 * 6)()
    _LIBC.capset(header, none)


def _restrict_files(folder: str | None, programs: Sequence[str]) -> None:
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
    for place in (*programs, *(library if programs else ())):
        allowed[place] = _READ_FILE | _READ_FOLDER | _EXECUTE
    for file in ("/dev/null", "/dev/urandom", "/dev/random", "/dev/zero", "/etc/ld.so.cache"):
        allowed[file] = _READ_FILE | (_WRITE_FILE if file == "/dev/null" else 0)
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


@cache
def why_unavailable() -> str | None:
    """Say why this machine cannot restrict a process; None if it can. The answer is computed once."""
    # Programs that restrict themselves start more quickly without it.
    import subprocess

    command = [sys.executable, "-I", "-c", _CHECK, os.path.abspath(f"{__file__}/../../..")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip() or f"a process ended with {done.returncode}"
