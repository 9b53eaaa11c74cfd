"""JSON schemas of bodies and answers. Values of sampling parameters come from their declarations."""

from collections.abc import Mapping
from typing import Any

from actors.parameter_kinds import Kind, Number, Switch, Texts, TokenIds, TokenValues, WholeNumber
from actors.sampling_params import PARAMETERS
from actors.structured_outputs import OneConstraint
from cluster.chat.messages import ROLES
from cluster.frontend.front_end import MAX_CACHE_SALT
from cluster.openai.bodies import NO_EFFECT
from cluster.openai.chat_body import ChatBody
from cluster.openai.completions_body import MAX_PROMPTS, CompletionsBody
from cluster.openai.constraints import GUIDED
from cluster.openai.responses_body import ResponsesBody
from cluster.openai.sampling_body import OPENAI_PARAMETERS, SamplingBody
from cluster.openai.tools import MAX_TOOLS, NAME_PATTERN

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
_SWITCH: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}


def or_null(schema: Schema) -> Schema:
    """null means not given."""
    return {"anyOf": [schema, {"type": "null"}]}


def listed(items: Schema, **rules: Any) -> Schema:
    return {"type": "array", "items": items, **rules}


def record(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    """An object that may hold more."""
    return {"type": "object", "required": [*required], "properties": {**required, **optional}}


def request_schemas(model_name: str) -> dict[str, Schema]:
    """Of the bodies, by their names. model_name: of the model that is served."""
    model: Schema = {"const": model_name}
    ids = listed({"type": "integer", "minimum": 0}, minItems=1)
    prompt = {"type": "string", "minLength": 1}
    switches = {name: or_null(_SWITCH) for name in ("add_special_tokens", "return_token_strs")}
    return {
        "ChatBody": _body(
            ChatBody,
            model,
            {"messages": listed(_MESSAGE, minItems=1)},
            max_completion_tokens=_of_kind(PARAMETERS["max_tokens"].kind),
            logprobs=_SWITCH,
            top_logprobs={"type": "integer", "minimum": -1},
            add_generation_prompt=_SWITCH,
            continue_final_message=_SWITCH,
            chat_template_kwargs=_OBJECT,
            tools=listed(_TOOL, maxItems=MAX_TOOLS),
            tool_choice=_TOOL_CHOICE,
            parallel_tool_calls=_SWITCH,
        ),
        "CompletionsBody": _body(
            CompletionsBody,
            model,
            {
                "prompt": {
                    "anyOf": [prompt, ids, listed({"anyOf": [prompt, ids]}, minItems=1, maxItems=MAX_PROMPTS)]
                }
            },
            logprobs={"type": "integer", "minimum": -1},
            max_tokens={"type": "integer", "minimum": 0},
            echo=_SWITCH,
        ),
        "ResponsesBody": _body(
            ResponsesBody,
            model,
            {"input": {"anyOf": [TEXT, listed(_OBJECT, minItems=1)]}},
            instructions=TEXT,
            max_output_tokens=_of_kind(PARAMETERS["max_tokens"].kind),
            text=_OBJECT,
            tools=listed(_OBJECT, maxItems=MAX_TOOLS),
            tool_choice=_TOOL_CHOICE,
            parallel_tool_calls=_SWITCH,
            chat_template_kwargs=_OBJECT,
        ),
        "TokenizeBody": {
            "oneOf": [
                _closed({"prompt": prompt}, model=or_null(model), **switches),
                _closed(
                    {"messages": listed(_MESSAGE, minItems=1)},
                    model=or_null(model),
                    **switches,
                    tools=or_null(listed(_TOOL, maxItems=MAX_TOOLS)),
                    add_generation_prompt=or_null(_SWITCH),
                    continue_final_message=or_null(_SWITCH),
                    chat_template_kwargs=or_null(_OBJECT),
                ),
            ]
        },
        "DetokenizeBody": _closed({"tokens": ids}, model=or_null(model)),
    }


def answer_schemas() -> dict[str, Schema]:
    """Of the answers, by their names."""
    usage = record(
        {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
        prompt_tokens_details=record({"cached_tokens": COUNT}),
        completion_tokens_details=record({"reasoning_tokens": COUNT}),
    )
    call = record(
        {"id": TEXT, "type": {"const": "function"}, "function": record({"name": TEXT, "arguments": TEXT})}
    )
    message = record(
        {"role": {"const": "assistant"}, "content": or_null(TEXT)},
        reasoning_content=TEXT,
        tool_calls=listed(call),
    )
    choice = {
        "index": COUNT,
        "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
        "logprobs": or_null(_OBJECT),
    }
    head = {"id": TEXT, "created": COUNT, "model": TEXT, "usage": usage}
    model = record({"id": TEXT, "object": {"const": "model"}, "created": COUNT, "owned_by": TEXT})
    error = {"message": TEXT, "type": TEXT, "param": or_null(TEXT), "code": or_null(TEXT)}
    return {
        "Chat": record(
            head
            | {
                "object": {"const": "chat.completion"},
                "choices": listed(record(choice | {"message": message})),
            }
        ),
        "Completion": record(
            head
            | {"object": {"const": "text_completion"}, "choices": listed(record(choice | {"text": TEXT}))}
        ),
        "Response": record(
            {
                "id": TEXT,
                "object": {"const": "response"},
                "created_at": COUNT,
                "status": {"enum": ["completed", "incomplete"]},
                "output": listed(
                    record(
                        {
                            "id": TEXT,
                            "type": {"enum": ["message", "reasoning", "function_call"]},
                            "status": TEXT,
                        }
                    )
                ),
                "usage": _OBJECT,
            }
        ),
        "Model": model,
        "Models": record({"object": {"const": "list"}, "data": listed(model)}),
        "Tokens": record(
            {"count": COUNT, "max_model_len": COUNT, "tokens": listed(COUNT)},
            token_strs=or_null(listed(TEXT)),
        ),
        "Prompt": record({"prompt": TEXT}),
        "Status": record({"status": TEXT}),
        "Version": record({"version": TEXT}),
        "Deployment": record(
            {
                "time": {"type": "number"},
                "server": {"type": "object"},
                "nodes": {"type": "object", "additionalProperties": TEXT},
                "groups": listed({"type": "object", "required": ["number", "healthy", "stats"]}),
                "failures": listed({"type": "object", "required": ["time_s", "code", "request_id"]}),
            }
        ),
        "Error": record({"error": record(error)}),
    }


def _body(cls: type[SamplingBody], model: Schema, required: Mapping[str, Schema], **own: Schema) -> Schema:
    shared: dict[str, Schema] = {
        "model": model,
        "priority": {"type": "integer"},
        "cache_salt": {"type": "string", "minLength": 1, "maxLength": MAX_CACHE_SALT},
        "response_format": _OBJECT,
        "stream": _SWITCH,
        "stream_options": _closed(
            {}, include_usage=or_null(_SWITCH), include_obfuscation={"enum": [False, None]}
        ),
    }
    shared |= {name: _of_kind(PARAMETERS[name].kind) for name in sorted(OPENAI_PARAMETERS)}
    shared |= {name: {} for name in (*sorted(NO_EFFECT), *GUIDED)}
    taken = {name: schema for name, schema in (shared | own).items() if name not in cls.not_taken}
    return _closed(required, **{name: or_null(schema) if schema else {} for name, schema in taken.items()})


def _closed(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    return record(required, **optional) | {"additionalProperties": False}


def _of_kind(kind: Kind) -> Schema:
    """Of a sampling parameter's values, as far as a schema can say it."""
    match kind:
        case Number():
            low = "exclusiveMinimum" if kind.above_low else "minimum"
            return {"type": "number", low: kind.low, "maximum": kind.high}
        case WholeNumber():
            return {"type": "integer", "minimum": kind.low, "maximum": kind.high}
        case OneConstraint():
            return _OBJECT
        case Switch():
            return _SWITCH
        case Texts():
            text = {"type": "string", "minLength": 1, "maxLength": kind.max_length}
            return {"anyOf": [text, listed(text, maxItems=kind.max_count)]}
        case TokenIds():
            return listed(COUNT, minItems=kind.min_count, maxItems=kind.max_count)
        case TokenValues():
            value = {"type": "number", "minimum": kind.low, "maximum": kind.high}
            return {
                "type": "object",
                "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,18})$"},
                "additionalProperties": value,
                "maxProperties": kind.max_count,
            }
    return {}


_PART = record({"type": {"const": "text"}, "text": TEXT})
_MESSAGE = record(
    {"role": {"enum": [*ROLES]}},
    content={"anyOf": [TEXT, {"type": "null"}, listed(_PART)]},
    tool_calls=or_null(listed(_OBJECT)),
)
_TOOL = record(
    {
        "type": {"const": "function"},
        "function": record(
            {"name": {"type": "string", "pattern": f"^{NAME_PATTERN}$"}}, parameters=or_null(_OBJECT)
        ),
    }
)
_TOOL_CHOICE: Schema = {"anyOf": [{"enum": ["auto", "none", "required"]}, _OBJECT]}
