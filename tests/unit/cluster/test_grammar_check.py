"""Which constraints are refused, by which words; and what compiles for ever ends nobody else."""

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from actors.sampling_params import SamplingParams
from actors.structured_outputs import KINDS, StructuredOutputs
from cluster.frontend import grammar_check
from cluster.frontend.front_end import ModelFrontend
from cluster.frontend.grammar_check import GrammarCheck
from cluster.frontend.json_schema import passed_over
from kernels_integration.errors import InvalidRequestError
from tests.support.groups import TINY_DSA

needs_xgrammar = pytest.mark.skipif(
    importlib.util.find_spec("xgrammar") is None, reason="xgrammar is not installed"
)


@pytest.fixture(scope="module")
def check() -> Iterator[GrammarCheck]:
    found = GrammarCheck(TINY_DSA, 6144)
    yield found
    found.close()


def tagged(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


def nested(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "array", "items": schema}}}


@needs_xgrammar
@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({"json": {"type": "strin"}}, 'Unsupported type "strin"'),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 2}}, "minimum greater than maximum"),
        ({"json": {"$ref": "#/definitions/x"}}, "Cannot find field 'definitions'"),
        ({"json": {"$ref": "http://x/y"}}, "URI should either be '#' or start with '#/'"),
        ({"grammar": "root ::= root"}, "no text is of this form"),
        ({"json": {"type": "number", "multipleOf": 0.5}}, "multipleOf is not supported for type:number"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf with overlapping"),
        (
            {"json": nested({"type": "array", "items": {}, "uniqueItems": True})},
            "uniqueItems is not enforced",
        ),
        ({"regex": "a(b"}, "position 4: The parenthesis is not closed"),
        ({"regex": "(?<=a)b"}, "Lookbehind is not supported"),
        # found in the EBNF that is made of it, and told at the place in the regex
        ({"regex": "xya{5,2}"}, "the regex 'xya{5,2}': min repeat greater than max repeat at position 5"),
        ({"regex": "b[z-a]"}, "the regex 'b[z-a]': bad character range z-a at position 3"),
        ({"regex": "*a"}, "the regex '*a': nothing to repeat at position 1"),
        (
            {"json": nested({"type": "string", "pattern": "ab[z-a]"})},
            "the regex 'ab[z-a]': bad character range",
        ),
        (
            {"json": {"type": "object", "patternProperties": {"a": {}, "b{5,2}": {}}}},
            "the regex 'b{5,2}': min repeat greater",
        ),
        ({"structural_tag": tagged({"type": "regex", "pattern": "*a"})}, "the regex '*a': nothing to repeat"),
        ({"grammar": "root ::= foo"}, 'Rule "foo" is not defined'),
        ({"grammar": 'start ::= "a"'}, 'root rule with name "root" is not found'),
        ({"structural_tag": {"type": "tag"}}, "Invalid structural tag"),
    ],
    ids=str,
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(
    check: GrammarCheck, constraint: dict[str, Any], words: str
) -> None:
    asked = StructuredOutputs.of(**constraint)
    for _ in range(2):  # the second time from memory
        with pytest.raises(
            InvalidRequestError, match=r"^structured_outputs holds a .* cannot be enforced"
        ) as caught:
            check.require_enforceable(asked)
        assert words in str(caught.value)
        assert caught.value.field == "structured_outputs"


@pytest.mark.slow
@needs_xgrammar
def test_what_is_too_slow_or_too_large_to_compile_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "TRIAL_CPU_S", 0.3)
    monkeypatch.setattr(grammar_check, "MAX_COMPILED_BYTES", 100_000)
    narrow = GrammarCheck(TINY_DSA, 6144)
    many = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(400)}}
    for constraint, words in [
        ({"json": {"enum": [f"w{i * i}" for i in range(5000)]}}, r"it has \d+ bytes, which may be 100000"),
        ({"regex": "a+"}, None),
        (
            {"json": many | {"minProperties": 150, "maxProperties": 300}},
            r"takes more than 0.3 s of CPU time to compile",
        ),
    ]:
        refused = pytest.raises(InvalidRequestError, match=words) if words else contextlib.nullcontext()
        with refused:
            narrow.require_enforceable(StructuredOutputs.of(**constraint))
    narrow.close()


