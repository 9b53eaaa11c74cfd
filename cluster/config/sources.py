"""Where settings come from: defaults < file < environment < flags (or keywords)."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import yaml
from pydantic import ValidationError

from cluster.config.args import EngineArgs
from cluster.config.other_engines import refuse_foreign
from cluster.config.serve_args import ServeArgs
from cluster.config.setting import PREFIX, declared, flag_name
from kernels_integration.errors import ConfigError, kind_of, shown

OTHER_VARIABLES = {
    "LATENTRAY_API_KEY": "the key that `status` and `generate` send where --api-key is not given",
    "LATENTRAY_CONFIG": "the YAML file of settings that is read where --config is not given",
    "LATENTRAY_SERVER": "the server (HOST:PORT) that `status` and `generate` ask where --server is not given",
}
"""Variables that are no settings of an engine, and what they mean."""

MAX_FILE_BYTES = 2**20
"""Of a config file: some 40 settings, one a line."""
MAX_FILE_VALUES = 10_000

Args = TypeVar("Args", bound=EngineArgs)
Args_co = TypeVar("Args_co", bound=EngineArgs, covariant=True)
Spelling = Literal["flag", "keyword"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Generic[Args_co]):
    """Validated settings, and for each field the words for where its value came from."""

    args: Args_co
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Values of one source. `names` holds each field as that source spells it."""

    values: Mapping[str, Any]
    names: Mapping[str, str]
    origin: str

    def where(self, field: str) -> str:
        return f"{self.origin} {self.names[field]}"


def nearest(word: str, words: object) -> str:
    """ "; did you mean X?" for the most similar legal word, else nothing."""
    close = get_close_matches(word, list(words), n=1)  # type: ignore[call-overload]
    return f"; did you mean {close[0]}?" if close else ""


def load_settings(
    cls: type[Args],
    given: Mapping[str, Any] | None = None,
    *,
    spelling: Spelling = "keyword",
    config_file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings[Args]:
    """Settings of `cls` from all sources. `given` holds what was set by flags or keywords.

    environ defaults to the process's; config_file to its LATENTRAY_CONFIG. A file or an environment
    may also hold settings of the server that `cls` does not have.
    Errors: ConfigError naming the setting as its source spells it; unknown names suggest the nearest.
    """
    environ = os.environ if environ is None else environ
    config_file = config_file or environ.get("LATENTRAY_CONFIG")
    layers = [_environment_layer(environ), _given_layer(cls, given or {}, spelling)]
    if config_file:
        layers.insert(0, _file_layer(Path(config_file)))
    values: dict[str, Any] = {}
    sources: dict[str, _Layer] = {}
    for layer in map(_with_one_speculative_spelling, layers):
        for field in layer.values.keys() & cls.model_fields.keys():
            values[field], sources[field] = layer.values[field], layer
    try:
        args = cls(**values)
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        raise _illegal(cls, sources[field], field, values[field]) from error
    origins = {f: sources[f].where(f) if f in sources else "default" for f in cls.model_fields}
    return Settings(args=args, origins=origins)


def _given_layer(cls: type[EngineArgs], given: Mapping[str, Any], spelling: Spelling) -> _Layer:
    """Flags that were not set are None; a keyword of None means the default as well."""
    for name in given.keys() - cls.model_fields.keys():
        refuse_foreign(name, as_keyword=True)
        raise ConfigError(
            f"unknown keyword {name}{nearest(name, cls.model_fields)} "
            f"(legal keywords: {', '.join(cls.model_fields)})"
        )
    values = {name: value for name, value in given.items() if value is not None}
    names = {name: flag_name(name) if spelling == "flag" else name for name in values}
    return _Layer(values=values, names=names, origin=spelling)


def _environment_layer(environ: Mapping[str, str]) -> _Layer:
    legal = {setting.variable: name for name, setting in declared(ServeArgs).items()}
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in environ.items():
        if not name.startswith(PREFIX) or name in OTHER_VARIABLES:
            continue
        if name not in legal:
            refuse_foreign(name.removeprefix(PREFIX).lower())
            raise ConfigError(
                f"unknown environment variable {name}{nearest(name, legal)} "
                f"(unset it, or use {PREFIX} and the name of a flag)"
            )
        values[legal[name]] = value
        names[legal[name]] = name
    return _Layer(values=values, names=names, origin="environment")


def _file_layer(path: Path) -> _Layer:
    try:
        with path.open("rb") as file:  # a pipe will do; /dev/zero has no end
            written = file.read(MAX_FILE_BYTES + 1)
        if len(written) > MAX_FILE_BYTES:
            raise ConfigError(
                f"config file {path} has more than {MAX_FILE_BYTES} bytes; pass settings, one a line"
            )
        content = yaml.safe_load(written.decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}; pass a YAML file") from error
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # such as a date without its month, deep nests
        raise ConfigError(f"config file {path} is no YAML: {error}; pass settings, one a line") from error
    if _is_longer(content, MAX_FILE_VALUES):  # a few aliases (*a) make as many as one likes
        raise ConfigError(f"config file {path} holds more than {MAX_FILE_VALUES} values; leave out aliases")
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"config file {path} holds {kind_of(content)}; it must hold settings, "
            "one a line, such as tensor-parallel-size: 2"
        )
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for key, value in content.items():
        field = str(key).replace("-", "_")
        if field not in ServeArgs.model_fields:
            refuse_foreign(field)
            legal = [setting.key for setting in declared(ServeArgs).values()]
            raise ConfigError(
                f"config file {path}: unknown setting {key}{nearest(field.replace('_', '-'), legal)} "
                f"(legal settings: {', '.join(legal)})"
            )
        if field in values:
            raise ConfigError(f"config file {path}: {names[field]} and {key} are the same setting; keep one")
        if value is not None:
            values[field] = value
            names[field] = str(key)
    return _Layer(values=values, names=names, origin=f"file {path}:")


