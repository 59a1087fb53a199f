"""Allows this process the system calls that Python code computes with, and no others (seccomp of Linux).

The list has no call that reaches another process, keeps something after the end of this one, or takes memory
that its limits do not count. A filter keeps no count. So each new thread, file or folder waits for the answer
of another process, which counts them; without one, they fail.

A shell may also start programs. Its processes cannot leave their process group, so one signal ends them all.
Signals to others, and rights of files, wait for that other process too, which gives them itself.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

# Calls that are allowed: name, number on x86_64, number on aarch64. New machines lack the oldest ones.
_ALLOWED = """
read 0 63, write 1 64, close 3 57, fstat 5 80, lseek 8 62, newfstatat 262 79, statx 332 291, stat 4 -,
lstat 6 -, mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214, mremap 25 216, madvise 28 233,
futex 202 98, pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, preadv 295 69, pwritev 296 70,
sendfile 40 71, copy_file_range 326 285, ftruncate 77 46, statfs 137 43, fstatfs 138 44, access 21 -,
faccessat 269 48, faccessat2 439 439, getcwd 79 17, umask 95 166, chdir 80 49, fchdir 81 50,
getdents64 217 61, getdents 78 -, readlink 89 -, readlinkat 267 78, rename 82 -, renameat 264 38,
rmdir 84 -, unlink 87 -, unlinkat 263 35, dup 32 23, dup2 33 -, dup3 292 24,
close_range 436 436, pipe 22 -, pipe2 293 59, recvfrom 45 207, sendto 44 206, poll 7 -, ppoll 271 73,
select 23 -, pselect6 270 72, eventfd 284 -, eventfd2 290 19, epoll_create 213 -, epoll_create1 291 20,
epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441, rt_sigaction 13 134,
rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137,
rt_sigsuspend 130 133, sigaltstack 131 132, signalfd 282 -, signalfd4 289 74, pause 34 -, alarm 37 -,
setitimer 38 103, getitimer 36 102, timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87,
restart_syscall 219 128, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115,
nanosleep 35 101, gettimeofday 96 169, time 201 -, times 100 153, getrusage 98 165, getrlimit 97 163,
sysinfo 99 179, uname 63 160, getpid 39 172, gettid 186 178, getppid 110 173, getuid 102 174,
geteuid 107 175, getgid 104 176, getegid 108 177, getgroups 115 158, getresuid 118 148, getresgid 120 150,
getpgid 121 155, getpgrp 111 -, getsid 124 156, getcpu 309 168, sched_yield 24 124,
sched_getaffinity 204 123, set_robust_list 273 99, rseq 334 293, getrandom 318 278, exit 60 93,
exit_group 231 94
"""
# Calls that do nothing and report success: writing to the disk at once would slow down everybody.
_IGNORED = "fsync 74 82, fdatasync 75 83, msync 26 227"
# Further calls of a shell and the programs that it starts.
_OF_SHELLS = """
execve 59 221, wait4 61 260, waitid 247 95, arch_prctl 158 -, set_tid_address 218 96, setrlimit 160 164,
fadvise64 221 223, setuid 105 146, setgid 106 144, setreuid 113 145, setregid 114 143, setresuid 117 147,
setresgid 119 149
"""
# Those with whose absence programs reckon: a timer is a signal to any process.
_MISSING = "timer_create 222 107"
# Calls of such programs that do nothing and report success: owners and times are nobody's concern.
_IGNORED_OF_SHELLS = """
chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, utime 132 -, utimes 235 -, futimesat 261 -,
utimensat 280 88
"""
# Further attributes of files, which programs expect to be missing on some file systems.
_UNSUPPORTED = """
setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10,
listxattr 194 11, llistxattr 195 12, flistxattr 196 13
"""
_LINKS, _FORKS = "link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36", "fork 57 -, vfork 58 -"
_CHMOD, _FCHMOD, _FCHMODAT = "chmod 90 -", "fchmod 91 52", "fchmodat 268 53"
_KILL_CALL, _PRLIMIT = "kill 62 129", "prlimit64 302 261"
# Calls that create a file, and a folder.
_CREAT, _MKDIR = "creat 85 -", "mkdir 83 -, mkdirat 258 34"
# Calls that are allowed with some arguments.
_OPEN, _OPENAT, _CLONE, _SOCKETPAIR = "open 2 -", "openat 257 56", "clone 56 220", "socketpair 53 199"
_FCNTL, _IOCTL, _MMAP, _RENAME = "fcntl 72 25", "ioctl 16 29", "mmap 9 222", "renameat2 316 276"
# O_CREAT, and the bit of O_TMPFILE that is its own.
_CREATES = 0o100 | 0o20000000
# O_WRONLY and O_RDWR, and O_TRUNC, which Landlock lets pass without them in Linux before 6.2.
_WRITES, _TRUNC = 0o3, 0o1000
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_GETLK, F_SETLK, F_SETLKW, F_DUPFD_CLOEXEC, F_GETPIPE_SZ. The
# others send signals, enlarge pipes, or stop another process from opening a file.
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)
# TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. Others change files or send signals.
_IOCTL_COMMANDS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
_CLONE_THREAD, _AF_UNIX, _SOCK_STREAM = 0x10000, 1, 1
# Flags of clone for namespaces, and for a process that shares open files, whose limits would not be its own.
_CLONE_REFUSED = 0x7E020000 | 0x400
# MAP_SHARED and MAP_ANONYMOUS: memory that stays after the end of the process in which it counted.
_SHARED_MEMORY = 0x01 | 0x20
# RENAME_WHITEOUT, which leaves a device in the place of the file.
_WHITEOUT = 4
#: What stands for the working directory in the place of an open folder.
AT_FDCWD = 0xFFFFFF9C
# Calls from here on came after 2018. A C library does without those that the kernel does not know.
_NEW_CALLS = 424

# Machine -> its number in seccomp, column of the lists above, and number of the call seccomp.
_MACHINES = {"x86_64": (0xC000003E, 1, 317), "aarch64": (0xC00000B7, 2, 277)}
_ALLOW, _ASK, _KILL, _FAIL = 0x7FFF0000, 0x7FC00000, 0x80000000, 0x00050000
_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
# Requests of a listener: receive a question, send an answer, give a file; the answer that the call goes on.
_RECEIVE, _SEND, _GIVE, _CONTINUE = 0xC0502100, 0xC0182101, 0x40182103, 1
# SECCOMP_ADDFD_FLAG_SEND: the call returns the file.
_AS_ANSWER = 2

# An instruction: operation, instructions to skip if true and if false, value.
_Instruction = tuple[int, int, int, int]
_FORMAT = "=HBBI"


class Question(NamedTuple):
    """A call that waits for an answer.

    Attributes:
        number: number of the question.
        process: thread that makes the call.
        kind: what it is about: ``thread`` (in a shell also a process), ``file``, ``folder``, ``signal`` or
            ``mode``.
        arguments: arguments of the call. Those about the rights of a file are all like those of ``fchmodat``:
            a descriptor or ``AT_FDCWD``, the place of the path in memory or 0, and the rights. Those that
            open a file are all like those of ``openat``.
        opens: whether it opens a file with such arguments.
    """

    number: int
    process: int
    kind: str
    arguments: Sequence[int]
    opens: bool


def ask_about_calls(*, of_shell: bool = False) -> int:
    """Let each new thread, file and folder of this process wait for an answer from now on.

    Args:
        of_shell: whether new processes, signals, the rights of files, and all that opens a file for writing
            wait too.

    Returns:
        The file descriptor on which the questions arrive. Another process must get it, and this one close it.

    Raises:
        OSError: the kernel or the machine cannot.
    """
    return _install(_questions_of_shell if of_shell else _questions, new_listener=True)


def restrict_calls(*, may_create: bool, of_shell: bool = False) -> None:
    """Allow this process no other calls from now on.

    Args:
        may_create: whether it may start threads, and create files, folders and pairs of sockets.
        of_shell: whether it may also start processes and programs.

    Raises:
        OSError: the kernel or the machine cannot.
    """
    allowed = _restrictions_of_shell if of_shell else _restrictions
    _install(allowed if may_create else _restrictions_without_new)


def receive(listener: int) -> Question | None:
    """Return the question that waits.

    Returns:
        None if the process that asked has ended.
    """
    buffer = bytearray(80)
    try:
        fcntl.ioctl(listener, _RECEIVE, buffer)
    except FileNotFoundError:
        return None
    # Number of the question, process, flags, number of the call, machine, instruction pointer, arguments.
    number, process, _, call, _, _, *arguments = struct.unpack_from("=QIIiIQ6Q", buffer)
    column = _machine()[1]
    kinds = {
        "thread": f"{_CLONE}, {_FORKS}",
        "folder": _MKDIR,
        "signal": _KILL_CALL,
        "mode": f"{_CHMOD}, {_FCHMOD}, {_FCHMODAT}",
    }
    kind = next((name for name, calls in kinds.items() if call in _numbers(calls, column)), "file")
    if call in _numbers(f"{_CHMOD}, {_OPEN}", column):
        arguments.insert(0, AT_FDCWD)
    elif call in _numbers(_FCHMOD, column):
        arguments.insert(1, 0)
    return Question(number, process, kind, arguments, call in _numbers(f"{_OPEN}, {_OPENAT}", column))


def answer(listener: int, question: int, error: int = 0, *, is_done: bool = False) -> None:
    """Let the call of a question go on, or fail with the number of an error.

    Args:
        listener: file descriptor of the questions.
        question: number of the question.
        error: number of an error; 0 for none.
        is_done: whether the call returns 0 without going on, because the caller has done what it asks for.
    """
    reply = struct.pack("=QqiI", question, 0, -error, 0 if error or is_done else _CONTINUE)
    try:
        fcntl.ioctl(listener, _SEND, bytearray(reply))
    except FileNotFoundError:
        # Its process has ended.
        return


def give(listener: int, question: int, file: int, *, is_inherited: bool) -> None:
    """Let the call of a question return a file that this process has open.

    Args:
        listener: file descriptor of the questions.
        question: number of the question.
        file: file descriptor.
        is_inherited: whether programs that the caller starts have the file too.

    Raises:
        OSError: the kernel cannot (before Linux 5.14), or the caller has ended or has too many files open.
    """
    flags = 0 if is_inherited else os.O_CLOEXEC
    fcntl.ioctl(listener, _GIVE, struct.pack("=QIIII", question, _AS_ANSWER, file, 0, flags))


def _install(make: Callable[[int], list[_Instruction]], *, new_listener: bool = False) -> int:
    """Let the kernel run a program at each call.

    The program reads the call's data: number, machine, instruction pointer, and six arguments of eight bytes.
    """
    packed = _packed(make)
    code = ctypes.create_string_buffer(packed, len(packed))
    count = len(packed) // struct.calcsize(_FORMAT)
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", count, ctypes.addressof(code)))
    seccomp = _machine()[2]
    libc = ctypes.CDLL(None, use_errno=True)
    # SECCOMP_SET_MODE_FILTER and SECCOMP_FILTER_FLAG_NEW_LISTENER
    listener: int = libc.syscall(seccomp, 1, 8 if new_listener else 0, filters)
    if listener < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp of this kernel fails with {os.strerror(number)!r}")
    return listener


@cache
def _packed(make: Callable[[int], list[_Instruction]]) -> bytes:
    """Return the bytes of a program. A process that forks restricted ones makes them once."""
    machine, column, _ = _machine()
    program: list[_Instruction] = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        *make(column),
    ]
    return b"".join(struct.pack(_FORMAT, *instruction) for instruction in program)


def _machine() -> tuple[int, int, int]:
    name = os.uname().machine
    if name not in _MACHINES:
        raise OSError(f"the system calls of {name} are not known")
    return _MACHINES[name]


def _numbers(calls: str, column: int) -> list[int]:
    fields = [entry.split()[column] for entry in calls.split(",")]
    return [int(field) for field in fields if field != "-"]


def _questions(column: int, of_shell: bool = False) -> list[_Instruction]:
    return [*_creating_calls(column, _ASK, of_shell), (_RETURN, 0, 0, _ALLOW)]


def _restrictions(column: int, create: int = _ALLOW, of_shell: bool = False) -> list[_Instruction]:
    # asyncio needs such a pair. Messages of other kinds of sockets may reach other processes.
    socketpair = [
        _argument(0),
        (_EQUAL, 0, 4, _AF_UNIX),
        _argument(1),
        (_AND, 0, 0, 0xF),
        *_if(_EQUAL, _SOCK_STREAM, create),
        (_RETURN, 0, 0, _fail(errno.EPERM)),
    ]
    return [
        *(_calls_of_shell(column) if of_shell else ()),
        *_calls(_ALLOWED, column, [(_RETURN, 0, 0, _ALLOW)]),
        *_creating_calls(column, create, of_shell),
        *_calls(_IGNORED, column, [(_RETURN, 0, 0, _fail(0))]),
        *_calls(_FCNTL, column, _one_of(_FCNTL_COMMANDS, errno.EPERM)),
        *_calls(_IOCTL, column, _one_of(_IOCTL_COMMANDS, errno.ENOTTY)),
        *_calls(_SOCKETPAIR, column, socketpair),
        # This has the second set of calls of x86_64 too.
        *_if(_AT_LEAST, _NEW_CALLS, _fail(errno.ENOSYS)),
        (_RETURN, 0, 0, _fail(errno.EPERM)),
    ]


def _calls_of_shell(column: int) -> list[_Instruction]:
    # Those of another process are not its own to change.
    own_limits = [_argument(0), *_if(_EQUAL, 0, _ALLOW), (_RETURN, 0, 0, _fail(errno.EPERM))]
    own_memory = [
        _argument(3),
        (_AND, 0, 0, _SHARED_MEMORY),
        *_if(_EQUAL, _SHARED_MEMORY, _fail(errno.EPERM)),
        (_RETURN, 0, 0, _ALLOW),
    ]
    rename = [_argument(4), *_if(_ANY_BIT, _WHITEOUT, _fail(errno.EINVAL)), (_RETURN, 0, 0, _ALLOW)]
    return [
        # Before the list that allows it to all.
        *_calls(_MMAP, column, own_memory),
        *_calls(_RENAME, column, rename),
        *_calls(_OF_SHELLS, column, [(_RETURN, 0, 0, _ALLOW)]),
        *_calls(_IGNORED_OF_SHELLS, column, [(_RETURN, 0, 0, _fail(0))]),
        *_calls(_MISSING, column, [(_RETURN, 0, 0, _fail(errno.ENOSYS))]),
        *_calls(_UNSUPPORTED, column, [(_RETURN, 0, 0, _fail(errno.EOPNOTSUPP))]),
        *_calls(_PRLIMIT, column, own_limits),
    ]


_restrictions_without_new = partial(_restrictions, create=_FAIL | errno.EPERM)
_questions_of_shell = partial(_questions, of_shell=True)
_restrictions_of_shell = partial(_restrictions, of_shell=True)


def _creating_calls(column: int, create: int, of_shell: bool) -> list[_Instruction]:
    """Return the action ``create`` for calls that create something, if they do."""
    # What clone creates without CLONE_THREAD is a process.
    clone = [_argument(0), *_if(_ANY_BIT, _CLONE_THREAD, create), (_RETURN, 0, 0, _fail(errno.EPERM))]
    counted, further = _CREATES, []
    if of_shell:
        thread = _if(_ANY_BIT, _CLONE_THREAD, create)
        clone = [
            _argument(0),
            *thread,
            *_if(_ANY_BIT, _CLONE_REFUSED, _fail(errno.EPERM)),
            (_RETURN, 0, 0, create),
        ]
        # Each process has its own limits, and may open a file that another one has created.
        counted |= _WRITES
        others = ", ".join((_FORKS, _LINKS, _KILL_CALL, _CHMOD, _FCHMOD, _FCHMODAT))
        further = _calls(others, column, [(_RETURN, 0, 0, create)])
    opens = [
        (_ANY_BIT, 2, 0, _WRITES),
        *_if(_ANY_BIT, _TRUNC, _fail(errno.EPERM)),
        *_if(_ANY_BIT, counted, create),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return [
        *_calls(f"{_CREAT}, {_MKDIR}", column, [(_RETURN, 0, 0, create)]),
        *_calls(_OPENAT, column, [_argument(2), *opens]),
        *_calls(_OPEN, column, [_argument(1), *opens]),
        *_calls(_CLONE, column, clone),
        *further,
    ]


def _calls(calls: str, column: int, body: list[_Instruction]) -> list[_Instruction]:
    """Run ``body`` for these calls. It must return."""
    program: list[_Instruction] = []
    for call in _numbers(calls, column):
        program += [(_EQUAL, 0, len(body), call), *body]
    return program


def _argument(number: int) -> _Instruction:
    return _LOAD, 0, 0, 16 + 8 * number


def _if(operation: int, value: int, action: int) -> list[_Instruction]:
    return [(operation, 0, 1, value), (_RETURN, 0, 0, action)]


def _one_of(commands: tuple[int, ...], error: int) -> list[_Instruction]:
    """Allow a call if its second argument is one of these commands."""
    tests = [instruction for command in commands for instruction in _if(_EQUAL, command, _ALLOW)]
    return [_argument(1), *tests, (_RETURN, 0, 0, _fail(error))]


def _fail(error: int) -> int:
    """Return the action that lets a call fail with an error; 0 lets it do nothing and report success."""
    return _FAIL | error
