"""Which JSON Schemas xgrammar holds to the letter: what it would pass over is refused, by its place.

Annotations (title, default, examples, format beside nothing else, ...) are no demands and always pass.
Source: SchemaParser of xgrammar 0.2: of $ref, const, enum, anyOf, oneOf and allOf it looks at the first
alone, and it looks at other demands only where it knows the type.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from actors.structured_outputs import MAX_PATTERN_LENGTH

MAX_DECIMALS = 6
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
    names = node.get("propertyNames")
    if isinstance(names, Mapping):
        yield "propertyNames", {"type": "string"} | dict(names)
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
    for name in ("anyOf", "oneOf", "allOf"):
        if node.get(name) == []:
            return f"{name} is empty and would be passed over; name a schema, or leave it out"
    first = next((name for name in _ALONE if name in node), None)
    beside = sorted(name for name in node if name in _DEMANDS and name != first)
    if first is not None:
        values = [node["const"]] if first == "const" else node.get("enum")
        if first in ("const", "enum") and isinstance(values, list):
            if (problem := _problem_of_values(values)) is not None:
                return problem
            beside = [name for name in beside if name != "type" or not _all_fit(values, node["type"])]
        if first in ("anyOf", "oneOf") and _all_are(node[first], node.get("type")):
            beside = [name for name in beside if name != "type"]
        return (
            f"{', '.join(beside)} beside {first} would be passed over; move it into {first}"
            if beside
            else None
        )
    if "type" not in node and beside and not (node.keys() & (_TELL_OBJECT | _TELL_ARRAY)):
        return f"{', '.join(beside)} without type would be passed over; say the type"
    return _problem_of_text(node) or _problem_of_numbers(node) or _problem_of_names(node)


def _all_are(alternatives: Any, kind: object) -> bool:
    """Whether each of the alternatives demands this type by itself."""

    def is_one(schema: Any) -> bool:
        if not isinstance(schema, Mapping):
            return False
        return (
            schema["type"] == kind
            if "type" in schema
            else kind == "object" and bool(schema.keys() & _TELL_OBJECT)
        )

    return isinstance(alternatives, list) and all(map(is_one, alternatives))


def _problem_of_text(node: Mapping[str, Any]) -> str | None:
    patterns = [node.get("pattern"), *(node.get("patternProperties") or ())]
    if any(isinstance(pattern, str) and _needs_escape(pattern) for pattern in patterns):
        return "a pattern with a quote, a backslash or a control character is no pattern of JSON's text"
    longest = max((len(pattern) for pattern in patterns if isinstance(pattern, str)), default=0)
    if longest > MAX_PATTERN_LENGTH:
        return f"a pattern of {longest} characters, which may have {MAX_PATTERN_LENGTH}"
    if "pattern" in node and node.keys() & {"minLength", "maxLength", "format"}:
        return "pattern beside minLength, maxLength or format: one of them would be passed over"
    if "format" in node and node.keys() & {"minLength", "maxLength"}:
        return "format beside minLength or maxLength: one of them would be passed over"
    return None


def _problem_of_numbers(node: Mapping[str, Any]) -> str | None:
    """xgrammar cuts bounds to six decimals: a narrow range becomes an empty one, and so does its text."""
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        bound = node.get(name)
        if isinstance(bound, float) and math.isfinite(bound) and round(bound, MAX_DECIMALS) != bound:
            return f"{name} {bound!r} has more than {MAX_DECIMALS} decimals, which would be cut; round it"
    return None


def _problem_of_values(values: Sequence[Any]) -> str | None:
    """Whole numbers that xgrammar would write as the nearest of another number."""
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**63:
            return f"the whole number {value} has more than 64 bits; write it as a string"
    return None


def _problem_of_names(node: Mapping[str, Any]) -> str | None:
    """Of an object's keys: xgrammar writes declared ones once and in their order, and any others behind."""
    declared = node.get("properties", {})
    required = node.get("required", [])
    if isinstance(declared, Mapping) and isinstance(required, list):
        missing = [name for name in required if name not in declared]
        if missing:
            return f"required names {missing[0]!r}, which properties does not declare; declare it"
    for name in ("patternProperties", "propertyNames"):
        if declared and name in node:
            return f"{name} beside properties would not hold for these; use one of them"
    others = (node.get(name, False) for name in ("additionalProperties", "unevaluatedProperties"))
    has_others = any(other is not False for other in others) or node.keys() & {
        "patternProperties",
        "propertyNames",
    }
    if node.get("minProperties") and has_others:
        return (
            "minProperties beside names that are not declared would count one twice; write them as properties"
        )
    return None


def _needs_escape(pattern: str) -> bool:
    """Whether what it matches may hold a character that JSON writes by an escape: xgrammar would not."""
    return any(
        found[2] is not None or found[1] in '\\nrtfvxuc0"'
        for found in re.finditer(r'\\(.)|(["\x00-\x1f])', pattern, re.DOTALL)
    )


def _all_fit(values: list[Any], types: Any) -> bool:
    names = types if isinstance(types, list) else [types]
    legal = {kind for name in names for kind in _TYPES.get(name if isinstance(name, str) else "", ())}
    return all(type(value) in legal for value in values)
