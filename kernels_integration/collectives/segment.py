"""A segment of memory that the ranks of one node share, with a flag per rank and signs of life.

Layout: word 0 the magic number (written last), 1 size, 2 buffer bytes, 3 abort; then per rank a pair of cache
lines with its sequence number and two words that describe its last two calls; then from a page boundary two
buffers per rank, all of one parity together.
"""

import errno
import fcntl
import mmap
import os
import platform
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

from kernels_integration.errors import CollectiveError, ConfigError

_DIRECTORY = Path("/dev/shm")
_MAGIC = 0x6C61_7465_6E74_0001
_WORD = 8
_FLAG_STRIDE = 128  # two cache lines: the processor prefetches lines in pairs
_SIZE, _BUFFER_BYTES, _ABORT = 1, 2, 3
_FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux

# A waiting rank looks at the clock every _SPINS yields, for dead peers every _CHECK_INTERVAL_S, and after
# _PATIENCE_S it sleeps between looks: then nobody is about to arrive.
_SPINS = 64
_CHECK_INTERVAL_S = 0.005
_PATIENCE_S = 0.02
_NAP_S = 0.0002


def is_supported() -> bool:
    """Whether ranks on this machine can share memory: Linux on x86-64.

    A rank writes its data, then its flag, with plain stores, and reads its peers' flags, then their data,
    with plain loads. x86-64 keeps both in that order. Other architectures, Arm among them, do not, and
    Python has no fence to offer: use gloo there.
    """
    return sys.platform == "linux" and platform.machine() == "x86_64" and _DIRECTORY.is_dir()


def abort(name: str) -> None:
    """Make every rank of the set fail its present or next wait; any process of the node may call it.

    The segment has no name any more once all ranks have joined, so this leaves a marker, which the first
    rank that closes takes away, or else `remove`.
    """
    _marker(name).touch()


def remove(name: str) -> None:
    """Take away what a set left behind whose ranks were killed while they joined. Never fails."""
    for path in (_path(name), _marker(name)):
        path.unlink(missing_ok=True)


def _path(name: str) -> Path:
    return _DIRECTORY / f"latentray-{name}"


def _marker(name: str) -> Path:
    return _DIRECTORY / f"latentray-{name}.abort"


