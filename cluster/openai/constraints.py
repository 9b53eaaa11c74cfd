"""What OpenAI's `response_format` and vLLM's `guided_*` ask of the text, as StructuredOutputs."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from actors.sampling_params import PARAMETERS
from actors.structured_outputs import KINDS, ConstraintKind, StructuredOutputs
from kernels_integration.errors import InvalidRequestError, UnknownParameterError, shortened, shown

GUIDED: Mapping[str, ConstraintKind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older spellings."""
_TYPES = ("text", "json_object", "json_schema", "structural_tag")


class Constraint(NamedTuple):
    """What a text must look like, and the path of the field that says so."""

    asked: StructuredOutputs
    field: str


def constraint_of(given: Mapping[str, Any]) -> Constraint | None:
    """given: response_format, structured_outputs and GUIDED of a body, None where it has none.

    Errors: InvalidRequestError naming the field; also where two of them ask.
    """
    found: dict[str, Constraint] = {}
    for field, value in given.items():
        if value is None:
            continue
        path = field
        if field == "response_format":
            constraint = _of_response_format(value)
            path = f"{field}.json_schema.schema" if value["type"] == "json_schema" else field
        elif field == "structured_outputs":
            constraint = _of_structured_outputs(field, value)
            path = f"{field}.{constraint.kind}"
        else:
            constraint = _checked(field, GUIDED[field], value)
        if constraint is not None:
            found[field] = Constraint(constraint, path)
    if len(found) > 1:
        raise InvalidRequestError(
            f"{' and '.join(found)} both say what the text must look like; send one of them",
            field=list(found)[1],
        )
    return next(iter(found.values()), None)


def _of_structured_outputs(field: str, value: Any) -> StructuredOutputs:
    """Errors: InvalidRequestError naming the kind where one is at fault."""
    try:
        found: StructuredOutputs = PARAMETERS[field].checked(value)
    except InvalidRequestError as error:
        given = [name for name, one in value.items() if one is not None] if isinstance(value, Mapping) else []
        unknown = [name for name in given if name not in KINDS]
        if unknown:
            raise UnknownParameterError(str(error), field=f"{field}.{shortened(unknown[0])}") from error
        if len(given) != 1:
            raise
        raise InvalidRequestError(str(error), field=f"{field}.{given[0]}") from error
    return found


def _of_response_format(value: Any) -> StructuredOutputs | None:
    """OpenAI's object, and xgrammar's structural tags in either of vLLM's shapes."""
    field = "response_format"
    if not isinstance(value, Mapping) or value.get("type") not in _TYPES:
        raise InvalidRequestError(
            f'{field} is {shown(value)}; it must be an object whose "type" is one of {", ".join(_TYPES)}',
            field=field,
        )
    match value["type"]:
        case "text" | "json_object" as kind:
            _refuse_others(field, value, ("type",))
            return None if kind == "text" else StructuredOutputs("json_object")
        case "json_schema":
            _refuse_others(field, value, ("type", "json_schema"))
            return _of_json_schema(f"{field}.json_schema", value.get("json_schema"))
    if "structures" in value:
        _refuse_others(field, value, ("type", "structures", "triggers"))
        value = _of_structures(field, value)
    _refuse_others(field, value, ("type", "format"))
    return _checked(field, "structural_tag", value)


def _of_json_schema(field: str, value: Any) -> StructuredOutputs:
    """strict is a promise that is kept either way: the text always holds to the schema."""
    if not isinstance(value, Mapping) or not isinstance(value.get("schema"), Mapping):
        raise InvalidRequestError(
            f'{field} is {shown(value)}; it must be an object with "name" and "schema", a JSON Schema',
            field=field,
        )
    _refuse_others(field, value, ("name", "schema", "strict", "description"))
    for name, kinds, rule in (
        ("name", str, "text"),
        ("description", str | None, "text"),
        ("strict", bool | None, "true or false"),
    ):
        if not isinstance(value.get(name), kinds):
            raise InvalidRequestError(
                f"{field}.{name} is {shown(value.get(name))}; it must be {rule}", field=f"{field}.{name}"
            )
    return _checked(f"{field}.schema", "json", value["schema"])


def _of_structures(field: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """The older shape: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}."""
    structures = value["structures"]
    if not isinstance(structures, list) or not all(
        isinstance(one, Mapping) and one.keys() == {"begin", "schema", "end"} for one in structures
    ):
        raise InvalidRequestError(
            f'{field}.structures is {shown(structures)}; it must be a list of objects with "begin", "schema" '
            'and "end"',
            field=f"{field}.structures",
        )
    tags = [
        {
            "type": "tag",
            "begin": one["begin"],
            "content": {"type": "json_schema", "json_schema": one["schema"]},
            "end": one["end"],
        }
        for one in structures
    ]
    tagged = {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}
    return {"type": "structural_tag", "format": tagged}


def _refuse_others(field: str, value: Mapping[str, Any], legal: Iterable[str]) -> None:
    for name in value:
        if name not in legal:
            raise UnknownParameterError(
                f"{field} holds {shown(name)}; it may hold {', '.join(legal)}",
                field=f"{field}.{str(name)[:64]}",
            )


def _checked(field: str, kind: ConstraintKind, value: Any) -> StructuredOutputs:
    try:
        return StructuredOutputs.of(**{kind: value})
    except ValueError as error:
        raise InvalidRequestError(f"{field} holds {error}", field=field) from None