def _is_longer(content: object, most: int) -> bool:
    """Whether nested lists and mappings hold more values than `most`, or themselves."""
    pending, count = [content], 0
    while pending and count <= most:
        node = pending.pop()
        count += 1
        if isinstance(node, dict):
            pending += [*node.keys(), *node.values()]
        elif isinstance(node, list | tuple | set):
            pending += node
    return count > most


def _with_one_speculative_spelling(layer: _Layer) -> _Layer:
    """Turn speculative_config into num_speculative_tokens, so that a later source overrides either."""
    if "speculative_config" not in layer.values:
        return layer
    field, value = "speculative_config", layer.values["speculative_config"]
    try:
        parsed = EngineArgs(speculative_config=value)
    except ValidationError as error:
        raise _illegal(EngineArgs, layer, field, value) from error
    number, table = parsed.num_speculative_tokens, parsed.num_speculative_tokens_per_batch_size
    other = layer.values.get("num_speculative_tokens", number)
    if str(other) != str(number):
        raise ConfigError(
            f"{layer.where(field)} says {number} tokens and {layer.names['num_speculative_tokens']} says "
            f"{other}; they are one setting: pass one of them"
        )
    values = {name: value for name, value in layer.values.items() if name != field}
    replacing: dict[str, Any] = {"num_speculative_tokens": number}
    if table is not None:
        replacing["num_speculative_tokens_per_batch_size"] = table
    return _Layer(
        values=values | replacing,
        names=dict(layer.names) | dict.fromkeys(replacing, layer.names[field]),
        origin=layer.origin,
    )


def _illegal(cls: type[EngineArgs], layer: _Layer, field: str, value: object) -> ConfigError:
    name = layer.names[field] if layer.origin in ("flag", "keyword") else layer.where(field)
    rule = declared(cls)[field].rule
    return ConfigError(f"{name} is {shown(value)}; it must be {rule}{_written_out(value, rule)}")


def _written_out(value: object, rule: str) -> str:
    """A hint for 32k, which other engines take for 32000 or 32768."""
    match = re.fullmatch(r"(\d{1,9})([kKmM])", str(value))
    if match is None or not rule.startswith("a whole number"):
        return ""
    number, power = int(match[1]), "KM".index(match[2].upper()) + 1
    return f": write {number * 1000**power} or {number * 1024**power}"
