"""The Python interface, with the group inside this process."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from cluster import LLM, SamplingParams
from kernels_integration.errors import ConfigError, InvalidRequestError
from tests.support.reference import next_token_logits, reference_model

pytestmark = pytest.mark.e2e

GREEDY = SamplingParams(temperature=0, max_tokens=24)
QUESTIONS = ["What is the capital of France?", "What does happy mean?", "Who are you?"]
SMALL: dict[str, Any] = {"max_model_len": 256, "num_kv_blocks": 64, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        executor="inline", tensor_parallel_size=2, decode_context_parallel_size=2, dtype="float64", **SMALL
    ) as llm:
        yield llm


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def reference_greedy(prompt: list[int], max_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = reference_model().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=2
    )
    return list(map(int, out[0, len(prompt) :]))


def test_greedy_answers_are_those_of_transformers(llm: LLM) -> None:
    outputs = llm.chat([user(q) for q in QUESTIONS], GREEDY)
    assert outputs[0].outputs[0].text == "The capital of France is Paris."
    for question, output in zip(QUESTIONS, outputs, strict=True):
        assert output.prompt_token_ids == llm.frontend.render_chat(user(question))
        completion = output.outputs[0]
        assert completion.token_ids == reference_greedy(output.prompt_token_ids, 24)
        assert completion.text == llm.frontend.tokenizer.decode(completion.token_ids)
        ended = completion.token_ids[-1] == 1
        assert completion.finish_reason == ("stop" if ended else "length")
        assert output.finished
        assert 0 < output.num_accepted_tokens <= output.num_draft_tokens


def test_every_form_of_a_prompt_is_the_same_prompt(llm: LLM) -> None:
    text = "The king"
    ids = llm.frontend.tokenizer.encode(text)
    forms: list[Any] = [text, ids, tuple(ids), {"prompt": text}, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, GREEDY) + llm.generate(text, GREEDY) + llm.generate(ids, GREEDY)
    assert len(outputs) == 7
    assert {tuple(o.outputs[0].token_ids) for o in outputs} == {tuple(outputs[0].outputs[0].token_ids)}
    assert [o.prompt for o in outputs] == [text, None, None, text, None, text, None]
    assert len({o.request_id for o in outputs}) == 7


def test_outputs_come_in_the_order_of_prompts_each_with_its_own_parameters(llm: LLM) -> None:
    lengths = [9, 1, 17, 4, 30, 2, 8, 3, 12, 5]  # more requests than may run at the same time
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(["The king"] * len(lengths), params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    longest = max((o.outputs[0].token_ids for o in outputs), key=len)
    for output in outputs:
        assert output.outputs[0].token_ids == longest[: len(output.outputs[0].token_ids)]
        assert output.outputs[0].finish_reason == "length"


def test_priorities_and_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = list(range(100, 148))
    with LLM(executor="inline", scheduling_policy="priority", **SMALL | {"max_num_seqs": 1}) as llm:
        finished: list[str] = []
        run = llm.engine.run

        def watched(requests: Any) -> Any:
            for request_id, update in run(requests):
                if getattr(update, "finish_reason", None):
                    finished.append(request_id)
                yield request_id, update

        monkeypatch.setattr(llm.engine, "run", watched)
        few = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        outputs = llm.generate([[n] for n in (5, 6, 7, 8)], few, priority=[2, 0, -1, 2])
        assert finished == [outputs[i].request_id for i in (2, 1, 0, 3)]
        prompts = [{"prompt_token_ids": ids, "cache_salt": salt} for salt in ("a", "a", "b", None)]
        cached = [llm.generate(prompt, few)[0].num_cached_tokens for prompt in prompts]
        assert cached[0] == cached[2] == cached[3] == 0 < cached[1]
        assert len(llm.generate([[5], [6]], few, priority=7)) == 2
        with pytest.raises(InvalidRequestError, match="2 priorities for 1 prompts"):
            llm.generate([[5]], few, priority=[1, 2])
        with pytest.raises(InvalidRequestError, match="prompt 0: prompt holds 'cachesalt'; it may hold"):
            llm.generate({"prompt": "x", "cachesalt": "a"}, few)


def test_nothing_runs_when_one_prompt_is_bad(llm: LLM) -> None:
    steps = llm.stats().num_steps
    with pytest.raises(InvalidRequestError, match=r"prompt 2: prompt holds 6144; token ids of tiny-dsa"):
        llm.generate([[5], [6], [6144], [7]], GREEDY)
    with pytest.raises(InvalidRequestError, match=r"conversation 1: messages\[0\]\.role is 'robot'"):
        llm.chat([user("x"), [{"role": "robot", "content": "x"}]], GREEDY)
    with pytest.raises(InvalidRequestError, match="2 sampling_params for 3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])
    for params in ({"temperature": 0}, [{"temperature": 0}], "greedy", 5, GREEDY.temperature):
        with pytest.raises(InvalidRequestError, match=r"sampling_params is .*; it must be SamplingParams"):
            llm.generate(["a"], params)  # type: ignore[arg-type]
    for prompts in (5, None):
        with pytest.raises(InvalidRequestError, match=r"prompts is .*; it must be one, or a list of them"):
            llm.generate(prompts)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="messages is 5"):
        llm.chat(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"prompt 0: max_tokens is 300; .*max_model_len 256"):
        llm.generate("The king", SamplingParams(max_tokens=300))
    assert llm.stats().num_steps == steps
    assert (llm.stats().running, llm.stats().waiting) == (0, 0)


def test_without_parameters_the_checkpoints_apply(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_p=0.9)
    [output] = llm.generate("The king")
    same = SamplingParams(temperature=0.7, top_p=0.9, seed=output.seed)
    assert llm.generate("The king", same)[0].outputs[0].token_ids == output.outputs[0].token_ids


def test_text_ends_before_a_stop_string(llm: LLM) -> None:
    whole = llm.chat(user(QUESTIONS[0]), GREEDY)[0].outputs[0].text
    stopped = llm.chat(user(QUESTIONS[0]), SamplingParams(temperature=0, stop=["never", "France is"]))[0]
    completion = stopped.outputs[0]
    assert completion.text == whole[: whole.index("France is")] == "The capital of "
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "France is")


def test_a_stop_id_ends_the_tokens_and_is_no_text(llm: LLM) -> None:
    first = llm.chat(user(QUESTIONS[0]), GREEDY)[0].outputs[0]
    stop_id = first.token_ids[3]
    params = SamplingParams(temperature=0, stop_token_ids=(stop_id,))
    completion = llm.chat(user(QUESTIONS[0]), params)[0].outputs[0]
    assert completion.token_ids == first.token_ids[:4]
    assert completion.text == llm.frontend.tokenizer.decode(first.token_ids[:3])
    assert completion.stop_reason == stop_id


def test_logprobs_are_the_models(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3)
    output = llm.chat(user(QUESTIONS[0]), params)[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 4
    for i, entry in enumerate(completion.logprobs):
        before = tuple(output.prompt_token_ids + completion.token_ids[:i])
        exact = next_token_logits([before])[0].log_softmax(-1)  # the reference is float32
        assert [e.rank for e in entry.values()] == [1, 2, 3]
        assert list(entry) == exact.topk(3).indices.tolist()
        for token_id, value in entry.items():
            assert value.logprob == pytest.approx(float(exact[token_id]), abs=2e-4)
    assert completion.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for e, t in zip(completion.logprobs, completion.token_ids, strict=True))
    )


def test_an_interrupted_call_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate("The king", GREEDY)[0].outputs[0].token_ids
    run = llm.engine.run

    def interrupted(requests: Any) -> Any:
        with closing(run(requests)) as updates:
            yield next(updates)
            yield next(updates)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(
                ["The king", "The queen"], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
            )
    assert llm.generate("The king", GREEDY)[0].outputs[0].token_ids == expected
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.num_used_blocks) == (0, 0, 0)


def test_two_engines_in_one_process_repeat_each_other() -> None:
    """Unseeded requests draw their seeds from the engine's --seed: the same calls, the same text."""
    with LLM(executor="inline", dtype="float64", **SMALL) as one:
        with LLM(executor="inline", dtype="float64", num_speculative_tokens=0, **SMALL) as two:
            texts = [
                [o.outputs[0].token_ids for o in llm.generate(["The king", "A dog"], SamplingParams())]
                for llm in (one, two)
            ]
        with LLM(executor="inline", dtype="float64", seed=1, **SMALL) as three:
            other = [o.outputs[0].token_ids for o in three.generate(["The king", "A dog"], SamplingParams())]
    assert texts[0] == texts[1]
    assert texts[0] != other


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="did you mean tensor_parallel_size"):
        LLM(executor="inline", tensor_paralel_size=2)
    with pytest.raises(ConfigError, match="executor is 'threads'; it must be one of ray, inline"):
        LLM(executor="threads")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="use 8 or less"):
        LLM(executor="inline", tensor_parallel_size=9)


def test_a_closed_llm_says_so() -> None:
    llm = LLM(executor="inline", **SMALL)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="was closed"):
        llm.generate("x")