@needs_xgrammar
@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({"regex": "(.?){4000}"}, "a token of it takes"),
        ({"grammar": 'root ::= root root root | root root | [a-z ] | ""'}, "takes"),
        # masks that allow what the parse refuses
        ({"regex": "[一-龥 ]{1,200}x"}, "at odds with its parse"),
        ({"json": {"type": "string", "pattern": "^[一-龥]{1,200}$"}}, "at odds with its parse"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_a_shard_could_not_follow_in_time_is_refused(
    check: GrammarCheck, constraint: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        check.require_enforceable(StructuredOutputs.of(**constraint))


HARMLESS: dict[str, dict[str, Any]] = {
    "long strings": {"json": {"type": "string", "minLength": 1_000_000}},
    "many names": {"json": nested({"properties": {f"p{i}": {"type": "string"} for i in range(1000)}})},
    "many values": {"json": {"enum": [f"v{i}" for i in range(9000)]}},
    "a schema of itself": {
        "json": {
            "$defs": {
                "a": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}}, {"type": "integer"}]}
            },
            "$ref": "#/$defs/a",
        }
    },
    "counted repeats": {"regex": "(a?){400}a{400}"},
    "names of all letters": {
        "json": {"type": "object", "properties": {f"é{chr(0x4E00 + i)}": {} for i in range(300)}}
    },
    "patterns of names": {
        "json": {"type": "object", "patternProperties": {f"^a{i}.*b.*c$": {} for i in range(50)}}
    },
}


@needs_xgrammar
@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_large_and_can_be_followed_is_taken(check: GrammarCheck, name: str) -> None:
    check.require_enforceable(StructuredOutputs.of(**HARMLESS[name]))


@needs_xgrammar
@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"type": "array", "minItems": 3, "maxItems": 2},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"enum": []},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
    ],
    ids=str,
)
def test_what_no_text_satisfies_is_refused(check: GrammarCheck, schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be enforced"):
        check.require_enforceable(StructuredOutputs.of(json=schema))


@pytest.mark.slow
@needs_xgrammar
def test_a_process_that_was_killed_is_replaced(check: GrammarCheck) -> None:
    check.require_enforceable(StructuredOutputs.of(regex="a+"))
    child = check._process._child
    assert child is not None
    child.kill()
    child.wait()
    check.require_enforceable(StructuredOutputs.of(regex="b+"))


def test_without_xgrammar_the_request_is_refused_with_the_command(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequestError, match=r"pip install 'latentray\[grammar\]'"):
        check.require_enforceable(StructuredOutputs.of(regex="a+"))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {}}, "not is not enforced"),
        ({"type": "number", "minimum": 1e-9, "maximum": 2e-9}, "minimum 1e-09 has more than 6 decimals"),
        ({"type": "number", "exclusiveMaximum": 1.0000001}, "exclusiveMaximum 1.0000001 has more than 6"),
        ({"type": "string", "pattern": "a" * 32769}, "a pattern of 32769 characters, which may have 32768"),
        ({"const": 2**64 - 1}, "the whole number 18446744073709551615 has more than 64 bits"),
        ({"enum": [3, -(2**70)]}, "has more than 64 bits; write it as a string"),
        ({"if": {}, "then": {}}, "if is not enforced"),
        ({"type": "array", "contains": {}}, "contains is not enforced"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired is not enforced"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "allOf of 2 schemas"),
        ({"$ref": "#/$defs/a", "maxLength": 3}, "maxLength beside $ref"),
        (
            {"anyOf": [{"type": "integer"}], "type": "object", "required": ["a"]},
            "required, type beside anyOf",
        ),
        ({"enum": [1, "a"], "type": "string"}, "type beside enum"),
        ({"const": True, "type": "integer"}, "type beside const"),
        ({"anyOf": []}, "anyOf is empty"),
        ({"type": "integer", "oneOf": []}, "oneOf is empty"),
        ({"minimum": 3}, "minimum without type"),
        ({"required": ["a"]}, "required without type"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "pattern beside minLength, maxLength"),
        ({"type": "string", "format": "date", "minLength": 3}, "format beside minLength"),
        ({"type": "string", "pattern": '^"$'}, "a pattern with a quote"),
        ({"type": "string", "pattern": r"^a\\b$"}, "a pattern with a quote, a backslash"),
        ({"type": "string", "pattern": r"^[\n]$"}, "a pattern with a quote, a backslash or a control"),
        ({"type": "object", "patternProperties": {r"\x22": {}}}, "a pattern with a quote"),
        ({"type": "object", "required": ["a"]}, "required names 'a'"),
        ({"properties": {"a": {}}, "propertyNames": {"maxLength": 1}}, "propertyNames beside properties"),
        ({"properties": {"a": {}}, "patternProperties": {"b": {}}}, "patternProperties beside properties"),
        ({"type": "object", "additionalProperties": {}, "minProperties": 2}, "minProperties beside"),
        ({"type": "object", "patternProperties": {"b": {}}, "minProperties": 2}, "minProperties beside"),
    ],
    ids=str,
)
def test_demands_that_would_be_passed_over_are_found_wherever_they_stand(
    schema: dict[str, Any], words: str
) -> None:
    for at, whole in [
        ("/", schema),
        ("/properties/a/items", nested(schema)),
        ("/$defs/not", {"$defs": {"not": schema}}),
        ("/anyOf/1", {"anyOf": [{}, schema]}),
        ("/additionalProperties", {"type": "object", "additionalProperties": schema}),
    ]:
        problem = passed_over(whole)
        assert problem is not None
        assert words in problem
        assert problem.endswith(f"(at {at})")


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"title": "T", "description": "d", "default": 3, "examples": [1], "$schema": "s", "$id": "i"},
        {"type": "string", "enum": ["a", "b"]},
        {"type": ["string", "null"], "enum": ["a", None]},
        {"const": 3, "type": "integer"},
        {"const": 2**63 - 1},
        {"type": "number", "minimum": 0.000001, "maximum": 2.5},
        {"type": "string", "format": "date-time"},
        {"type": "string", "pattern": r"^\d{3}-[^x]\w+\s.$"},
        {"type": "object", "propertyNames": {"maxLength": 3}, "additionalProperties": {"type": "null"}},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False, "minProperties": 1},
        {"type": "integer", "minLength": 3},
        {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "T"},
        # as the SMG router demands calls of tools
        {"type": "object", "anyOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}]},
        {"type": "object", "oneOf": [{"type": "object"}, {"type": "object", "properties": {}}]},
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "null"}}},
        {"properties": {"not": {"type": "null"}, "if": {"type": "null"}}, "required": ["not"]},
        {"type": "array", "uniqueItems": False, "prefixItems": [{"type": "null"}], "items": False},
    ],
    ids=str,
)
def test_what_asks_for_nothing_more_passes(schema: Any) -> None:
    assert passed_over(schema) is None


