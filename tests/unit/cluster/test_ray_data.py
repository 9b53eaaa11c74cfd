"""The step for Ray Data, called as its actors call it; tests/ray/test_ray_data_pipeline.py runs it there."""

from collections.abc import Iterator

import numpy as np
import pytest

from cluster.batch.ray_data import OUTPUT_COLUMNS, Answers
from kernels_integration.errors import ConfigError

SMALL = {"max_model_len": 256, "num_kv_blocks": 64, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def answers() -> Iterator[Answers]:
    step = Answers(body={"max_tokens": 12, "temperature": 0.8}, **SMALL)
    yield step
    step.close()


def objects(*values: object) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def test_columns_come_beside_those_that_were_there(answers: Answers) -> None:
    batch = {"prompt": objects("The king", "word " * 999, "The SELECT statement"), "other": np.arange(3)}
    found = answers(batch)
    assert list(found) == ["prompt", "other", *OUTPUT_COLUMNS]
    assert list(found["other"]) == [0, 1, 2]
    assert [bool(text) for text in found["text"]] == [True, False, True]
    assert "max_model_len 256" in found["error"][1]
    assert [error is None for error in found["error"]] == [True, False, True]
    assert found["completion_tokens"][0] == 12


@pytest.mark.slow
def test_answers_do_not_depend_on_how_the_data_is_cut(answers: Answers) -> None:
    prompts = [f"The number {i} is" for i in range(4)]
    whole = answers({"prompt": objects(*prompts)})["text"]
    parts = [answers({"prompt": objects(prompt)})["text"][0] for prompt in reversed(prompts)]
    assert whole == parts[::-1]
    twice = answers({"prompt": objects("The king", "The king")})["text"]
    assert twice[0] != twice[1], "two samples of one prompt"
    named = answers({"prompt": objects("The king", "The king"), "custom_id": objects("a", "b")})["text"]
    assert named[1] == answers({"prompt": objects("The king"), "custom_id": objects("b")})["text"][0]


def test_chats_and_bodies_as_ray_data_hands_them_over(answers: Answers) -> None:
    chat = np.array(
        [{"role": "user", "content": "What is the capital of France?", "name": None}], dtype=object
    )
    bodies = objects({"temperature": np.float64(0), "max_tokens": np.int64(30), "seed": None}, '{"top_p": 7}')
    found = answers({"messages": objects(chat, chat), "body": bodies})
    assert found["text"][0] == "The capital of France is Paris."
    assert "top_p is 7" in found["error"][1]
    ids = answers({"prompt": objects(np.array([5, 6, 7]))})
    assert ids["prompt_tokens"] == [3]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"text": objects("x")}, "the columns text; it needs one of messages and prompt"),
        ({"prompt": objects("x"), "messages": objects("x")}, "it needs one of"),
        ([1], "a batch is a list"),
        ({"prompt": objects("x"), "body": objects("[1]")}, "a body is a list"),
        ({"prompt": objects("x"), "body": objects('{"n": 2}')}, "n is 2; a row has one text"),
    ],
)
def test_batches_of_another_form_are_refused(answers: Answers, batch: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        answers(batch)
