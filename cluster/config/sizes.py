"""Byte sizes as people write them."""

import re

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MAX_SIZE = 2**63
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE)
SIZE_PATTERN = r"^\s*[0-9]+(\.[0-9]+)?\s*[KMGTkmgt]?(i?[Bb])?\s*$"
"""Of a size that is text, in the dialect of JSON schemas."""


def parse_size(value: object) -> int:
    """Bytes of 536870912, "512M", "0.5 GiB"; a suffix counts in powers of 1024.

    Errors: ValueError when it is no size of at least one byte.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("not a size")
    match = _SIZE.fullmatch(str(value))
    if match is not None and "." in match[1] and not match[2]:
        match = None  # half a byte: 0.9 is meant as a share, which no size is
    size = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    if not 1 <= round(min(size, _MAX_SIZE)) < _MAX_SIZE:
        raise ValueError("not a size")
    return round(size)


def format_size(num_bytes: int) -> str:
    """The size in the largest unit that leaves at least one: "512.0 MiB"."""
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{num_bytes} B" if units[0] == "B" else f"{size:.1f} {units[0]}"
