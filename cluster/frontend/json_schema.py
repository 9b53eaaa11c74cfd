"""Which JSON Schemas xgrammar holds to the letter: what it would pass over is refused, by its place.

Annotations (title, default, examples, format beside nothing else, ...) are no demands and always pass.
Source: SchemaParser of xgrammar 0.2: of $ref, const, enum, anyOf, oneOf and allOf it looks at the first
alone, and it looks at other demands only where it knows the type.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_PASSED_OVER = (
    "not", "if", "dependentRequired", "dependentSchemas", "dependencies", "contains", "minContains",
    "maxContains", "additionalItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_OF_STRINGS = frozenset({"minLength", "maxLength", "pattern"})
_OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_OF_OBJECTS = frozenset(
    {
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties", "unevaluatedProperties",
    }
)  # fmt: skip
_OF_ARRAYS = frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"})
_TELL_OBJECT = frozenset({"properties", "additionalProperties", "unevaluatedProperties"})
_TELL_ARRAY = frozenset({"items", "prefixItems", "unevaluatedItems"})
_DEMANDS = _OF_STRINGS | _OF_NUMBERS | _OF_OBJECTS | _OF_ARRAYS | frozenset(_ALONE) | {"type"}

_OF_ONE_SCHEMA = (
    "items",
    "additionalProperties",
    "unevaluatedProperties",
    "unevaluatedItems",
    "propertyNames",
)
_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


def passed_over(schema: Any) -> str | None:
    """Why the schema cannot be held to; None if it can, as far as its words tell."""
    pending: list[tuple[str, Any]] = [("", schema)]
    while pending:
        path, node = pending.pop()
        if not isinstance(node, Mapping):
            continue  # true, false, or what xgrammar itself refuses
        problem = _problem(node)
        if problem is not None:
            return f"{problem} (at {path or '/'})"
        pending += [(f"{path}/{name}", child) for name, child in _subschemas(node)]
    return None


def _subschemas(node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _OF_ONE_SCHEMA:
        if name in node:
            yield name, node[name]
    for name in _OF_SCHEMAS:
        if isinstance(node.get(name), list):
            yield from ((f"{name}/{i}", child) for i, child in enumerate(node[name]))
    for name in _OF_NAMED_SCHEMAS:
        if isinstance(node.get(name), Mapping):
            yield from ((f"{name}/{key}", child) for key, child in node[name].items())


def _problem(node: Mapping[str, Any]) -> str | None:
    for name in _PASSED_OVER:
        if name in node:
            return f"{name} is not enforced; write the schema without it"
    if node.get("uniqueItems"):
        return "uniqueItems is not enforced; write the schema without it"
    if isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1:
        return f"allOf of {len(node['allOf'])} schemas is not enforced; write them as one"
    first = next((name for name in _ALONE if name in node), None)
    beside = sorted(name for name in node if name in _DEMANDS and name != first)
    if first is not None:
        values = [node["const"]] if first == "const" else node.get("enum")
        if first in ("const", "enum") and isinstance(values, list):
            beside = [name for name in beside if name != "type" or not _all_fit(values, node["type"])]
        return (
            f"{', '.join(beside)} beside {first} would be passed over; move it into {first}"
            if beside
            else None
        )
    if "type" not in node and beside and not (node.keys() & (_TELL_OBJECT | _TELL_ARRAY)):
        return f"{', '.join(beside)} without type would be passed over; say the type"
    if "pattern" in node and node.keys() & {"minLength", "maxLength", "format"}:
        return "pattern beside minLength, maxLength or format: one of them would be passed over"
    if "format" in node and node.keys() & {"minLength", "maxLength"}:
        return "format beside minLength or maxLength: one of them would be passed over"
    return None


def _all_fit(values: list[Any], types: Any) -> bool:
    names = types if isinstance(types, list) else [types]
    legal = {kind for name in names for kind in _TYPES.get(name if isinstance(name, str) else "", ())}
    return all(type(value) in legal for value in values)
