"""The compiled kernels as Python calls them: pointers and numbers, signatures as in kernels.c."""

import ctypes
import functools
from collections.abc import Callable
from types import SimpleNamespace

from kernels_integration.native.build import BuildError, library_path, openmp_path

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_NO_MEMORY, _OUT_OF_RANGE = -1, -2

_SIGNATURES: dict[str, tuple[object, str]] = {
    "lanes": (_I, ""),
    "tile_columns": (_I, ""),
    "linear": (ctypes.c_int, "piiiipiipii"),
    "head_product": (ctypes.c_int, "piiiiiipiipiii"),
    "rms_norm": (None, "ppiiiiipfp"),
    "rotate": (None, "piiiiiippii"),
    "write_latents": (ctypes.c_int, "piiiipfpppipii"),
    "write_index_keys": (ctypes.c_int, "piiiippfpppipii"),
    "swiglu": (None, "piiip"),
    "route": (ctypes.c_int, "piiiippiiiiifpp"),
    "experts": (ctypes.c_int, "piiiippippiiiipii"),
    "attend": (ctypes.c_int, "piiiiiiippipiipipfi"),
    "select_topk": (ctypes.c_int, "pipiipiipiiippippi"),
    "gumbel_max": (ctypes.c_int, "piiippifppp"),
}
"""Result, and arguments by letter: pointer, int64, float."""
_TYPES = {"p": _P, "i": _I, "f": _F}


@functools.cache
def library() -> SimpleNamespace:
    """The functions of kernels.c by name. Errors: BuildError."""
    path = library_path()
    try:
        if (openmp := openmp_path()) is not None:
            ctypes.CDLL(str(openmp), mode=ctypes.RTLD_GLOBAL)
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"its kernels do not load: {error}") from error
    functions = {}
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype = result
        function.argtypes = [_TYPES[letter] for letter in arguments]
        functions[name] = function
    return SimpleNamespace(**functions)


def loaded() -> SimpleNamespace | None:
    """The functions, where this process has loaded them; builds nothing."""
    return library() if library.cache_info().currsize else None


def is_available() -> bool:
    try:
        library()
    except BuildError:
        return False
    return True


def checked(call: Callable[..., int], *arguments: object) -> None:
    """Errors: MemoryError; IndexError for a slot outside the cache."""
    result = call(*arguments)
    if result == _OUT_OF_RANGE:
        raise IndexError("a slot lies outside the cache")
    if result == _NO_MEMORY:
        raise MemoryError("no memory for what a kernel keeps during a call")
