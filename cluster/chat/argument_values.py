"""Values of arguments that models write without quotes: what is text, and what is JSON."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

Properties = Mapping[str, Any]
"""JSON schemas by the names of parameters."""

_NAMES = {str: "string", bool: "boolean", dict: "object", list: "array", type(None): "null"}


def is_text_alone(schema: object) -> bool:
    """Whether every legal value is a text."""
    return _types(schema) == {"string"}


def choices(schema: object) -> list[str]:
    """The texts of which a value must be one; [] where it may be others too."""
    if not isinstance(schema, Mapping):
        return []
    found = [schema["const"]] if "const" in schema else schema.get("enum")
    return [value for value in found if isinstance(value, str)] if isinstance(found, list) else []


def json_of_choice(text: str, schema: object) -> str | None:
    """The JSON text of the choice that was written as this text, white space around it left out; None for
    none of them."""
    legal = choices(schema)
    found = text if text in legal else text.strip()
    return json.dumps(found, ensure_ascii=False) if found in legal else None


def json_of(text: str, schema: object) -> str:
    """The JSON text of the value that was written as this text.

    It is its own JSON where it is any, but for what looks like JSON of a type that the schema does not allow
    while it allows texts.
    """
    types = _types(schema)
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if types is not None and "string" in types and not _names(value) & (types - {"string"}):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def _types(schema: object) -> set[str] | None:
    """The names of the types that a schema allows; None: it does not say."""
    if not isinstance(schema, Mapping):
        return None
    if "type" in schema:
        given = schema["type"]
        given = [given] if isinstance(given, str) else given
        return {t for t in given if isinstance(t, str)} if isinstance(given, list) else None
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            return set[str]().union(*map(_names, values))
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            each = [_types(one) for one in schema[name]]
            known = [types for types in each if types is not None]
            return set[str]().union(*known) if len(known) == len(each) else None
    return None


def _names(value: object) -> set[str]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_whole = isinstance(value, int) or value.is_integer()
        return {"integer", "number"} if is_whole else {"number"}
    return {_NAMES[type(value)]}


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
