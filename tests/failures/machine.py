"""The first process of a simulated machine (see network.py). Configures an address and a /dev/shm, then sleeps.

python machine.py ADDRESS NAME     # standard input: a socket, to which it sends the switch's end of the TUN device
"""

import array
import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys

# linux/if_tun.h, linux/sockios.h, net/if.h
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU, IFF_UP = 0x8914, 0x8916, 0x891C, 0x8922, 0x1
MTU = 16000  # bytes; large, because the switch's cost is per packet


def main(address: str, name: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that the kernel reaps the orphans that this process adopts
    socket.sethostname(name)
    if ctypes.CDLL(None).mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None) != 0:
        raise OSError("mount of /dev/shm")
    wire = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(wire, TUNSETIFF, struct.pack("16sH22x", b"net0", IFF_TUN | IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for request, value in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, "255.255.255.0")):
            inet = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
            fcntl.ioctl(sock, request, struct.pack("16s16s", b"net0", inet))
        fcntl.ioctl(sock, SIOCSIFMTU, struct.pack("16si12x", b"net0", MTU))
        for interface in (b"net0", b"lo"):
            fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sH14x", interface, IFF_UP))
    with socket.socket(fileno=os.dup(0)) as ours:
        ours.sendmsg([b"ready"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [wire]))])
    os.close(wire)
    os.close(0)
    while True:
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
