"""A network of its own for a process that runs tests, so that jobs of two such processes can take the same ports.

torchrun chooses the port of a job seconds before the job listens there. Another job's many groups, which listen at any
port that is free, would sooner or later be at that one.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914  # linux/sockios.h
_IFF_UP = 1
_IFREQ = struct.Struct("16sh14x")  # a name, and flags
_NETWORK = "/proc/thread-self/ns/net"


def enter() -> bool:
    """Move the calling thread, and whatever it starts from now on, to a new network with nothing but a loopback
    interface; whether that could be done. If not, it stays where it is.

    Raises:
        OSError: the new network is of no use, and there is no way back from it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        before = os.open(_NETWORK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False  # no way back: not to be tried
    try:
        if libc.unshare(_CLONE_NEWNET) != 0:
            return False
        try:
            _start_loopback()
        except OSError:
            if libc.setns(before, _CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise OSError(
                    number, f"in a network without loopback, and no way back: {os.strerror(number)}"
                ) from None
            return False
    finally:
        os.close(before)
    return True


def _start_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        _, flags = _IFREQ.unpack(fcntl.ioctl(any_socket, _SIOCGIFFLAGS, _IFREQ.pack(b"lo", 0)))
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", flags | _IFF_UP))


if __name__ == "__main__":
    # Says whether it can be done, for the Makefile.
    raise SystemExit(os.EX_OK if enter() else os.EX_NOPERM)