@pytest.fixture(scope="module")
def frontend() -> ModelFrontend:
    return ModelFrontend.from_pretrained(TINY_DSA, served_model_name="tiny-dsa", max_model_len=64)


def test_a_grammar_needs_an_end_of_text(frontend: ModelFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(structured_outputs={"regex": "a+"}, allowed_token_ids=(5, 6))
    with pytest.raises(InvalidRequestError, match="allowed_token_ids holds none of the tokens") as caught:
        frontend.build_request("r", [3], params)
    assert caught.value.field == "allowed_token_ids"
    monkeypatch.setattr(frontend, "eos_token_ids", ())
    with pytest.raises(InvalidRequestError, match="the checkpoint names none"):
        frontend.build_request("r", [3], SamplingParams(structured_outputs={"regex": "a+"}))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("json", "structured_outputs is 'json'; it must be an object with exactly one of"),
        ({}, "holds 0 constraints; it must be"),
        ({"json": {}, "regex": "a"}, r"holds 2 constraints \(json, regex\)"),
        ({"jsn": {}}, "holds 'jsn', which is no kind of constraint"),
        ({"json_object": "yes"}, "json_object that is neither true nor false"),
        ({"json": {"a": {1}}}, "json that is no JSON"),
        ({"json": {"a": float("nan")}}, "json that is no JSON"),
        ({"json": {"const": "\ud800"}}, "half of a surrogate pair"),
        ({"regex": 3}, "regex that is no text"),
        ({"choice": ["a", ""]}, "choice with an entry that is no text"),
        ({"choice": {"a": 1}}, "choice that is no list"),
    ],
    ids=str,
)
def test_a_value_that_is_no_constraint_is_refused(value: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        SamplingParams(structured_outputs=value)
    assert caught.value.field == "structured_outputs"


@pytest.mark.slow
def test_spellings_of_one_constraint_are_equal() -> None:
    schema = {"type": "integer"}
    spellings = [{"json": schema}, {"json": '{ "type" : "integer" }'}, {"json": schema, "regex": None}]
    assert len({SamplingParams(structured_outputs=s).structured_outputs for s in spellings}) == 1
    assert {StructuredOutputs.of(**{kind: _example(kind)}).kind for kind in KINDS} == set(KINDS)


def _example(kind: str) -> Any:
    return {"json": {}, "json_object": True, "choice": ["a"], "structural_tag": {}}.get(kind, "a")
