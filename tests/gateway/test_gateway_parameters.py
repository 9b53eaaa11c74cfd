"""The tables of parameters against the proto itself: nothing is ignored in silence."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from actors.sampling_params import SamplingParams
from cluster.gateway import parameters
from kernels_integration.errors import InvalidRequestError


def fields(message: Any) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields}


def test_every_field_of_the_proto_is_served_refused_or_has_no_effect():
    refused = {row.field for row in parameters.UNSERVED_PARAMETERS}
    served = parameters.SERVED_PARAMETERS
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
        {"json_schema": "{}"},
        {"regex": "a+"},
        {"grammar": "root ::= 'a'"},
        {"structural_tag": "{}"},
        {"json_object": False},
        {"choice": pb.ChoiceConstraint(choices=["a", "b"])},
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


def test_what_is_refused_is_shown_by_its_beginning():
    with pytest.raises(InvalidRequestError, match=r"json_schema is x{80}\.\.\., which") as caught:
        parameters.sampling_params(pb.SamplingParams(json_schema="x" * 1_000_000))
    assert len(str(caught.value)) < 300
    large = pb.ChoiceConstraint(choices=["abc"] * 100_000)
    with pytest.raises(InvalidRequestError, match="choice is a message of 500000 bytes"):
        parameters.sampling_params(pb.SamplingParams(choice=large))
