"""How a setting is declared, and what flags, environment, files, messages and documents read off it.

A declaration is a pydantic field: its type says which values are legal, its `Setting` the rest.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

PREFIX = "LATENTRAY_"
"""Of environment variables."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Of a type: what a legal value is, as the end of "it must be ...", and a value in a usage line."""

    words: str
    metavar: str = "N"


@dataclass(frozen=True, slots=True)
class Setting:
    """Of a field: how it is shown to people."""

    help: str
    group: str
    rule: str | None = None
    """As Rule.words; None: the type's own."""
    metavar: str | None = None
    """None: the type's own."""
    short: str | None = None
    """Second spelling of the flag, such as -tp."""
    shown_default: str | None = None
    """Words for the default, where its value says little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """One setting, as people and programs see it."""

    name: str
    help: str
    rule: str
    group: str
    metavar: str
    short: str | None
    default: str
    """In words."""
    is_switch: bool
    """Whether its flag has no value: --NAME or --no-NAME."""

    @property
    def flag(self) -> str:
        return flag_name(self.name)

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def key(self) -> str:
        """In a YAML file."""
        return self.name.replace("_", "-")


class SettingsModel(BaseModel):
    """Fields that each have a Setting."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """The help text is the field's description in the JSON schema."""
        for info in cls.model_fields.values():
            info.description = _setting_of(info).help
        cls.model_rebuild(force=True)


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


@cache
def declared(cls: type[SettingsModel]) -> Mapping[str, Declared]:
    """The settings of `cls` by name, in the order of their declaration."""
    return {name: _declared(name, info) for name, info in cls.model_fields.items()}


def _declared(name: str, info: FieldInfo) -> Declared:
    setting = _setting_of(info)
    rule = _rule_of(info)
    words, metavar = setting.rule or rule.words, setting.metavar or rule.metavar
    if not words:
        raise TypeError(
            f"setting {name} says nowhere what is legal: give its type a Rule, or its Setting a rule"
        )
    return Declared(
        name=name,
        help=setting.help,
        rule=words,
        group=setting.group,
        metavar=metavar,
        short=setting.short,
        default=setting.shown_default or _default_in_words(info.default),
        is_switch=info.annotation is bool,
    )


def _setting_of(info: FieldInfo) -> Setting:
    return next(item for item in info.metadata if isinstance(item, Setting))


def _rule_of(info: FieldInfo) -> Rule:
    for item in (*info.metadata, *_within(info.annotation)):
        if isinstance(item, Rule):
            return item
        if get_origin(item) is Literal:
            values = [str(value) for value in get_args(item)]
            return Rule(f"{', '.join(values[:-1])} or {values[-1]}", "{" + ",".join(values) + "}")
    return Rule("true or false" if info.annotation is bool else "")


def _within(annotation: Any) -> Iterator[Any]:
    """A type with what is attached to it; of a union, each of its types."""
    yield annotation
    yield from getattr(annotation, "__metadata__", ())
    if get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _within(part)


def _default_in_words(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)
