"""Updates to vLLM-shaped outputs."""

import pytest

from actors.requests import RequestUpdate, TokenLogprob
from actors.sampling_params import SamplingParams
from cluster.config import BUNDLED_CHECKPOINT
from cluster.frontend.front_end import ModelFrontend
from cluster.outputs import OutputBuilder


@pytest.fixture(scope="module")
def frontend() -> ModelFrontend:
    return ModelFrontend.from_pretrained(
        BUNDLED_CHECKPOINT, served_model_name="tiny-dsa", max_model_len=64, seed=0
    )


def update(token_ids: tuple[int, ...], **more: object) -> RequestUpdate:
    return RequestUpdate(request_id="7", token_ids=token_ids, **more)  # type: ignore[arg-type]


def test_deltas_add_up(frontend: ModelFrontend) -> None:
    ids = tuple(frontend.tokenizer.encode("one two", add_special_tokens=False))
    request = frontend.build_request("7", "Hi", SamplingParams(seed=5))
    builder = OutputBuilder(request, frontend, prompt="Hi")
    pieces = [builder.push(update(ids[:1]))]
    early = builder.output()
    assert not early.finished
    assert early.outputs[0].finish_reason is None
    pieces.append(
        builder.push(
            update(
                (*ids[1:], 1),
                finish_reason="stop",
                num_cached_tokens=2,
                num_draft_tokens=3,
                num_accepted_tokens=1,
            )
        )
    )
    output = builder.output()
    completion = output.outputs[0]
    assert "".join(pieces) == completion.text == "one two"
    assert completion.token_ids == [*ids, 1]
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "stop", None)
    assert completion.logprobs is None
    assert completion.cumulative_logprob is None
    assert (output.request_id, output.prompt, output.seed, output.finished) == ("7", "Hi", 5, True)
    assert output.prompt_token_ids == list(request.prompt_token_ids)
    assert (output.num_cached_tokens, output.num_draft_tokens, output.num_accepted_tokens) == (2, 3, 1)
    assert early.outputs[0].token_ids == list(ids[:1]), "an output handed out must not change later"


def test_logprobs_hold_the_token_and_the_best(frontend: ModelFrontend) -> None:
    builder = OutputBuilder(frontend.build_request("7", "Hi", SamplingParams(logprobs=2)), frontend)
    entries = (
        TokenLogprob(token_id=301, logprob=-0.5, top=((301, -0.5), (419, -1.5))),
        TokenLogprob(token_id=17, logprob=-4.0, top=((301, -0.1), (419, -2.5))),
    )
    builder.push(update((301, 17), logprobs=entries, finish_reason="length"))
    completion = builder.output().outputs[0]
    assert completion.cumulative_logprob == -4.5
    assert completion.logprobs is not None
    first, second = completion.logprobs
    assert list(first) == [301, 419]
    assert (first[301].rank, first[419].rank, first[301].decoded_token) == (1, 2, " is")
    assert list(second) == [17, 301, 419]
    assert (second[17].rank, second[17].logprob, second[301].rank) == (None, -4.0, 1)


def test_zero_logprobs_hold_the_token_alone(frontend: ModelFrontend) -> None:
    builder = OutputBuilder(frontend.build_request("7", "Hi", SamplingParams(logprobs=0)), frontend)
    builder.push(update((301,), logprobs=(TokenLogprob(token_id=301, logprob=-0.5),)))
    assert [list(entry) for entry in builder.output().outputs[0].logprobs or []] == [[301]]


def test_without_detokenize_there_are_ids_alone(frontend: ModelFrontend) -> None:
    request = frontend.build_request("7", "Hi", SamplingParams(detokenize=False, logprobs=0))
    builder = OutputBuilder(request, frontend)
    entry = TokenLogprob(token_id=301, logprob=-0.5)
    assert builder.push(update((301,), logprobs=(entry,), finish_reason="length")) == ""
    completion = builder.output().outputs[0]
    assert (completion.text, completion.token_ids) == ("", [301])
    assert completion.logprobs is not None
    assert completion.logprobs[0][301].decoded_token is None
