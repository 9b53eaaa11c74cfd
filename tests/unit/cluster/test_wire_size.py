"""Messages that would take too much memory are refused by their bytes; all others are let through."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from cluster.gateway.wire_size import WireBounds, check_size, text_of
from kernels_integration.errors import InvalidRequestError

BOUNDS = WireBounds(max_values=1000, max_text_bytes=4000)
GENERATE = pb.GenerateRequest.DESCRIPTOR


def with_ids(count: int, token_id: int) -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    request.tokenized.input_ids.extend([token_id] * count)
    return request


@pytest.mark.parametrize("token_id", [5, 300, 2**32 - 1])
def test_packed_numbers_are_counted(token_id: int) -> None:
    check_size(with_ids(1000, token_id).SerializeToString(), GENERATE, BOUNDS)
    with pytest.raises(InvalidRequestError, match=r"tokenized\.input_ids holds 1001 numbers") as caught:
        check_size(with_ids(1001, token_id).SerializeToString(), GENERATE, BOUNDS)
    assert caught.value.field == "tokenized.input_ids"


def test_numbers_that_are_not_packed_and_empty_texts_are_counted_as_fields() -> None:
    number = b"\x58\x05"  # stop_token_ids, 5
    inside = number * 2**16
    data = b"\x22" + _length(len(inside)) + inside  # sampling_params
    with pytest.raises(InvalidRequestError, match=r"sampling_params holds more than 65536 entries"):
        check_size(data, GENERATE, BOUNDS)
    inside = number * 2000
    check_size(b"\x22" + _length(len(inside)) + inside, GENERATE, BOUNDS)
    abort = pb.AbortRequest(request_ids=[""] * 2**17).SerializeToString()
    with pytest.raises(InvalidRequestError, match="the request holds more than 65536 entries"):
        check_size(abort, pb.AbortRequest.DESCRIPTOR, BOUNDS)


def test_texts_are_measured() -> None:
    check_size(pb.GenerateRequest(text="x" * 4000).SerializeToString(), GENERATE, BOUNDS)
    with pytest.raises(InvalidRequestError, match=r"text has 4002 bytes; .* more than 4000"):
        check_size(pb.GenerateRequest(text="é" * 2001).SerializeToString(), GENERATE, BOUNDS)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_left_to_decoding(data: bytes) -> None:
    check_size(data, GENERATE, BOUNDS)


@given(
    st.builds(
        pb.GenerateRequest,
        request_id=st.text(max_size=20),
        text=st.text(max_size=900),
        stream=st.booleans(),
        sampling_params=st.builds(
            pb.SamplingParams,
            temperature=st.floats(0, 2, width=32),
            stop=st.lists(st.text(max_size=20), max_size=16),
            stop_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=900),
            logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-9, 9, width=32), max_size=20),
        ),
    )
)
def test_what_is_within_the_bounds_passes(request: pb.GenerateRequest) -> None:
    check_size(request.SerializeToString(), GENERATE, BOUNDS)


def _length(number: int) -> bytes:
    encoded = b""
    while number > 0x7F:
        encoded += bytes([number & 0x7F | 0x80])
        number >>= 7
    return encoded + bytes([number])


@given(request_id=st.text(max_size=60), position=st.integers(0, 2))
def test_an_id_is_found_without_decoding(request_id: str, position: int) -> None:
    parts = [with_ids(5, 300).SerializeToString(), pb.GenerateRequest(stream=True).SerializeToString()]
    parts.insert(position, pb.GenerateRequest(request_id=request_id).SerializeToString())
    assert text_of(b"".join(parts), GENERATE, "request_id") == request_id


@given(st.binary(max_size=60))
def test_an_id_in_any_bytes_is_text(data: bytes) -> None:
    assert isinstance(text_of(data, GENERATE, "request_id"), str)
    assert text_of(data, pb.GetLoadsRequest.DESCRIPTOR, "request_id") == ""
