"""The effective settings, for people and programs."""

import dataclasses
from typing import Any

from actors.config import GroupConfig
from cluster.config.args import EngineArgs
from cluster.config.resolve import DEFAULT_KV_CACHE_MEMORY_BYTES
from cluster.config.sources import Settings


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveSetting:
    """A setting's final value and where it came from."""

    name: str
    value: Any
    origin: str


def effective_settings(settings: Settings[EngineArgs], group: GroupConfig) -> list[EffectiveSetting]:
    """Every setting with its final value: one that `resolve` filled in is "derived"."""
    final = dataclasses.asdict(group)
    shown = []
    for field in type(settings.args).model_fields:
        if field == "speculative_config":  # shown as num_speculative_tokens
            continue
        given = getattr(settings.args, field)
        value = given if field == "trace" else final.get(field, given)  # a group knows only whether
        origin = settings.origins[field]
        if field == "kv_cache_memory_bytes" and settings.args.num_kv_blocks is None:
            value = given or DEFAULT_KV_CACHE_MEMORY_BYTES
        elif given in (None, "auto") and value not in (given, ()):
            origin = f"derived from {given}" if origin != "default" else "derived"
        shown.append(EffectiveSetting(name=field, value=value, origin=origin))
    return shown
