"""Which TCP ports of this machine are listened on, where, and by which process (Linux)."""

import contextlib
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class Listener:
    host: str
    port: int
    pid: int
    """0: of another user."""


def listeners() -> set[Listener]:
    owners = _owners()
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN:
                host, port = fields[1].split(":")
                found.add(Listener(_address(host), int(port, 16), owners.get(fields[9], 0)))
    return found


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]


def descendants(pid: int) -> set[int]:
    """All processes that come from it, and it."""
    parents = {}
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parents[int(process)] = int(
                Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1]
            )
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _address(hexadecimal: str) -> str:
    words = [hexadecimal[i : i + 8] for i in range(0, len(hexadecimal), 8)]
    packed = b"".join(struct.pack("=I", int(word, 16)) for word in words)
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    address = ipaddress.ip_address(socket.inet_ntop(family, packed))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def _owners() -> dict[str, int]:
    """Processes by the inode of each of their sockets."""
    found = {}
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for descriptor in os.scandir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(descriptor.path)
                    if target.startswith("socket:["):
                        found[target[8:-1]] = int(process)
    return found
