"""What the kernel is asked for before a program under test runs. Linux; nothing but ctypes and the standard library.

``isolate`` in the supervisor, before the fork: the children get process, network and IPC namespaces of their own. Root
may do that; others inside a user namespace, where the system permits one. Where it does not, the other means stay.
``confine`` in the child: resource limits, and, for root, a user id that nobody else has. With it RLIMIT_NPROC counts
the jail's own processes, signals to anyone else fail, and files of others cannot be written.

Sources: unshare(2), prctl(2), capabilities(7), getrlimit(2).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sysconfig
from collections.abc import Iterable
from typing import NamedTuple

NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
SET_DEATH_SIGNAL, SET_KEEP_CAPS, SET_SUBREAPER, SET_NO_NEW_PRIVS = 1, 8, 36, 38
CAP_VERSION_3 = 0x20080522
CAP_READ_ANY_FILE = 2  # CAP_DAC_READ_SEARCH
FIRST_UID = 1_000_000_000  # far above those of people and services
OPEN_FILES = 64
FILE_BYTES = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


class Limits(NamedTuple):
    cpu_seconds: int
    memory_bytes: int  # of address space
    processes: int  # threads count as processes


class Isolation(NamedTuple):
    """What was granted."""

    namespaces: bool  # processes, network, IPC
    uid: int | None  # the child's; None where it stays the caller's


def become_subreaper() -> None:
    """Orphans of this process's descendants become its children."""
    _prctl(SET_SUBREAPER, 1)


def isolate() -> Isolation:
    """Namespaces for the children of this process, where permitted."""
    root = os.geteuid() == 0
    user, group = os.geteuid(), os.getegid()
    flags = NEW_PID | NEW_NET | NEW_IPC
    granted = _libc.unshare(flags) == 0
    if not granted and not root and _libc.unshare(flags | NEW_USER) == 0:
        granted = True
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    return Isolation(granted, FIRST_UID + os.getpid() if root else None)


def confine(isolation: Isolation, limits: Limits) -> None:
    """In the child: a session of its own, limits, user id. Does not outlive its parent."""
    os.setsid()
    parent = os.getppid()
    processes = limits.processes
    if isolation.uid is None and not isolation.namespaces:
        processes += _threads_of(os.getuid())
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, limits.cpu_seconds, limits.cpu_seconds + 1),
        (resource.RLIMIT_AS, limits.memory_bytes, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, FILE_BYTES, FILE_BYTES),
        (resource.RLIMIT_NPROC, processes, processes),
        (resource.RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        ceiling = resource.getrlimit(kind)[1]
        hard = hard if ceiling == resource.RLIM_INFINITY else min(hard, ceiling)
        resource.setrlimit(kind, (min(soft, hard), hard))
    if isolation.uid is None:
        _set_capabilities([])  # a user namespace grants all of them inside it
    else:
        _drop_to(isolation.uid)
    _prctl(SET_NO_NEW_PRIVS, 1)
    _prctl(SET_DEATH_SIGNAL, signal.SIGKILL)  # a change of user clears it, so it comes last
    if os.getppid() != parent:
        os._exit(1)  # the parent went in between


def _drop_to(uid: int) -> None:
    """A user without rights, except to read this Python where it lies in a private folder."""
    private = not all(map(_readable_by_all, {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}))
    if private:
        _prctl(SET_KEEP_CAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    _set_capabilities([CAP_READ_ANY_FILE] if private else [])


def _readable_by_all(path: str) -> bool:
    path = os.path.realpath(path)
    while os.path.dirname(path) != path:
        if os.stat(path).st_mode & 0o005 != 0o005:
            return False
        path = os.path.dirname(path)
    return True


def _set_capabilities(numbers: Iterable[int]) -> None:
    mask = sum(1 << number for number in numbers)
    header = (ctypes.c_uint32 * 2)(CAP_VERSION_3, 0)
    # effective, permitted, inheritable; the second three are for numbers above 31
    sets = (ctypes.c_uint32 * 6)(mask, mask, 0, 0, 0, 0)
    if _libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset failed")


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option} failed")


def _threads_of(uid: int) -> int:
    """RLIMIT_NPROC counts all threads of the user, those of other programs too."""
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                total += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return total


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