class Segment:
    """This rank's attachment to the segment `name`, which rank 0 creates and the others wait for.

    The constructor returns when every rank has joined; by then the file has no name any more, so nothing
    is left behind however the ranks end. Errors: CollectiveError when that takes more than `timeout_s`,
    ConfigError where the machine does not support it or has no room.
    """

    def __init__(self, name: str, rank: int, size: int, buffer_bytes: int, timeout_s: float) -> None:
        if not is_supported():
            raise ConfigError(
                f"shared memory between ranks needs Linux on x86-64, this is {sys.platform} on "
                f"{platform.machine()}; use gloo"
            )
        self.rank = rank
        self.size = size
        self._name = name
        self._timeout_s = timeout_s
        self._fd = self._create(buffer_bytes) if rank == 0 else self._open()
        try:
            self.memory = mmap.mmap(self._fd, 0)
            self._words = memoryview(self.memory).cast("Q")
            if rank == 0:
                self._words[_SIZE], self._words[_BUFFER_BYTES] = size, buffer_bytes
            elif self._words[_SIZE] != size:
                raise CollectiveError(
                    f"rank {rank} joins shared memory {name!r} as one of {size}, rank 0 as one of "
                    f"{self._words[_SIZE]}; start all ranks with one size"
                )
            # Held as long as the process lives: the kernel gives it back however the process ends.
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, rank)
            if rank == 0:
                self._words[0] = _MAGIC
            self.buffer_bytes: int = self._words[_BUFFER_BYTES]
            self.buffers_start = _buffers_start(size)
            self._flags = [(peer, _flag_word(peer)) for peer in range(size) if peer != rank]
            self._my_flag = _flag_word(rank)
            self.arrive(1, 0)
            self.wait(1, 0)
        except BaseException:
            self.close()
            raise
        finally:
            # Whoever comes first: all have joined, or the set will never be complete.
            _path(name).unlink(missing_ok=True)

    def arrive(self, sequence: int, call: int) -> None:
        """Tell the peers that this rank's data of step `sequence` is in place; `call` describes the call."""
        words, flag = self._words, self._my_flag
        words[flag + 1 + (sequence & 1)] = call
        words[flag] = sequence

    def wait(self, sequence: int, call: int) -> None:
        """Return when every peer has arrived at `sequence` with an equal call; fail as the class says."""
        words = self._words
        if words[_ABORT]:
            raise self._aborted()
        parity_word = 1 + (sequence & 1)
        for peer, flag in self._flags:
            if words[flag] < sequence:
                self._wait_for(peer, flag, sequence)
            if words[flag + parity_word] != call:
                self.abort()
                raise CollectiveError(
                    f"ranks {self.rank} and {peer} of {self._name!r} differ in operation, dtype or number of "
                    "elements; every rank must make equal calls"
                )

    def abort(self) -> None:
        """Fail every rank's present and later waits; any thread may call it."""
        self._words[_ABORT] = self.rank + 1

    def close(self) -> None:
        """Leave: peers that wait for this rank fail."""
        if self._fd >= 0:
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, self.rank)
            os.close(self._fd)
            self._fd = -1
            _marker(self._name).unlink(missing_ok=True)

    def _wait_for(self, peer: int, flag: int, sequence: int) -> None:
        words, sched_yield, spins = self._words, os.sched_yield, range(_SPINS)
        start = time.monotonic()
        next_check = start + _CHECK_INTERVAL_S
        while True:
            for _ in spins:
                if words[flag] >= sequence:
                    return
                sched_yield()
            if words[_ABORT]:
                raise self._aborted()
            now = time.monotonic()
            if now - start > _PATIENCE_S:
                time.sleep(_NAP_S)
            if now < next_check:
                continue
            next_check = now + _CHECK_INTERVAL_S
            if _marker(self._name).exists():
                self.abort()
                raise CollectiveError(f"shared memory {self._name!r} was aborted from outside")
            # It may have arrived and left since the last look at its flag.
            if words[flag] and self._has_left(peer) and words[flag] < sequence:
                self.abort()
                raise CollectiveError(f"rank {peer} of {self._name!r} has died or closed its collectives")
            if now - start > self._timeout_s:
                self.abort()
                raise CollectiveError(
                    f"rank {self.rank} of {self._name!r} waited {self._timeout_s} s for rank {peer}"
                )

    def _aborted(self) -> CollectiveError:
        return CollectiveError(f"rank {self._words[_ABORT] - 1} has aborted {self._name!r}")

    def _create(self, buffer_bytes: int) -> int:
        num_bytes = _buffers_start(self.size) + 2 * self.size * buffer_bytes
        try:
            fd = os.open(_path(self._name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError as error:
            raise CollectiveError(
                f"{_path(self._name)} exists: another set uses it, or was killed while it joined; "
                "every set needs a name of its own"
            ) from error
        try:
            # Takes the pages now: without room, a later write would kill the process by SIGBUS.
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            os.close(fd)
            _path(self._name).unlink()
            if error.errno != errno.ENOSPC:
                raise
            raise ConfigError(
                f"{_DIRECTORY} has no room for {num_bytes} bytes of shared memory of {self.size} ranks; "
                "enlarge it (docker: --shm-size) or use gloo"
            ) from error
        return fd

    def _open(self) -> int:
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            if _marker(self._name).exists():
                raise CollectiveError(f"shared memory {self._name!r} was aborted from outside")
            with suppress(FileNotFoundError):
                fd = os.open(_path(self._name), os.O_RDWR | os.O_CLOEXEC)
                if os.pread(fd, _WORD, 0) == _MAGIC.to_bytes(_WORD, sys.byteorder):
                    return fd
                os.close(fd)
            time.sleep(0.001)
        raise CollectiveError(
            f"rank {self.rank} waited {self._timeout_s} s for rank 0 to create shared memory {self._name!r}"
        )

    def _has_left(self, peer: int) -> bool:
        return self._lock(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, peer) == fcntl.F_UNLCK

    def _lock(self, command: int, kind: int, rank: int) -> int:
        """Set or query the file lock on byte `rank`, which that rank holds; returns the kind found."""
        answer = fcntl.fcntl(self._fd, command, _FLOCK.pack(kind, os.SEEK_SET, rank, 1, 0))
        return int(_FLOCK.unpack(answer)[0])


def _flag_word(rank: int) -> int:
    return (rank + 1) * _FLAG_STRIDE // _WORD


def _buffers_start(size: int) -> int:
    return -(-(size + 1) * _FLAG_STRIDE // mmap.PAGESIZE) * mmap.PAGESIZE
