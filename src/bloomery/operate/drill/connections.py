"""Cuts the network connections of another process, as a broken link or a switch that restarts does."""

from __future__ import annotations

import ctypes
import os
import socket
from contextlib import suppress
from pathlib import Path

_PIDFD_GETFD = 438
"""The number of the system call, the same on all of Linux's architectures since 5.6."""


def cut_connections(pid: int, *, port: int = 0) -> int:
    """Shut down the TCP connections of a process in both directions, and return how many there were.

    The process and its peers see connections that end; sockets that listen go on listening.
    Raises OSError: PermissionError where this process may not trace that one.

    port: cut only connections from or to this port; 0: all.
    """
    process = os.pidfd_open(pid)
    try:
        return sum(_cut(process, number, port) for number in _sockets(pid))
    finally:
        os.close(process)


def _sockets(pid: int) -> list[int]:
    """Return the numbers of the descriptors of a process that are sockets."""
    numbers = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if str(link.readlink()).startswith("socket:"):
                numbers.append(int(link.name))
    return numbers


def _cut(process: int, number: int, port: int) -> bool:
    """Shut down one socket of a process if it is a TCP connection; returns whether it was."""
    libc = ctypes.CDLL(None, use_errno=True)
    copy = libc.syscall(_PIDFD_GETFD, process, number, 0)
    if copy < 0:
        failure = ctypes.get_errno()
        if failure == 9:  # EBADF: closed meanwhile
            return False
        raise OSError(failure, f"descriptor {number} of another process: {os.strerror(failure)}")
    with socket.socket(fileno=copy) as connection:
        is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
        if not is_tcp or connection.type != socket.SOCK_STREAM:
            return False
        try:
            ends = (connection.getsockname()[1], connection.getpeername()[1])
        except OSError:  # it listens, or is not connected yet
            return False
        if port and port not in ends:
            return False
        with suppress(OSError):  # its peer was quicker
            connection.shutdown(socket.SHUT_RDWR)
        return True
