"""Random JSON Schemas of what is enforced, small enough that a model's answer ends."""

import random
from typing import Any

_NAMES = ["id", "name", "a b", "größe", "x-1", "items", "type", "not", "$ref", 'q"', "\\", "日本"]
_PATTERNS = [
    "^[a-f]{2,4}$",
    "^\\d{3}-\\d{2}$",
    "^(red|green|blue)$",
    "^[A-Z][a-z]{0,5}$",
    "^a?b{1,2}c?$",
    "^[^x]{1,3}$",
]
_FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email"]


def random_schema(seed: int) -> dict[str, Any]:
    """The same for the same seed."""
    maker = _Maker(random.Random(seed))
    schema = maker.object(2) if seed % 3 else maker.any(2)
    if maker.uses_defs:
        schema["$defs"] = {"leaf": maker.leaf(), "pair": maker.array(0), "tree": _TREE}
    return schema


_TREE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer", "minimum": 0, "maximum": 9},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]},
    },
    "required": ["value", "next"],
    "additionalProperties": False,
}


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.uses_defs = False

    def any(self, depth: int) -> dict[str, Any]:
        kinds = [self.leaf, self.leaf, self.choice]
        if depth:
            kinds += [
                lambda: self.object(depth - 1),
                lambda: self.array(depth - 1),
                lambda: self.union(depth - 1),
            ]
            kinds += [self.reference]
        schema = self._rng.choice(kinds)()
        if self._rng.random() < 0.2:
            schema |= {"title": "T", "description": "d", "default": None}
        return schema

    def leaf(self) -> dict[str, Any]:
        return self._rng.choice([self.string, self.integer, self.number, self.boolean, self.nullable])()

    def string(self) -> dict[str, Any]:
        match self._rng.randrange(4):
            case 0:
                return {"type": "string", "pattern": self._rng.choice(_PATTERNS)}
            case 1:
                return {"type": "string", "format": self._rng.choice(_FORMATS)}
        low = self._rng.randrange(4)
        return {"type": "string", "minLength": low, "maxLength": low + self._rng.randrange(8)}

    def integer(self) -> dict[str, Any]:
        low = self._rng.randint(-2000, 2000)
        high = low + 2 + self._rng.randrange(999)
        match self._rng.randrange(12):
            case 0:  # of these models write digits to their limit
                return {"type": "integer", "multipleOf": self._rng.randint(2, 12)}
            case 1 | 2 | 3:
                return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high}
            case 4 | 5:
                return {
                    "type": "integer",
                    "minimum": 0,
                    "maximum": 100,
                    "multipleOf": self._rng.randint(2, 12),
                }
        return {"type": "integer", "minimum": low, "maximum": high}

    def number(self) -> dict[str, Any]:
        low = self._rng.randint(-50, 50) / 4
        match self._rng.randrange(2):
            case 0:
                return {"type": "number", "minimum": low, "maximum": low + self._rng.randrange(1, 80) / 8}
        return {
            "type": "number",
            "exclusiveMinimum": low,
            "exclusiveMaximum": low + self._rng.randrange(1, 9),
        }

    def boolean(self) -> dict[str, Any]:
        return {"type": "boolean"}

    def nullable(self) -> dict[str, Any]:
        return {"type": ["null", "boolean"]}

    def choice(self) -> dict[str, Any]:
        values = [1, -2.5, "a", "é\n", 'q"', None, True, {"k": [1, "x"]}, []]
        if self._rng.random() < 0.3:
            return {"const": self._rng.choice(values)}
        return {"enum": self._rng.sample(values, self._rng.randint(1, 4))}

    def union(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.any(depth) for _ in range(self._rng.randint(2, 3))]}

    def reference(self) -> dict[str, Any]:
        self.uses_defs = True
        return {"$ref": f"#/$defs/{self._rng.choice(['leaf', 'pair', 'tree'])}"}

    def array(self, depth: int) -> dict[str, Any]:
        low = self._rng.randrange(3)
        schema = {
            "type": "array",
            "items": self.any(depth),
            "minItems": low,
            "maxItems": low + self._rng.randrange(3),
        }
        if self._rng.random() < 0.3:
            schema["prefixItems"] = [self.any(0)]
            schema["maxItems"] = max(schema["maxItems"], 1)
        return schema

    def object(self, depth: int) -> dict[str, Any]:
        names = self._rng.sample(_NAMES, self._rng.randint(1, 5))
        required = self._rng.sample(names, self._rng.randint(0, len(names)))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self.any(depth) for name in names},
            "required": required,
        }
        match self._rng.randrange(5):
            case 0:
                schema["additionalProperties"] = False
            case 1:
                schema["additionalProperties"] = self.leaf()
                schema["maxProperties"] = len(names) + 1
            case 2:
                schema["minProperties"] = self._rng.randint(len(required), len(names))
                schema["maxProperties"] = len(names)
            case 3 if not required:
                if self._rng.random() < 0.5:
                    names_of = {"propertyNames": {"enum": ["a", "bc"]}, "maxProperties": 2}
                    return {"type": "object", "additionalProperties": self.leaf()} | names_of
                return {
                    "type": "object",
                    "patternProperties": {"^[a-c]{1,3}$": self.leaf()},
                    "additionalProperties": False,
                    "maxProperties": 3,
                }
        return schema
