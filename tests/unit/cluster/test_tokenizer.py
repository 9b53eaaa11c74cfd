"""The tokenizer front end against transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cluster.config import BUNDLED_CHECKPOINT
from cluster.tokenizer import FastTokenizer, load_tokenizer
from cluster.tokenizer.deepseek_v32_tokenizer import DeepseekV32Tokenizer
from kernels_integration.errors import CheckpointError, ConfigError, InvalidRequestError

TEXTS = [
    "Hello world",
    " leading and trailing ",
    "",
    "naïve café — 東京 🙂👩‍👩‍👧",
    "<|bos|>already<|eos|> there",
    "tabs\tand\r\nlines\n\n\n",
    "\x00\x7f\ufffd",
    json.loads((BUNDLED_CHECKPOINT / "heldout_prompts.json").read_text())["text"][0][1],
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": "  What? <|eos|> {{ 1 }}"},
        {"role": "assistant", "content": "This."},
        {"role": "user", "content": "東京"},
    ],
]


@pytest.fixture(scope="module")
def tokenizer() -> FastTokenizer:
    loaded = load_tokenizer(BUNDLED_CHECKPOINT)
    assert type(loaded) is FastTokenizer  # of model_type deepseek_v32, but with a template
    return loaded


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoTokenizer.from_pretrained(BUNDLED_CHECKPOINT)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_those_of_transformers(
    tokenizer: FastTokenizer, reference: Any, text: str
) -> None:
    ids = reference(text).input_ids
    assert tokenizer.encode(text) == ids
    assert (
        tokenizer.encode(text, add_special_tokens=False)
        == reference(text, add_special_tokens=False).input_ids
    )
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(
            ids, skip_special_tokens=skip
        )


def test_the_beginning_of_text_is_added_once(tokenizer: FastTokenizer) -> None:
    assert tokenizer.encode("Hi")[0] == 0
    assert tokenizer.encode("Hi").count(0) == 1
    assert tokenizer.encode("Hi", add_special_tokens=False).count(0) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_eos_token": True},
        {"add_bos_token": None},
    ],
)
def test_what_is_added_is_what_transformers_adds(tmp_path: Path, settings: dict[str, Any]) -> None:
    shutil.copy(BUNDLED_CHECKPOINT / "tokenizer.json", tmp_path)
    config = json.loads((BUNDLED_CHECKPOINT / "tokenizer_config.json").read_text())
    for name in ("add_bos_token", "add_eos_token"):
        del config[name]
    config |= {name: value for name, value in settings.items() if value is not None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    expected = AutoTokenizer.from_pretrained(tmp_path)("Hi there").input_ids
    assert load_tokenizer(tmp_path).encode("Hi there") == expected
    raw = json.loads((BUNDLED_CHECKPOINT / "tokenizer.json").read_text()) | {"post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    bare = AutoTokenizer.from_pretrained(tmp_path)("Hi there").input_ids
    assert bare == expected[1:]
    assert load_tokenizer(tmp_path).encode("Hi there") == bare


def test_a_named_token_that_the_file_lacks_is_added(tmp_path: Path) -> None:
    shutil.copy(BUNDLED_CHECKPOINT / "tokenizer.json", tmp_path)
    config = {
        "eos_token": {"__type": "AddedToken", "content": "<|end|>", "special": True},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_id == reference.eos_token_id == 6144
    assert tokenizer.encode("a<|end|>") == reference("a<|end|>").input_ids


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read as a tokenizer"):
        load_tokenizer(tmp_path)
    shutil.copy(BUNDLED_CHECKPOINT / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds a list"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chats_equal_those_of_transformers(
    tokenizer: FastTokenizer, reference: Any, chat: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    text = tokenizer.render_chat(chat, add_generation_prompt=add_generation_prompt)
    expected = reference.apply_chat_template(
        chat, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
    )
    assert tokenizer.encode(text, add_special_tokens=False) == expected


def test_tokens_that_only_the_config_knows_are_those_of_transformers(tmp_path: Path) -> None:
    shutil.copy(BUNDLED_CHECKPOINT / "tokenizer.json", tmp_path)
    flags = {"lstrip": False, "rstrip": False, "single_word": False}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "added_tokens_decoder": {
            "6144": {"content": "<tool>", "special": False, "normalized": False} | flags,
            "6145": {"content": "<|turn|>", "special": True, "normalized": False} | flags,
        },
        "additional_special_tokens": ["<|extra|>", "<|turn|>"],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, reference = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "a<tool>b<|turn|>c<|end|> <|extra|>"
    ids = reference(text).input_ids
    assert sorted(ids)[-4:] == [6144, 6145, 6146, 6147]
    assert tokenizer.encode(text) == ids
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(
            ids, skip_special_tokens=skip
        )


def sources(path: Path, **kwargs: Any) -> dict[str, str]:
    tokenizer = load_tokenizer(path, **kwargs)
    assert isinstance(tokenizer, FastTokenizer)
    return {name: template.source for name, template in tokenizer.chat_templates.items()}


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A checkpoint's directory without templates."""
    shutil.copy(BUNDLED_CHECKPOINT / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    return tmp_path


def test_templates_are_found_by_name_and_file(bare: Path) -> None:
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    (bare / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert sources(bare) == {"default": "A", "tool_use": "B"}
    (bare / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert sources(bare) == {"default": "J", "tool_use": "B"}
    (bare / "chat_template.jinja").write_text("C")
    (bare / "additional_chat_templates").mkdir()
    (bare / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert sources(bare) == {"default": "C", "tool_use": "B", "rag": "R"}
    (bare / "mine").write_text("M")
    assert sources(bare, chat_template=bare / "mine") == {"default": "M"}


def test_a_named_template_is_used_as_transformers_does(bare: Path) -> None:
    named = [
        {"name": "default", "template": "{{ messages[0].content }}: no tools"},
        {"name": "tool_use", "template": "{{ messages[0].content }}: {{ tools[0].function.name }}"},
    ]
    (bare / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": named, "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    tokenizer, reference = load_tokenizer(bare), AutoTokenizer.from_pretrained(bare)
    chat = [{"role": "user", "content": "x"}]
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        expected = reference.apply_chat_template(chat, tools=tools, tokenize=False)
        assert tokenizer.render_chat(chat, tools=tools) == expected == ("x: f" if tools else "x: no tools")
    (bare / "tokenizer_config.json").write_text(json.dumps({"chat_template": named[1:]}))
    with pytest.raises(InvalidRequestError, match="only under the names tool_use"):
        load_tokenizer(bare).render_chat(chat)
    (bare / "tokenizer_config.json").write_text("{}")
    assert not load_tokenizer(bare).renders_chats
    with pytest.raises(InvalidRequestError, match=r"no chat template \(none\).*--chat-template FILE"):
        load_tokenizer(bare).render_chat(chat)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template is a number"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}', "objects with name and template"),
        ("chat_template.json", "[", "cannot be read as JSON"),
        ("chat_template.jinja", "{% if %}", "template default is no legal Jinja"),
        ("chat_template.jinja", "{{ x | nofilter }}", "No filter named 'nofilter'"),
        (
            "chat_template.jinja",
            "{% for a in x %}" * 25 + "{% endfor %}" * 25,
            "template default cannot be compiled: what it becomes in Python .*: too many",
        ),
        ("chat_template.jinja", b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_bad_template_is_the_checkpoints_error(
    bare: Path, file: str, content: str | bytes, words: str
) -> None:
    (bare / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=words):
        load_tokenizer(bare)


@pytest.mark.parametrize("content", [None, b"{% if %}", b"\xff"])
def test_a_bad_template_of_the_user_is_a_setting(bare: Path, content: bytes | None) -> None:
    if content is not None:
        (bare / "mine").write_bytes(content)
    with pytest.raises(ConfigError, match=r"chat-template .*mine") as caught:
        load_tokenizer(bare, chat_template=bare / "mine")
    assert caught.value.code == "invalid_config"


def test_the_mode_chooses_how_chats_are_written(bare: Path) -> None:
    (bare / "config.json").write_text('{"model_type": "deepseek_v32"}')
    assert isinstance(load_tokenizer(bare), DeepseekV32Tokenizer)
    assert type(load_tokenizer(bare, mode="hf")) is FastTokenizer
    (bare / "config.json").write_text('{"model_type": "deepseek_v3"}')
    assert type(load_tokenizer(bare)) is FastTokenizer
    (bare / "chat_template.jinja").write_text("C")
    (bare / "config.json").write_text('{"model_type": "deepseek_v32"}')
    assert type(load_tokenizer(bare)) is FastTokenizer
    forced = load_tokenizer(bare, mode="deepseek_v32")
    assert forced.render_chat([{"role": "user", "content": "x"}]).endswith("</think>")


def test_special_tokens_that_only_the_config_declares_are_not_split(tmp_path: Path) -> None:
    """The tokens stand in the vocabulary, under the same ids."""
    raw = json.loads((BUNDLED_CHECKPOINT / "tokenizer.json").read_text())
    config = json.loads((BUNDLED_CHECKPOINT / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {
        str(token["id"]): {name: value for name, value in token.items() if name != "id"}
        for token in raw["added_tokens"]
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw | {"added_tokens": []}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    shutil.copy(BUNDLED_CHECKPOINT / "config.json", tmp_path)
    text = "<|bos|><|user|>Hi<|assistant|>"
    tokenizer, reference = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == [0, 4, 47, 80, 5] == reference(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == "Hi"


@pytest.mark.parametrize("has_decoder", [False, True])
def test_files_of_older_releases_count_as_in_transformers(tmp_path: Path, has_decoder: bool) -> None:
    shutil.copy(BUNDLED_CHECKPOINT / "tokenizer.json", tmp_path)
    flags = {"lstrip": True, "rstrip": False, "single_word": False, "normalized": False}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|old|>",
        "image_token": "<|image|>",
        "extra_special_tokens": {"audio_token": "<|audio|>"},
    }
    if has_decoder:
        config["added_tokens_decoder"] = {"6144": {"content": "<|turn|>", "special": True} | flags}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|end|>"} | flags, "pad_token": "<|none|>"})
    )
    (tmp_path / "added_tokens.json").write_text('{"<|b|>": 6145, "<|a|>": 6144, "<|none|>": 6146}')
    tokenizer, reference = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "a <|end|>b<|old|> <|a|><|b|><|none|><|image|><|audio|> <|turn|>"
    ids = reference(text).input_ids
    assert tokenizer.encode(text) == ids
    assert tokenizer.eos_token_id == reference.eos_token_id
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert tokenizer.special_tokens == dict(reference.special_tokens_map)


def test_files_with_a_byte_order_mark_are_read_and_handed_out_without_it(tmp_path: Path) -> None:
    mark = "\ufeff".encode()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes(mark + (BUNDLED_CHECKPOINT / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes(mark + b"{{ messages[0].content }}")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("Hi") == load_tokenizer(BUNDLED_CHECKPOINT).encode("Hi")
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "x"
    assert not any(content.startswith(mark) for content in tokenizer.files.members().values())
