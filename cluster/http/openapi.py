"""What the server serves, as an OpenAPI document: GET /openapi.json."""

from collections.abc import Iterable
from functools import cache
from typing import Any

from cluster import __version__
from cluster.openai.schemas import answer_schemas, request_schemas

_STATUSES = {
    400: "a value that cannot be; `param` says where",
    404: "another model than the one that is served",
    408: "the body has not come in time",
    409: "a request of this X-Request-Id is running",
    413: "a body above --max-message-size",
    415: "a Content-Type that is not application/json",
    429: "too much at once",
    503: "nothing is served now",
    504: "X-Request-Timeout has passed",
}
_POSTS = {
    "/v1/chat/completions": ("ChatBody", "Chat", "The answer to a chat"),
    "/v1/completions": ("CompletionsBody", "Completion", "Completions of prompts"),
    "/v1/responses": ("ResponsesBody", "Response", "The answer to a conversation"),
    "/tokenize": ("TokenizeBody", "Tokens", "The token ids of a prompt or a chat"),
    "/detokenize": ("DetokenizeBody", "Prompt", "The text of token ids"),
}
_GETS = {
    "/v1/models": ("Models", "The models that are served", ()),
    "/v1/models/{model}": ("Model", "One of them", (404,)),
    "/health": ("Status", "Whether a token can be produced", (503,)),
    "/ready": ("Status", "The same", (503,)),
    "/version": ("Version", "The version", ()),
    "/status.json": ("Deployment", "Groups, nodes and the last failures", ()),
}

_REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "pattern": "^[!-~]{1,256}$"},
}


@cache
def openapi_document(model: str) -> dict[str, Any]:
    """The document of a server of this model."""
    paths: dict[str, Any] = {}
    for path, (body, answer, summary) in _POSTS.items():
        content = _json(answer)
        if path.startswith("/v1/"):
            content["text/event-stream"] = {}
        paths[path] = {
            "post": {
                "summary": summary,
                "description": "X-Request-Timeout: the number of seconds that the client will wait.",
                "parameters": [_REQUEST_ID] if path.startswith("/v1/") else [],
                "requestBody": {"required": True, "content": _json(body)},
                "responses": {"200": {"description": summary, "content": content}} | _errors(_STATUSES),
            }
        }
    for path, (answer, summary, errors) in _GETS.items():
        found = {"200": {"description": summary, "content": _json(answer)}}
        if 503 in errors:
            found["503"] = {"description": _STATUSES[503], "content": _json(answer)}
        paths[path] = {
            "get": {"summary": summary, "responses": found | _errors(e for e in errors if e != 503)}
        }
    named = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    paths["/v1/models/{model}"]["get"]["parameters"] = [named]
    metrics = {"description": "Prometheus' text", "content": {"text/plain": {"schema": {"type": "string"}}}}
    page = {"description": "A page for people", "content": {"text/html": {"schema": {"type": "string"}}}}
    paths["/status"] = {"get": {"summary": "/status.json as a page", "responses": {"200": page}}}
    paths["/metrics"] = {"get": {"summary": "Metrics", "responses": {"200": metrics}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "latentray", "version": __version__},
        "paths": paths,
        "components": {"schemas": request_schemas(model) | answer_schemas()},
    }


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _errors(statuses: Iterable[int]) -> dict[str, Any]:
    return {str(s): {"description": _STATUSES[s], "content": _json("Error")} for s in statuses}
