"""n > 1, bad words, and the rules that need the vocabulary."""

import msgspec
import pytest

from actors.sampling_params import SamplingParams
from cluster.answering.choices import choices
from cluster.config import BUNDLED_CHECKPOINT
from cluster.frontend.front_end import ModelFrontend
from cluster.frontend.token_checks import bad_word_ids
from kernels_integration.errors import InvalidRequestError
from kernels_integration.philox import choice_seed


@pytest.fixture(scope="module")
def frontend() -> ModelFrontend:
    return ModelFrontend.from_pretrained(
        BUNDLED_CHECKPOINT, served_model_name="tiny-dsa", max_model_len=64, max_logprobs=-1, seed=0
    )


def test_choices_are_one_incarnation_and_differ_in_index_and_seed_alone(frontend: ModelFrontend) -> None:
    request = frontend.build_request("r", "Hi", SamplingParams(n=3, seed=9, prompt_logprobs=1, top_k=5))
    parts = choices(request)
    assert [(part.request_id, part.index) for part in parts] == [("r", 0), ("r", 1), ("r", 2)]
    assert len({part.incarnation for part in parts}) == 1
    assert choices(request)[0].incarnation != parts[0].incarnation, "a retry is another"
    assert [part.seed for part in parts] == [9, choice_seed(9, 1), choice_seed(9, 2)]
    assert len({part.seed for part in parts}) == 3
    assert [part.params.prompt_logprobs for part in parts] == [1, None, None]
    assert {(part.params.n, part.params.top_k, part.prompt_token_ids) for part in parts} == {
        (1, 5, request.prompt_token_ids)
    }
    single = frontend.build_request("r", "Hi", SamplingParams(seed=9))
    [part] = choices(single)
    assert msgspec.structs.replace(part, incarnation=0) == single


def test_bad_words_at_the_start_and_after_a_space(frontend: ModelFrontend) -> None:
    def encode(text: str) -> tuple[int, ...]:
        return tuple(frontend.tokenizer.encode(text, add_special_tokens=False))

    assert bad_word_ids(["function"], frontend.tokenizer) == (encode("function"), encode(" function"))
    plain, spaced = encode("instance"), encode(" instance")
    assert len(plain) > len(spaced)
    assert bad_word_ids(["  instance"], frontend.tokenizer) == (plain, spaced)
    plain, spaced = encode("漢字"), encode(" 漢字")
    assert spaced[-len(plain) :] == plain  # a space and the word: one sequence catches both
    assert bad_word_ids(["漢字"], frontend.tokenizer) == (plain,)
    twice = bad_word_ids(["the", "the"], frontend.tokenizer)
    assert twice == bad_word_ids(["the"], frontend.tokenizer)


def test_a_row_always_keeps_a_token(frontend: ModelFrontend) -> None:
    [word] = [w for w in bad_word_ids(["function"], frontend.tokenizer) if len(w) == 1][:1]
    eos = frontend.eos_token_ids[0]
    for params in (
        {"allowed_token_ids": word, "bad_words": ("function",)},
        {"allowed_token_ids": (eos,), "min_tokens": 1},
        {"allowed_token_ids": (7,), "stop_token_ids": (7,), "min_tokens": 1},
    ):
        with pytest.raises(InvalidRequestError, match="may ban all"):
            frontend.build_request("r", "Hi", SamplingParams(**params))
    frontend.build_request("r", "Hi", SamplingParams(allowed_token_ids=(*word, 7), bad_words=("function",)))
    frontend.build_request("r", "Hi", SamplingParams(allowed_token_ids=(eos,)))


def test_minus_one_logprobs_are_the_whole_vocabulary_where_the_server_allows_it(
    frontend: ModelFrontend,
) -> None:
    params = SamplingParams(logprobs=-1, prompt_logprobs=3)
    assert frontend.build_request("r", "Hi", params).params.logprobs == frontend.vocab_size
    limited = ModelFrontend.from_pretrained(
        BUNDLED_CHECKPOINT, served_model_name="tiny-dsa", max_model_len=64, max_logprobs=4
    )
    assert limited.build_request("r", "Hi", SamplingParams(logprobs=4)).params.logprobs == 4
    for field in ("logprobs", "prompt_logprobs"):
        for asked in (5, -1):
            with pytest.raises(InvalidRequestError, match=f"{field} is {asked}; it must be from 0 to 4"):
                limited.build_request("r", "Hi", SamplingParams(**{field: asked}))
