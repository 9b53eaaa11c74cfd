"""n completions of a prompt: through LLM, through a batch, and prompt log probabilities beside them."""

import json

import pytest
from msgspec.structs import replace

from actors.sampling_params import SamplingParams
from cluster.batch import run_batch
from cluster.batch.results import StreamedResults
from cluster.batch.rows import InputRow
from cluster.llm import LLM
from kernels_integration.philox import choice_seed


@pytest.fixture(scope="module")
def llm():
    with LLM(executor="inline", max_num_seqs=4, num_kv_blocks=64) as llm:
        yield llm


def test_each_choice_is_the_completion_of_its_seed(llm):
    params = SamplingParams(n=5, temperature=1.0, seed=11, max_tokens=8, logprobs=1, prompt_logprobs=2)
    [output] = llm.generate("The function returns", params, use_tqdm=False)
    assert [c.index for c in output.outputs] == list(range(5))
    assert [c.seed for c in output.outputs] == [choice_seed(11, i) for i in range(5)]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 5
    for completion in output.outputs:
        alone = replace(params, n=1, seed=completion.seed)
        [single] = llm.generate("The function returns", alone, use_tqdm=False)
        assert single.outputs[0].token_ids == completion.token_ids
        assert single.outputs[0].text == completion.text
        for row, same in zip(output.prompt_logprobs[1:], single.prompt_logprobs[1:], strict=True):
            found = {token: entry.logprob for token, entry in same.items()}
            assert found == pytest.approx({token: entry.logprob for token, entry in row.items()}, abs=1e-4)
        assert len(completion.logprobs) == len(completion.token_ids)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert token in entry
        assert len(entry) in (2, 3)


def test_choices_of_a_batch_row(llm):
    line = (
        '{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "The", "n": 3, "seed": 4,'
        ' "max_tokens": 4, "temperature": 1, "prompt_logprobs": 1}}'
    )
    rows = []
    summary = run_batch(
        [
            InputRow(line=line, place="line 1"),
            InputRow(line=line.replace('"a"', '"b"'), place="line 2"),
        ],
        StreamedResults(rows.append),
        engine=llm.engine,
        frontend=llm.frontend,
        max_in_flight=1,
    )
    assert (summary.num_rows, summary.num_failed, summary.num_completion_tokens) == (2, 0, 24)
    first, second = (json.loads(row)["response"]["body"] for row in rows)
    assert [c["index"] for c in first["choices"]] == [0, 1, 2]
    assert [c["text"] for c in first["choices"]] == [c["text"] for c in second["choices"]]
    assert first["usage"]["completion_tokens"] == 12
    assert first["choices"][0]["prompt_logprobs"][0] is None
    assert "prompt_logprobs" not in first["choices"][1]


def test_bad_words_do_not_appear(llm):
    greedy = SamplingParams(temperature=0, max_tokens=24)
    [plain] = llm.generate("The function returns", greedy, use_tqdm=False)
    word = plain.outputs[0].text.split()[2]
    [output] = llm.generate("The function returns", replace(greedy, bad_words=(word,)), use_tqdm=False)
    assert word in plain.outputs[0].text.split()
    assert word not in output.outputs[0].text.split()
