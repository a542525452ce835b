"""Private namespaces of an emulated cluster: network, mounts, processes, and users if it is started without root.

They end with their first process, however that ends, so that nothing is left behind.
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
"""Mount flags: nosuid, nodev, noexec."""
_NET_ADMIN, _SYS_ADMIN = 1 << 12, 1 << 21
_PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a process to stop."""


class StoppedError(Exception):
    """A signal asked the process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.status = 128 + number
        """Exit status as a shell reports it."""


def is_root() -> bool:
    """Return whether this process may create network namespaces; root in a container often may not."""
    status = Path("/proc/self/status").read_text()
    held = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), 16)
    return held & _NET_ADMIN != 0 and held & _SYS_ADMIN != 0


def isolated(work: Callable[[], int]) -> int:
    """Call `work` as the first process, and as root, of new namespaces.

    The child is killed when this process ends or is asked to stop. This process must be single-threaded, and stays in
    the new network namespace.

    Args:
        work: the function to call in the child; returns an exit status.

    Returns:
        The exit status.

    Raises:
        RuntimeError: this machine does not permit new namespaces.
        StoppedError: a signal asked this process to stop.
    """
    _enter()
    read_end, write_end = os.pipe()
    stopped: list[int] = []

    def stop(number: int, _: object) -> None:
        stopped.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the child exists
    child = os.fork()
    if not child:
        os.close(read_end)  # so that the parent is the only reader
        _run_first_process(work, write_end)
    os.close(write_end)
    previous = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    with os.fdopen(read_end) as pipe:
        error = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for number, handler in previous.items():
        signal.signal(number, handler)
    if stopped:
        raise StoppedError(stopped[0])
    if error:
        raise RuntimeError(_not_permitted(error))
    return status if status >= 0 else 128 - status


def _enter() -> None:
    """Move this process to new namespaces in which its user is root."""
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


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends.

    Args:
        parent: process ID of the parent. If it has ended already, this process ends at once.
    """
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _run_first_process(work: Callable[[], int], errors: int) -> NoReturn:
    """Run `work` as the first process of the new namespaces: when it ends, the kernel kills all others.

    Args:
        work: returns the exit status.
        errors: write end of a pipe to the parent.
    """
    status = 1
    try:
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in STOP_SIGNALS:  # the kernel does not deliver them to a first process without a handler
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if not _has_no_reader(errors) and _mount_file_systems(errors):
            status = work()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _has_no_reader(pipe: int) -> bool:
    """Return whether a pipe has no reader, because the parent ended before prctl took effect.

    `os.getppid()` cannot tell: it is 0 for a parent outside of the PID namespace.
    """
    poll = select.poll()
    poll.register(pipe, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _mount_file_systems(errors: int) -> bool:
    """Mount private /run (for the names of `ip netns`) and /proc (for the new PID namespace).

    Args:
        errors: write end of a pipe, which receives the reason of a failure.

    Returns:
        Whether all mounts succeeded.
    """
    try:
        for kind, place, flags in (
            (None, b"/", _RECURSIVE_PRIVATE),  # later mounts are visible in this namespace only
            (b"tmpfs", b"/run", _NO_PROGRAMS),
            (b"proc", b"/proc", _NO_PROGRAMS),
        ):
            _call("mount", kind, place, kind, ctypes.c_ulong(flags), None)
    except OSError as error:
        os.write(errors, str(error).encode())
        return False
    finally:
        os.close(errors)
    return True


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library.

    Raises:
        OSError: the call failed; names the function.
    """
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _not_permitted(why: str) -> str:
    return f"an emulated cluster needs root or user namespaces, and neither is permitted here: {why}"
