"""What a completion must look like: one constraint, as plain text. Who enforces it is `actors.grammar`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from actors.parameter_kinds import is_text

ConstraintKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
KINDS: tuple[ConstraintKind, ...] = get_args(ConstraintKind)
MAX_LENGTH = 2**17
"""Characters of a constraint."""
MAX_PATTERN_LENGTH = 2**15
"""Of a regex or a grammar. Beyond some 60,000 states xgrammar's masks of one take minutes."""
MAX_DEPTH = 64
"""Objects and lists inside one another, in a JSON Schema or a structural tag."""
MAX_CHOICES = 1024


class StructuredOutputs(msgspec.Struct, frozen=True, array_like=True):
    """One constraint, under vLLM's names. Equal ones are one grammar. `of` and `SamplingParams` check it."""

    kind: ConstraintKind
    text: str = ""
    """json: a JSON Schema. json_object: empty. regex: matched as a whole. choice: a JSON list of texts.
    grammar: EBNF, which begins with the rule `root`. structural_tag: xgrammar's JSON."""

    @classmethod
    def of(cls, **given: Any) -> "StructuredOutputs":
        """Exactly one of KINDS; schemas and tags as values or as JSON text. None and False ask for nothing.

        Errors: ValueError: what it holds that it must not.
        """
        asked = {name: value for name, value in given.items() if value is not None and value is not False}
        unknown = [name for name in asked if name not in KINDS]
        if unknown:
            raise ValueError(f"{str(unknown[0])[:100]!r}, which is no kind of constraint")
        if len(asked) != 1:
            raise ValueError(f"{len(asked)} constraints{_named(asked)}")
        [(kind, value)] = asked.items()
        text = _text_of(kind, value)
        longest = MAX_PATTERN_LENGTH if kind in ("regex", "grammar") else MAX_LENGTH
        if len(text) > longest:
            raise ValueError(f"{kind} of {len(text)} characters, which may have {longest}")
        return cls(kind, text)  # type: ignore[arg-type]

    def behind(self, end: str) -> "StructuredOutputs":
        """The same behind any text up to the first `end`, such as thoughts that a prompt has opened, and a
        few spaces and newlines."""
        any_text = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end}
        space = {"type": "regex", "pattern": r"[ \n]{0,4}"}
        whole = {"type": "sequence", "elements": [any_text, space, self.as_format()]}
        return StructuredOutputs(
            "structural_tag", _dumped("behind", {"type": "structural_tag", "format": whole})
        )

    def as_format(self) -> dict[str, Any]:
        """As a part of a structural tag."""
        match self.kind:
            case "json":
                return {"type": "json_schema", "json_schema": json.loads(self.text)}
            case "json_object":
                return {"type": "json_schema", "json_schema": {"type": "object"}}
            case "regex":
                return {"type": "regex", "pattern": self.text}
            case "grammar":
                return {"type": "grammar", "grammar": self.text}
            case "choice":
                texts = json.loads(self.text)
                return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]}
        found: dict[str, Any] = json.loads(self.text).get("format", {})
        return found


@dataclass(frozen=True, slots=True)
class OneConstraint:
    """The kind of value (actors.parameter_kinds) that StructuredOutputs and its spellings are."""

    metavar: str = "JSON"

    @property
    def rule(self) -> str:
        return f"an object with exactly one of {', '.join(KINDS)}"

    def accept(self, value: Any) -> StructuredOutputs:
        if isinstance(value, StructuredOutputs):
            return value
        if not isinstance(value, Mapping):
            raise ValueError
        return StructuredOutputs.of(**{str(name): entry for name, entry in value.items()})

    def from_flag(self, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text


def _named(asked: Mapping[str, Any]) -> str:
    return f" ({', '.join(asked)})" if asked else ""


def _text_of(kind: str, value: Any) -> str:
    match kind:
        case "json_object":
            if value is not True:
                raise ValueError("json_object that is neither true nor false")
            return ""
        case "regex" | "grammar":
            if not is_text(value) or not value:
                raise ValueError(f"{kind} that is no text with characters")
            return str(value)
        case "choice":
            return _choices(value)
    return _json_text(kind, value)


def _choices(value: Any) -> str:
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__") or len(value) == 0:
        raise ValueError("choice that is no list of texts")
    if len(value) > MAX_CHOICES:
        raise ValueError(f"choice of {len(value)} texts, which may have {MAX_CHOICES}")
    texts = list(value)
    if not all(is_text(text) and text for text in texts):
        raise ValueError("choice with an entry that is no text with characters")
    return _dumped("choice", texts)


def _json_text(kind: str, value: Any) -> str:
    """A schema or a tag, in one spelling; the order of its keys is kept: it is that of the output."""
    if isinstance(value, str):
        if len(value) > MAX_LENGTH:
            raise ValueError(f"{kind} of {len(value)} characters, which may have {MAX_LENGTH}")
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{kind} that is not JSON ({error})") from None
    if not isinstance(value, Mapping) and not (kind == "json" and isinstance(value, bool)):
        raise ValueError(f"{kind} that is no JSON object")
    if _depth_exceeds(value, MAX_DEPTH):
        raise ValueError(f"{kind} with more than {MAX_DEPTH} objects and lists inside one another")
    return _dumped(kind, value)


def _dumped(kind: str, value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{kind} that is no JSON ({error})") from None
    if not is_text(text):
        raise ValueError(f"{kind} with half of a surrogate pair")
    return text


def _depth_exceeds(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [child for node in level for child in _children(node)]
        if not level:
            return False
    return True


def _children(node: Any) -> list[Any]:
    if isinstance(node, Mapping):
        return list(node.values())
    return list(node) if isinstance(node, list | tuple) else []
