"""Namespaces that an emulated cluster has to itself: of network, mounts and processes, and of users where it is started
by an ordinary one, who is root in there and nobody outside of it.

All of that ends with its first process, however that ends: nothing can be left behind.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

_libc = ctypes.CDLL(None, use_errno=True)
_NEW_USER, _NEW_NETWORK, _NEW_MOUNTS, _NEW_PROCESSES = 0x10000000, 0x40000000, 0x00020000, 0x20000000
_RECURSIVE_PRIVATE = 1 << 14 | 1 << 18
_NO_PROGRAMS = 2 | 4 | 8
"""Of a mount: nothing on it is a device, gives rights, or can be run."""
_NET_ADMIN, _SYS_ADMIN = 1 << 12, 1 << 21
_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Which ask a process to stop."""


class StoppedError(Exception):
    """The process was asked to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.status = 128 + number
        """Exit status as a shell has it."""


def is_root() -> bool:
    """Whether this process may make network namespaces as it is; user 0 of a container often may not."""
    status = Path("/proc/self/status").read_text()
    held = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), 16)
    return held & _NET_ADMIN != 0 and held & _SYS_ADMIN != 0


def isolated(work: Callable[[], int]) -> int:
    """Do work as the first process of namespaces of its own, as root in there.

    It dies with this process, or where that is asked to stop. What runs in this process must be a single thread, and it
    has the new network for the rest of its life.

    Args:
        work: what to do; returns an exit status.

    Returns:
        The exit status.

    Raises:
        RuntimeError: this machine does not permit it.
        StoppedError: a signal asked this process to stop.
    """
    _enter()
    trouble, told = os.pipe()
    stopped: list[int] = []

    def stop(number: int, _: object) -> None:
        stopped.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until there is a child to end
    child = os.fork()
    if not child:
        os.close(trouble)  # so that its parent is the only reader
        _be_first(work, told)
    os.close(told)
    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    with os.fdopen(trouble) as pipe:
        found = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for number, handler in before.items():
        signal.signal(number, handler)
    if stopped:
        raise StoppedError(stopped[0])
    if found:
        raise RuntimeError(_not_permitted(found))
    return status if status >= 0 else 128 - status


def _enter() -> None:
    """Leave the namespaces of this process for new ones, in which its user is root."""
    user, group = os.geteuid(), os.getegid()
    flags = _NEW_NETWORK | _NEW_MOUNTS | _NEW_PROCESSES
    try:
        if is_root():
            _call("unshare", flags)
            return
        _call("unshare", flags | _NEW_USER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path("/proc/self", name).write_text(text)
    except OSError as error:
        raise RuntimeError(_not_permitted(str(error))) from None


def _be_first(work: Callable[[], int], told: int) -> NoReturn:
    """Be the first process of the new namespaces: when it ends, the kernel ends all others, and what they made."""
    status = 1
    try:
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in _SIGNALS:  # which never reach a first process that does not handle them
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if not _has_no_reader(told) and _furnished(told):
            status = work()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _has_no_reader(pipe: int) -> bool:
    """Return whether a pipe has no reader: a parent that ended before it could take its child along. `os.getppid()`
    would not tell, since it is 0 where the parent is outside of the namespace."""
    poll = select.poll()
    poll.register(pipe, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _furnished(told: int) -> bool:
    """Mount what must be of the new namespaces, and say what keeps one from it: `ip netns` keeps its names in /run, and
    /proc shows processes."""
    try:
        for kind, place, flags in (
            (None, b"/", _RECURSIVE_PRIVATE),  # what is mounted from here on is for these processes alone
            (b"tmpfs", b"/run", _NO_PROGRAMS),
            (b"proc", b"/proc", _NO_PROGRAMS),
        ):
            _call("mount", kind, place, kind, ctypes.c_ulong(flags), None)
    except OSError as error:
        os.write(told, str(error).encode())
        return False
    finally:
        os.close(told)
    return True


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library; raises OSError with its name where it fails."""
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _not_permitted(why: str) -> str:
    return f"an emulated cluster needs root, or user namespaces, which are not permitted here: {why}"
