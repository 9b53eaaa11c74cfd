"""The same interface on Ray: equal answers, nothing left behind."""

import re

import pytest

from cluster import LLM, SamplingParams
from kernels_integration.errors import InvalidRequestError

pytestmark = [pytest.mark.e2e, pytest.mark.ray]

SETTINGS = {"max_model_len": 256, "num_kv_blocks": 64, "max_num_seqs": 8, "dtype": "float64"}
PROMPTS = ["The king", "What is", "Once upon a time", "A list"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=20, logprobs=1),
    SamplingParams(temperature=1.0, max_tokens=20, stop=["the"]),
    SamplingParams(
        temperature=1.0, seed=4, max_tokens=30, structured_outputs={"regex": r"\[\d(, \d){2,5}\]"}
    ),
]


def test_ray_answers_as_inline_does() -> None:
    with LLM(executor="inline", **SETTINGS) as llm:
        expected = llm.generate(PROMPTS, PARAMS)
    messages: list[str] = []
    with LLM(
        executor="ray",
        address="local",
        tensor_parallel_size=2,
        decode_context_parallel_size=2,
        progress=messages.append,
        **SETTINGS,
    ) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert re.fullmatch(r"\[\d(, \d){2,5}\]", outputs[3].outputs[0].text)
        for output, other in zip(outputs, expected, strict=True):
            mine, its = output.outputs[0], other.outputs[0]
            assert (mine.token_ids, mine.text, mine.finish_reason) == (
                its.token_ids,
                its.text,
                its.finish_reason,
            )
            assert output.seed == other.seed
        assert outputs[1].outputs[0].cumulative_logprob == pytest.approx(
            expected[1].outputs[0].cumulative_logprob, abs=1e-9
        )
        with pytest.raises(InvalidRequestError, match="prompt 1: prompt is empty"):
            llm.generate(["x", ""])
    assert any("load the model" in message for message in messages)

    import ray

    assert not ray.is_initialized()
