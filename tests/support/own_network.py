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


def enter() -> bool:
    """Move the calling thread, and whatever it starts from now on, to a new network with nothing but a loopback
    interface; whether that was permitted."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        _, flags = _IFREQ.unpack(fcntl.ioctl(any_socket, _SIOCGIFFLAGS, _IFREQ.pack(b"lo", 0)))
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", flags | _IFF_UP))
    return True


if __name__ == "__main__":
    # Says whether it is permitted, for the Makefile.
    raise SystemExit(os.EX_OK if enter() else os.EX_NOPERM)
