"""The door of a model: what becomes a request, and what is refused with which words."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from actors.sampling_params import SamplingParams
from cluster.config import BUNDLED_CHECKPOINT
from cluster.frontend.front_end import ModelFrontend
from kernels_integration.errors import CheckpointError, InvalidRequestError, shown


def make(
    path: Path = BUNDLED_CHECKPOINT, *, max_model_len: int = 32, seed: int | None = 0, **more: Any
) -> ModelFrontend:
    return ModelFrontend.from_pretrained(
        path, served_model_name="tiny-dsa", max_model_len=max_model_len, seed=seed, **more
    )


@pytest.fixture(scope="module")
def frontend() -> ModelFrontend:
    return make()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_CHECKPOINT / name, tmp_path)
    return tmp_path


def test_text_gets_the_beginning_of_text_and_ids_are_taken_as_they_are(frontend: ModelFrontend) -> None:
    request = frontend.build_request("r", "Hello world", SamplingParams(seed=-1))
    assert request.prompt_token_ids[0] == 0
    assert frontend.tokenizer.decode(request.prompt_token_ids) == "Hello world"
    assert request.seed == 2**64 - 1
    assert request.eos_token_ids == (1,)
    assert frontend.build_request("r", [5, 6]).prompt_token_ids == (5, 6)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ([6144], "holds 6144; token ids of tiny-dsa are whole numbers from 0 to 6143"),
        ([-1], "holds -1"),
        ([1.0], "holds 1.0"),
        ([True], "holds true"),
        (["a"], "holds 'a'"),
        (17, "prompt is a number"),
        ([3] * 32, "max_model_len 32 leaves room for 31 and one new token"),
        ("word " * 40, "max_model_len 32"),
    ],
)
def test_a_bad_prompt_is_refused(frontend: ModelFrontend, prompt: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        frontend.build_request("r", prompt)
    assert words in str(caught.value)
    assert caught.value.field == "prompt"


def test_the_longest_prompt_leaves_one_token(frontend: ModelFrontend) -> None:
    assert len(frontend.build_request("r", [3] * 31).prompt_token_ids) == 31


def test_stop_ids_must_be_in_the_vocabulary(frontend: ModelFrontend) -> None:
    with pytest.raises(InvalidRequestError, match="stop_token_ids holds 6144"):
        frontend.build_request("r", [3], SamplingParams(stop_token_ids=(6144,)))


def test_drawn_seeds_follow_the_frontends_seed() -> None:
    def draw(seed: int | None) -> list[int]:
        frontend = make(seed=seed)
        return [frontend.build_request("r", [3]).seed for _ in range(4)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert draw(None) != draw(None)
    assert len(set(draw(7))) == 4


def test_the_checkpoints_defaults_apply_only_where_nothing_is_given(frontend: ModelFrontend) -> None:
    assert frontend.default_sampling_params == {"temperature": 0.7, "top_p": 0.9}
    assert frontend.build_request("r", [3]).params == SamplingParams(temperature=0.7, top_p=0.9)
    assert frontend.build_request("r", [3], SamplingParams()).params.temperature == 1.0


@pytest.mark.parametrize(
    ("generation", "config_eos", "ids"),
    [
        ({"eos_token_id": [1, 7]}, 1, (1, 7)),
        ({"eos_token_id": 7}, 1, (7, 1)),
        ({"eos_token_id": 2}, 3, (2, 3, 1)),
        ({}, [5, 6], (5, 6, 1)),
        (None, None, (1,)),
    ],
)
def test_every_end_that_a_file_names_ends_a_stream(
    checkpoint: Path, generation: dict[str, Any] | None, config_eos: Any, ids: tuple[int, ...]
) -> None:
    if generation is not None:
        (checkpoint / "generation_config.json").write_text(json.dumps(generation))
    config = json.loads((checkpoint / "config.json").read_text()) | {"eos_token_id": config_eos}
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert make(checkpoint).eos_token_ids == ids


@pytest.mark.parametrize("ids", ["1", True, -1, 1.0, [1, "a"], [[1]], {"id": 1}])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_an_end_that_is_no_token_id(checkpoint: Path, file: str, ids: Any) -> None:
    config = json.loads((checkpoint / "config.json").read_text()) | {"eos_token_id": ids}
    (checkpoint / file).write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=re.escape(f"{file}: eos_token_id is {shown(ids)}; it must be")):
        make(checkpoint)


def test_a_default_that_stops_the_start_is_told_with_the_way_around_it(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text('{"temperature": -1}')
    with pytest.raises(CheckpointError, match=r"temperature is -1.*--generation-config vllm"):
        make(checkpoint)
    assert make(checkpoint, generation_config="vllm").default_sampling_params == {}


def test_an_added_token_under_no_id(checkpoint: Path) -> None:
    (checkpoint / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"x": {"content": "<x>"}}}')
    with pytest.raises(CheckpointError, match="has the id 'x'; it must be a whole number"):
        make(checkpoint)


def test_a_generation_config_out_of_range_is_the_checkpoints_error(checkpoint: Path) -> None:
    file = checkpoint / "generation_config.json"
    file.write_text('{"temperature": 0.5, "max_new_tokens": 99, "top_k": 50, "do_sample": true}')
    assert make(checkpoint).default_sampling_params == {"temperature": 0.5, "top_k": 50, "max_tokens": 99}
    assert make(checkpoint).sampling_defaults().max_tokens == 99
    file.write_text('{"top_p": 7}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: top_p is 7"):
        make(checkpoint)


def test_chats_are_rendered_without_a_second_beginning(frontend: ModelFrontend) -> None:
    ids = frontend.render_chat([{"role": "user", "content": "Hi"}])
    assert ids == [0, 4, *frontend.tokenizer.encode("Hi", add_special_tokens=False), 5]
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert frontend.render_chat([{"role": "user", "content": parts}]) == frontend.render_chat(
        [{"role": "user", "content": "H\ni"}]
    )


@pytest.mark.parametrize(
    ("messages", "field", "words"),
    [
        ([], "messages", "non-empty list"),
        ("Hi", "messages", "non-empty list"),
        (["Hi"], "messages[0]", "is a text"),
        ([{"content": "x"}], "messages[0].role", "role is null"),
        ([{"role": "robot", "content": "x"}], "messages[0].role", "system, developer, user, assistant, tool"),
        ([{"role": "user"}], "messages[0].content", "content is null"),
        ([{"role": "user", "content": 3}], "messages[0].content", "content is 3"),
        (
            [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "image_url"}]}],
            "messages[1].content[0]",
            "type 'image_url'",
        ),
    ],
)
def test_bad_messages_are_refused(frontend: ModelFrontend, messages: Any, field: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        frontend.render_chat(messages)
    assert caught.value.field == field
    assert words in str(caught.value)


def test_a_model_without_a_chat_template_says_so(checkpoint: Path) -> None:
    (checkpoint / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InvalidRequestError, match="the model has no chat template"):
        make(checkpoint, tokenizer_mode="hf").render_chat([{"role": "user", "content": "Hi"}])


def test_generation_config_can_be_switched_off_but_not_its_ends(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": [1, 7]}')
    frontend = make(checkpoint, generation_config="vllm")
    assert frontend.default_sampling_params == {}
    assert frontend.sampling_defaults() == SamplingParams()
    assert frontend.eos_token_ids == (1, 7)


def test_a_template_of_the_user_takes_the_place_of_the_checkpoints(checkpoint: Path) -> None:
    file = checkpoint / "mine.txt"
    file.write_text("{{ messages[0].content }}{{ mood }}{{ tools | length }}")
    frontend = make(checkpoint, chat_template=file)
    ids = frontend.render_chat(
        [{"role": "user", "content": "Hi"}], tools=[{}, {}], chat_template_kwargs={"mood": "!"}
    )
    assert frontend.tokenizer.decode(ids) == "Hi!2"


def test_a_completion_that_is_asked_for_must_fit(frontend: ModelFrontend) -> None:
    prompt = [3] * 20  # of 32
    for asked in (12, None):
        assert (
            frontend.build_request("r", prompt, SamplingParams(max_tokens=asked)).params.max_tokens == asked
        )
    with pytest.raises(
        InvalidRequestError, match=r"max_tokens is 13; .* 20 tokens.*use at most 12"
    ) as caught:
        frontend.build_request("r", prompt, SamplingParams(max_tokens=13))
    assert caught.value.field == "max_tokens"
    with pytest.raises(InvalidRequestError, match=r"min_tokens is 13; .*use at most 12"):
        frontend.build_request("r", prompt, SamplingParams(max_tokens=None, min_tokens=13))


def test_a_default_length_is_as_much_of_it_as_fits(frontend: ModelFrontend) -> None:
    for num_prompt, expected in ((10, 16), (16, 16), (20, 12), (31, 1)):
        prompt = [3] * num_prompt
        assert frontend.build_request("r", prompt).params.max_tokens == expected
        params = SamplingParams(max_tokens=None)
        assert (
            frontend.build_request("r", prompt, params, default_max_tokens=16).params.max_tokens == expected
        )
    with pytest.raises(InvalidRequestError, match=r"min_tokens is 14; .*at most max_tokens 12"):
        frontend.build_request(
            "r", [3] * 10, SamplingParams(max_tokens=None, min_tokens=14), default_max_tokens=12
        )


def test_a_prompt_s_length_is_compared_before_its_ids_are_looked_at(frontend: ModelFrontend) -> None:
    class Ids(list):
        def __iter__(self):
            raise AssertionError("an id was looked at before the length")

    with pytest.raises(InvalidRequestError, match="prompt has 1000 tokens"):
        frontend.build_request("r", Ids([3] * 1000))
