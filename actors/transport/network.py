"""Addresses of this node: a free port, the interface that carries an address."""

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


def free_port(host: str) -> int:
    """A TCP port of `host` that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def interface_of(ip: str) -> str | None:
    """The name of the network interface with this IPv4 address (Linux); None when there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == ip:
                return name
    return None


def host_and_port(address: str) -> tuple[str, int]:
    """("::1", 80) of "[::1]:80"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
