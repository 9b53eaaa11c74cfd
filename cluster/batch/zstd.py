"""A zstd stream as the bytes in it."""

import io
from typing import IO, Any, cast

from kernels_integration.errors import ConfigError

_READ_BYTES = 64
"""At a time: what they hold lies in memory, and zstd packs up to 32 KiB into one byte."""


def zstd_reader(file: IO[bytes], path: str) -> IO[bytes]:
    """Errors: ConfigError without zstandard; when read, OSError for what is no zstd, EOFError for a stream
    that ends too early, which zstandard's own reader takes for its end."""
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(f"--input {path} needs zstandard: pip install 'latentray[data]'") from error
    return cast("IO[bytes]", io.BufferedReader(_ZstdReader(file, zstandard), 2**20))


class _ZstdReader(io.RawIOBase):
    """One frame after another."""

    def __init__(self, file: IO[bytes], zstandard: Any) -> None:
        self._file = io.BufferedReader(cast("io.RawIOBase", file), 2**16)
        self._zstandard = zstandard
        self._frame: Any = None
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._file.read(_READ_BYTES)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            if self._frame is None:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(self._packed))
            except self._zstandard.ZstdError as error:
                raise OSError(str(error)) from error
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size
