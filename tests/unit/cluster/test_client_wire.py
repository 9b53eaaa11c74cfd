"""The client's requests and errors, without a server."""

import subprocess
import sys

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.sampling_params import PARAMETERS, SamplingParams, Wire
from cluster.client import wire
from cluster.errors import error_classes
from cluster.gateway import parameters
from cluster.gateway.statuses import to_status
from kernels_integration.errors import InvalidRequestError, LatentrayError, UnavailableError

STRATEGIES = {
    "temperature": st.integers(0, 1000).map(lambda n: n / 100),
    "top_k": st.sampled_from([0, 1, 50, 2**31]),
    "top_p": st.integers(1, 1000).map(lambda n: n / 1000),
    "min_p": st.integers(0, 1000).map(lambda n: n / 1000),
    "seed": st.none() | st.integers(-(2**31), 2**31 - 1),
    "max_tokens": st.none() | st.integers(1, 2**31),
    "stop": st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    "stop_token_ids": st.lists(st.integers(0, 6143), max_size=3).map(tuple),
    "ignore_eos": st.booleans(),
    "logprobs": st.none() | st.integers(-1, 20),
    "prompt_logprobs": st.none() | st.integers(-1, 20),
    "n": st.integers(1, 128),
    "presence_penalty": st.integers(-20, 20).map(lambda n: n / 10),
    "frequency_penalty": st.integers(-20, 20).map(lambda n: n / 10),
    "repetition_penalty": st.integers(1, 30).map(lambda n: n / 10),
    "logit_bias": st.none()
    | st.dictionaries(st.integers(0, 6143), st.integers(-1000, 1000).map(lambda n: n / 10), min_size=1),
    "min_tokens": st.just(0) | st.just(1),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
}
WIRED = frozenset(name for name, row in PARAMETERS.items() if row.wire in (Wire.FIELD, Wire.ZERO_IS_UNSET))


class Failure(grpc.RpcError):
    """What a stub raises."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: tuple = ()) -> None:
        self.code = lambda: code
        self.details = lambda: details
        self.trailing_metadata = lambda: trailing


@pytest.mark.slow
@given(st.builds(SamplingParams, **STRATEGIES))
def test_parameters_survive_the_wire(params):
    request = wire.generate_request("r", [1, 2], params, stream=True)
    assert parameters.sampling_params(request.sampling_params) == params


def test_every_parameter_of_the_wire_is_tried_above():
    assert STRATEGIES.keys() == WIRED


def test_a_prompt_is_text_or_ids():
    params = SamplingParams()
    assert parameters.prompt(wire.generate_request("r", "text", params, stream=True)) == "text"
    assert list(parameters.prompt(wire.generate_request("r", (1, 2), params, stream=True))) == [1, 2]
    assert list(parameters.prompt(wire.generate_request("r", [], params, stream=True))) == []


@pytest.mark.parametrize("prompt", [[-1], ["a"], [1.5], [2**32], None, 7])
def test_what_the_message_cannot_hold_is_refused(prompt):
    with pytest.raises(InvalidRequestError, match="prompt is"):
        wire.generate_request("r", prompt, SamplingParams(), stream=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 2**31),
        ("seed", -(2**31) - 1),
        ("seed", 2**64 - 1),
        ("top_k", 2**32),
        ("max_tokens", 2**32),
        ("min_tokens", 2**32),
        ("stop_token_ids", (3, 2**32)),
        ("logit_bias", {2**31: 1.0}),
        ("logprobs", 2**31),
        ("prompt_logprobs", 2**31),
    ],
)
def test_numbers_that_the_message_cannot_hold_are_refused(field, value):
    params = SamplingParams(**{"max_tokens": None, field: value})
    with pytest.raises(InvalidRequestError, match=f"{field} is .*over gRPC") as caught:
        wire.generate_request("r", [1], params, stream=True)
    assert caught.value.field == field


@pytest.mark.parametrize("params", [{"bad_words": ("x",)}, {"allowed_token_ids": (1,)}])
def test_what_the_protocol_has_no_field_for_is_refused(params):
    [name] = params
    with pytest.raises(InvalidRequestError, match="no field for") as caught:
        wire.generate_request("r", [1], SamplingParams(**params), stream=True)
    assert caught.value.field == name


def test_keywords_go_over_params():
    merged = wire.merged_params(SamplingParams(temperature=0.5, top_k=3), {"temperature": 0})
    assert (merged.temperature, merged.top_k) == (0, 3)
    with pytest.raises(InvalidRequestError, match=r"temprature is no sampling parameter.*temperature"):
        wire.merged_params(None, {"temprature": 0})
    with pytest.raises(InvalidRequestError, match="top_p is 2"):
        wire.merged_params(None, {"top_p": 2})


OF_A_CODE = [c for c in error_classes() if c.__module__ == LatentrayError.__module__ and "code" in vars(c)]


@pytest.mark.parametrize("kind", OF_A_CODE)
def test_an_error_comes_back_as_the_server_raised_it(kind):
    error = kind("what: why", field="stop") if issubclass(kind, InvalidRequestError) else kind("what: why")
    status = to_status(error)
    failure = Failure(grpc.StatusCode.UNKNOWN, "", (("grpc-status-details-bin", status.SerializeToString()),))
    found = wire.to_error(failure, "host:1")
    assert (type(found), str(found)) == (kind, "what: why")
    assert getattr(found, "field", None) == getattr(error, "field", None)


def test_errors_of_the_transport():
    lost = wire.to_error(Failure(grpc.StatusCode.UNAVAILABLE, "connection refused"), "host:1")
    assert isinstance(lost, UnavailableError)
    assert "host:1" in str(lost)
    assert "latentray serve" in str(lost)
    other = wire.to_error(Failure(grpc.StatusCode.UNKNOWN, "odd"), "host:1")
    assert (type(other), str(other)) == (LatentrayError, "UNKNOWN: odd")


def test_the_client_needs_neither_torch_nor_ray():
    code = "import sys, cluster.client; print([m for m in ('torch', 'ray', 'zmq') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_gateway_process_imports_no_torch():
    code = (
        "import sys, cluster.gateway.server, cluster.answering.group_client; "
        "print([m for m in ('torch', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
