"""Resolves the setting `control.interface` to the listening address of this worker.

address_of("127.0.0.1") == "127.0.0.1";  address_of("eth0") == "10.0.0.7";  address_of("node3") resolves the name
interface_of("10.0.0.7") == "eth0"
server = listening(29501)      # a socket that listens on all addresses of this machine, including IPv6
"""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

SIOCGIFADDR = 0x8915  # linux/sockios.h: requests the IPv4 address of a network interface


def address_of(interface: str) -> str:
    """The numeric address that `interface` stands for.

    interface: name of a network interface of this machine, host name, or address; raises ValueError for anything else
    """
    if interface in (name for _, name in socket.if_nameindex()):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            request = struct.pack("256s", interface.encode()[:15])
            try:
                return socket.inet_ntoa(fcntl.ioctl(sock.fileno(), SIOCGIFADDR, request)[20:24])
            except OSError as error:
                raise ValueError(f"control.interface: {interface} has no IPv4 address") from error
    try:
        return str(socket.getaddrinfo(interface, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ValueError(
            f"control.interface: {interface!r} is not an address, a host name or a network interface of this machine"
        ) from error


def interface_of(address: str) -> str:
    """The name of this machine's network interface with this numeric address; "" if no interface has it."""
    for _, name in socket.if_nameindex():
        with suppress(ValueError):  # the interface has no IPv4 address
            if address_of(name) == address:
                return name
    return ""


def listening(port: int) -> socket.socket:
    """A socket that listens on all addresses of this machine, including IPv6 if the machine supports it. Raises OSError
    if the port is in use."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    return socket.create_server(("", port), backlog=128)
