"""The tables of parameters against the proto itself: nothing is ignored in silence."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from actors.sampling_params import SamplingParams
from actors.structured_outputs import StructuredOutputs
from cluster.client.wire import generate_request
from cluster.gateway import parameters
from kernels_integration.errors import InvalidRequestError


def fields(message: Any) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields}


def test_every_field_of_the_proto_is_served_refused_or_has_no_effect():
    refused = {row.field for row in parameters.UNSERVED_PARAMETERS}
    served = parameters.SERVED_PARAMETERS | parameters.CONSTRAINT_FIELDS.keys()
    assert not refused & served
    assert not (refused | served) & parameters.INEFFECTIVE_PARAMETERS.keys()
    assert refused | served | parameters.INEFFECTIVE_PARAMETERS.keys() == fields(pb.SamplingParams)
    inputs = {row.field for row in parameters.UNSERVED_INPUTS}
    assert not inputs & parameters.SERVED_INPUTS
    assert inputs | parameters.SERVED_INPUTS == fields(pb.GenerateRequest)


@pytest.mark.parametrize(
    "params",
    [
        {"truncate_prompt_tokens": -1},
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(params):
    [name] = params
    with pytest.raises(InvalidRequestError) as caught:
        parameters.sampling_params(pb.SamplingParams(**params))
    assert caught.value.field == name
    assert name in str(caught.value)
    assert "supported: " in str(caught.value)


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 2.5},
        {"presence_penalty": -2.5},
        {"repetition_penalty": -1},
        {"repetition_penalty": float("nan")},
        {"n": 129},
        {"logit_bias": {5: 101.0}},
        {"prompt_logprobs": -2},
        {"logprobs": -2},
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused_by_name(params):
    [name] = params
    with pytest.raises(InvalidRequestError, match="it must be") as caught:
        parameters.sampling_params(pb.SamplingParams(**params))
    assert caught.value.field == name


def test_the_cases_above_cover_the_table():
    mark = test_what_is_not_served_is_refused_by_name.pytestmark[0]
    tried = {name for params in mark.args[1] for name in params}
    assert tried == {row.field for row in parameters.UNSERVED_PARAMETERS}


@pytest.mark.parametrize(
    "given_input",
    [
        {"kv_transfer_params": pb.KvTransferParams()},
        {"kv_transfer_params_json": "{}"},
        {"mm_inputs": pb.MultimodalInputs()},
        {"extra_mm_inputs": [pb.MultimodalInputs()]},
        {"media_refs": pb.MediaRefs()},
        {"data_parallel_rank": 1},
        {"data_parallel_rank": -1},
    ],
    ids=str,
)
def test_inputs_that_are_not_served_are_refused_by_name(given_input):
    with pytest.raises(InvalidRequestError) as caught:
        parameters.prompt(pb.GenerateRequest(text="x", **given_input))
    assert caught.value.field in given_input


def test_neutral_values_of_what_is_not_served_pass():
    neutral = pb.SamplingParams(
        frequency_penalty=0,
        presence_penalty=0,
        repetition_penalty=1,
        min_tokens=0,
        n=1,
        include_stop_str_in_output=False,
        spaces_between_special_tokens=True,
        grammar_from_first_token=True,
        logprobs=0,
    )
    assert parameters.sampling_params(neutral).logprobs == 0
    request = pb.GenerateRequest(text="x", data_parallel_rank=0)
    assert parameters.prompt(request) == "x"


def test_presence_rules():
    unset = parameters.sampling_params(pb.SamplingParams())
    assert unset == SamplingParams(temperature=1.0, max_tokens=None, skip_special_tokens=False)
    greedy = parameters.sampling_params(pb.SamplingParams(temperature=0, top_p=0, top_k=0, seed=0))
    assert (greedy.temperature, greedy.top_p, greedy.top_k, greedy.seed) == (0.0, 1.0, 0, 0)


def test_original_text_is_never_used():
    tokenized = pb.TokenizedInput(input_ids=[1, 2], original_text="something else")
    assert list(parameters.prompt(pb.GenerateRequest(tokenized=tokenized))) == [1, 2]


@given(st.decimals(min_value=0, max_value=100, places=4))
def test_a_decimal_survives_the_wire_s_float32(value):
    message = pb.SamplingParams(temperature=float(value))
    assert math.isclose(message.temperature, value, rel_tol=1e-6)
    assert parameters.sampling_params(message).temperature == float(value)


@pytest.mark.parametrize(
    ("field", "entries"),
    [
        ("stop_token_ids", [1] * 4_000_000),
        ("stop", ["a"] * 1_000_000),
        ("logit_bias", dict.fromkeys(range(200_000), 1.0)),
    ],
    ids=["stop_token_ids", "stop", "logit_bias"],
)
def test_a_list_without_end_is_refused_by_its_length(field, entries):
    """Before its entries become Python's: that alone would take as long as reading the message."""
    message = pb.SamplingParams(**{field: entries})
    with pytest.raises(
        InvalidRequestError, match=rf"{field} holds {len(entries)} entries; it must be"
    ) as caught:
        parameters.sampling_params(message)
    assert len(str(caught.value)) < 300


def test_every_constraint_of_the_oneof_is_read():
    oneof = pb.SamplingParams.DESCRIPTOR.oneofs_by_name["constraint"]
    assert {field.name for field in oneof.fields} == parameters.CONSTRAINT_FIELDS.keys()
    schema = '{"type":"integer"}'
    for message, kind, text in [
        ({"json_schema": '{ "type": "integer" }'}, "json", schema),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"structural_tag": '{"type":"structural_tag"}'}, "structural_tag", '{"type":"structural_tag"}'),
        ({"json_object": True}, "json_object", ""),
        ({"choice": pb.ChoiceConstraint(choices=["a", "é"])}, "choice", '["a","é"]'),
    ]:
        params = parameters.sampling_params(pb.SamplingParams(**message))
        assert params.structured_outputs == StructuredOutputs(kind, text)
        again = parameters.sampling_params(generate_request("r", [1], params, stream=False).sampling_params)
        assert again == params
    assert parameters.sampling_params(pb.SamplingParams(json_object=False)).structured_outputs is None


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"json_schema": "x" * 1_000_000}, "json of 1000000 characters, which may have 131072"),
        ({"json_schema": "{"}, "json that is not JSON"),
        ({"json_schema": "[" * 100_000}, "json that is not JSON"),
        ({"json_schema": '{"not":' * 80 + "{}" + "}" * 80}, "json with more than 64 objects and lists"),
        ({"json_schema": "3"}, "json that is no JSON object"),
        ({"regex": ""}, "regex that is no text with characters"),
        ({"choice": pb.ChoiceConstraint()}, "choice that is no list of texts"),
        (
            {"choice": pb.ChoiceConstraint(choices=["abc"] * 100_000)},
            "choice of 100000 texts, which may have",
        ),
    ],
    ids=str,
)
def test_a_constraint_that_is_none_is_refused_in_few_words(message, words):
    with pytest.raises(InvalidRequestError, match=f"^structured_outputs holds (a )?{words}") as caught:
        parameters.sampling_params(pb.SamplingParams(**message))
    assert caught.value.field == "structured_outputs"
    assert len(str(caught.value)) < 400
