"""Which backends there are, which can do what is asked, and which one is taken. Imports them only when asked.

No torch at import: settings are checked and help is printed without it.
"""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kernels_integration.errors import ConfigError

if TYPE_CHECKING:
    from kernels_integration.backend import Backend

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a group asks of its backend."""

    device: str
    """cpu or cuda (which is also what ROCm's torch calls its devices)."""
    dtype: str
    kv_cache_dtype: str
    indexer_kv_dtype: str
    num_heads: int
    """Query heads of one attention call: a rank's, times the DCP ranks."""
    latent_rank: int
    rope_dim: int
    index_dim: int
    """0 for a model without an indexer."""
    needs_lse: bool
    """Under DCP partial results are merged by it."""
    deterministic: bool = False
    """A request's stream has the same bits in every batch (contracts/device_step.md 5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend takes. None: anything."""

    dtypes: frozenset[str]
    kv_cache_dtypes: frozenset[str]
    indexer_kv_dtypes: frozenset[str]
    head_counts: frozenset[int] | None = None
    latent_sizes: frozenset[tuple[int, int]] | None = None
    """(latent rank, rotary dims)"""
    returns_lse: bool = True
    is_deterministic: bool = False
    """Sums of a row can be made independent of the rows beside it."""

    def refusal(self, needs: Needs) -> str | None:
        """The first thing needed that is not taken, with what is; None: all is taken."""
        choices: tuple[tuple[str, object, frozenset[str] | frozenset[int] | None], ...] = (
            ("dtype", needs.dtype, self.dtypes),
            ("kv-cache-dtype", needs.kv_cache_dtype, self.kv_cache_dtypes),
            ("indexer-kv-dtype", needs.indexer_kv_dtype, self.indexer_kv_dtypes if needs.index_dim else None),
            ("number of query heads of a shard", needs.num_heads, self.head_counts),
        )
        for what, value, taken in choices:
            if taken is not None and value not in taken:
                return f"it does not take {what} {value}, only {', '.join(map(str, sorted(taken)))}"
        size = (needs.latent_rank, needs.rope_dim)
        if self.latent_sizes is not None and size not in self.latent_sizes:
            taken_sizes = ", ".join(f"{c} + {r}" for c, r in sorted(self.latent_sizes))
            return f"it does not take a latent of {size[0]} + {size[1]} values, only {taken_sizes}"
        if needs.needs_lse and not self.returns_lse:
            return "it returns no LSE, which merging the parts of DCP ranks needs"
        if needs.deterministic and not self.is_deterministic:
            return (
                "its sums depend on the batch, and deterministic was asked for; "
                "triton (on a GPU) and native (on a CPU) have others"
            )
        return None


class BackendModule(Protocol):
    """What a backend's module has."""

    def refusal(self, needs: Needs) -> str | None:
        """Why it cannot serve them on this machine, to follow "NAME cannot be used: "; None: it can."""
        ...

    def create(self, needs: Needs) -> "Backend": ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    module: str
    devices: frozenset[str]


_ENTRIES = {
    "native": _Entry(module="kernels_integration.native.backend", devices=frozenset({"cpu"})),
    "torch": _Entry(module="kernels_integration.reference.backend", devices=frozenset({"cpu", "cuda"})),
    "triton": _Entry(module="kernels_integration.triton.backend", devices=frozenset({"cuda"})),
    "aiter": _Entry(module="kernels_integration.aiter.backend", devices=frozenset({"cuda"})),
}
BACKENDS = tuple(_ENTRIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    name: str
    passed_over: tuple[tuple[str, str], ...] = ()
    """Backends that would have been taken first, each with the reason why not."""


def refusal(name: str, needs: Needs) -> str | None:
    """Why the backend cannot serve these needs on this machine, in one sentence; None: it can."""
    entry = _ENTRIES[name]
    if needs.device not in entry.devices:
        devices = " or ".join(sorted(entry.devices))
        return f"{name} cannot be used: it computes on {devices}, not on {needs.device}"
    try:
        module: BackendModule = importlib.import_module(entry.module)
        reason = module.refusal(needs)
    except ModuleNotFoundError as error:
        if error.name is not None and entry.module.startswith(error.name):
            reason = "this release has no such backend yet"
        else:
            reason = f"package {error.name} is missing"
    # A driver that does not fit, a failed compilation: a broken package can raise anything.
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
    return None if reason is None else f"{name} cannot be used: {reason}"


def choose(asked: str, needs: Needs) -> Choice:
    """The backend that serves these needs: the one asked for, or for auto the best that can.

    auto prefers native on a CPU, aiter on ROCm, triton on CUDA; torch is what always works.
    Errors: ConfigError with the reason when the one asked for cannot be used.
    """
    if asked != AUTO:
        reason = refusal(asked, needs)
        if reason is not None:
            raise ConfigError(f"attention-backend {reason}; use --attention-backend auto or torch")
        return Choice(name=asked)
    passed_over: list[tuple[str, str]] = []
    for name in _preferred(needs):
        reason = refusal(name, needs)
        if reason is None:
            return Choice(name=name, passed_over=tuple(passed_over))
        passed_over.append((name, reason))
    raise ConfigError("no backend can be used: " + "; ".join(reason for _, reason in passed_over))


def create(name: str, needs: Needs, *, check_plans: bool = False) -> "Backend":
    """The backend of that name, which `choose` gave. check_plans: with a validator around every plan."""
    module: BackendModule = importlib.import_module(_ENTRIES[name].module)
    backend = module.create(needs)
    if not check_plans:
        return backend
    wrapped: Backend = importlib.import_module("kernels_integration.checked").checked(backend)
    return wrapped


def _preferred(needs: Needs) -> tuple[str, ...]:
    if needs.device == "cpu":
        return ("torch",) if needs.dtype == "float64" else ("native", "torch")
    import torch

    return ("aiter", "torch") if torch.version.hip else ("triton", "torch")
