"""The compiled kernels of this machine: built once by the compiler that is here, kept in the user's cache.

No other library is needed. Where no C compiler is, or a build fails, the torch backend computes instead.
"""

import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_SOURCES = ("vectors.h", "products.h", "attention.h", "noise.h", "kernels.c")
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-fPIC", "-shared", "-fopenmp", "-w")
_TIMEOUT_S = 120


class BuildError(RuntimeError):
    """Why there are no compiled kernels, as the end of "NAME cannot be used: "."""


@functools.cache
def library_path() -> Path:
    """The shared library, built now if it is not in the cache. Errors: BuildError."""
    compiler = _compiler()
    sources = {name: (Path(__file__).parent / name).read_bytes() for name in _SOURCES}
    command = [*compiler, *_FLAGS, *_vector_width()]
    identity = b"\0".join([" ".join(command).encode(), _version(compiler), _processor(), *sources.values()])
    path = _cache_folder() / f"kernels-{hashlib.sha256(identity).hexdigest()[:24]}.so"
    _check_owner(path.parent)
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (path.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # shards start together: one builds, the others wait
            if not path.exists():
                _compile(command, path)
    except OSError as error:
        raise BuildError(f"its kernels cannot be kept in {path.parent}: {error.strerror}") from error
    return path


def openmp_path() -> Path | None:
    """torch's own OpenMP: a second one beside it would be a second pool of threads, on the same cores."""
    return next(iter(sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))), None)


def _compile(command: list[str], path: Path) -> None:
    handle, partial = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        source = str(Path(__file__).parent / "kernels.c")
        done = subprocess.run(
            [*command, source, "-o", partial, "-lm"], capture_output=True, text=True, timeout=_TIMEOUT_S
        )
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise BuildError(f"{command[0]} cannot build its kernels: {first.strip()}")
        os.replace(partial, path)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} did not build its kernels within {_TIMEOUT_S} s") from error
    finally:
        Path(partial).unlink(missing_ok=True)


def _compiler() -> list[str]:
    asked = shlex.split(os.environ.get("CC", ""))
    for candidate in (asked, ["gcc"], ["cc"]):
        if candidate and shutil.which(candidate[0]):
            return candidate
    raise BuildError("no C compiler is on the PATH; install gcc, or name one in CC")


def _version(compiler: list[str]) -> bytes:
    try:
        return subprocess.run([*compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler[0]} does not run: {error}") from error


def _processor() -> bytes:
    """What -march=native depends on; a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return b""
    return b"\n".join(
        next((line for line in lines if line.startswith(key)), b"") for key in (b"flags", b"Features")
    )


def _vector_width() -> tuple[str, ...]:
    return ("-mprefer-vector-width=512",) if b" avx512f" in _processor() else ()


def _check_owner(folder: Path) -> None:
    """What lies there is run: nobody else may have put it there. A folder that is not there is no danger."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise BuildError(f"its kernels cannot be kept in {folder}: {error.strerror}") from error
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise BuildError(
            f"its kernels are kept in {folder}, which other users may write to; "
            f"make it yours alone (chmod 700) or name another in XDG_CACHE_HOME"
        )


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "latentray" / "native"
