"""Our error bodies beside those that OpenAI's API has sent, as people have posted them."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import OUTCOMES, from_code, outcome
from cluster.openai.error_body import error_body

RECORDED = json.loads((Path(__file__).parent / "recorded_openai_errors.json").read_text())
OF_THEIR_NAME = {
    "context_length_exceeded",
    "invalid_api_key",
    "model_not_found",
    "rate_limit_exceeded",
    "unknown_parameter",
}


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: str(recorded["code"]))
def test_an_error_has_the_recorded_shape(recorded: dict[str, Any]) -> None:
    theirs = recorded["body"]["error"]
    error = from_code(recorded["code"], "why", field="model")
    ours = error_body(error)
    assert outcome(error).http_status == recorded["status"]
    assert ours.keys() == recorded["body"].keys()
    assert list(ours["error"]) == list(theirs)
    assert ours["error"]["type"] == theirs["type"]
    if theirs["param"] is not None:
        assert ours["error"]["param"] == "model"
    if theirs["code"] in OF_THEIR_NAME:
        assert ours["error"]["code"] == theirs["code"]
    else:
        assert isinstance(ours["error"]["code"], str)


@pytest.mark.parametrize("code", OUTCOMES)
def test_every_code_has_the_envelope(code: str) -> None:
    error = from_code(code, "why", field="a.b")
    [(name, told)] = error_body(error).items()
    assert (name, list(told)) == ("error", ["message", "type", "param", "code"])
    kinds = {"requests": (429,), "invalid_request_error": range(400, 500), "server_error": range(500, 600)}
    assert outcome(error).http_status in kinds[told["type"]]
    assert told["message"] == "why"
    assert told["param"] in (None, "a.b")
