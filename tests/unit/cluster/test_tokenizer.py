"""The tokenizer front end against transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cluster.config import BUNDLED_CHECKPOINT
from cluster.tokenizer import ChatTemplate, Tokenizer
from kernels_integration.errors import CheckpointError, InvalidRequestError

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
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(BUNDLED_CHECKPOINT)


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoTokenizer.from_pretrained(BUNDLED_CHECKPOINT)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_those_of_transformers(tokenizer: Tokenizer, reference: Any, text: str) -> None:
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


def test_the_beginning_of_text_is_added_once(tokenizer: Tokenizer) -> None:
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
    assert Tokenizer.from_pretrained(tmp_path).encode("Hi there") == expected
    raw = json.loads((BUNDLED_CHECKPOINT / "tokenizer.json").read_text()) | {"post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    bare = AutoTokenizer.from_pretrained(tmp_path)("Hi there").input_ids
    assert bare == expected[1:]
    assert Tokenizer.from_pretrained(tmp_path).encode("Hi there") == bare


def test_a_named_token_that_the_file_lacks_is_added(tmp_path: Path) -> None:
    shutil.copy(BUNDLED_CHECKPOINT / "tokenizer.json", tmp_path)
    config = {
        "eos_token": {"__type": "AddedToken", "content": "<|end|>", "special": True},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_id == reference.eos_token_id == 6144
    assert tokenizer.encode("a<|end|>") == reference("a<|end|>").input_ids


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read as a tokenizer"):
        Tokenizer.from_pretrained(tmp_path)
    shutil.copy(BUNDLED_CHECKPOINT / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds a list"):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chats_equal_those_of_transformers(
    tokenizer: Tokenizer, reference: Any, chat: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    template = ChatTemplate(tokenizer.chat_templates["default"], special_tokens=tokenizer.special_tokens)
    text = template.render(chat, add_generation_prompt=add_generation_prompt)
    expected = reference.apply_chat_template(
        chat, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
    )
    assert tokenizer.encode(text, add_special_tokens=False) == expected


# What templates of real checkpoints use: blocks on lines of their own, loop controls, namespaces,
# tojson with arguments, special tokens, extra variables, tools, the generation mark.
TEMPLATE = """
{%- set ns = namespace(found=false) %}
{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{% set ns.found = true %}{% continue %}{% endif %}
  {% if loop.last and stop_at_last is defined %}{% break %}{% endif %}
[{{ m['role'] | upper }}] {{ m.content | trim }}{% generation %} said {{ ns.found }}{% endgeneration %}
{%- endfor %}
{{ tools | tojson(indent=2) if tools else 'no tools' }}
{{ {'b': '<é&>', 'a': 1} | tojson(sort_keys=true) }} {{ messages | map(attribute='role') | join(',') }}
{%- if add_generation_prompt %} go{% endif %}
"""


@pytest.mark.parametrize(
    "variables", [{}, {"stop_at_last": True}, {"tools": [{"type": "function", "name": "é"}]}]
)
def test_the_dialect_of_templates_is_that_of_transformers(
    tokenizer: Tokenizer, reference: Any, variables: dict[str, Any]
) -> None:
    template = ChatTemplate(TEMPLATE, special_tokens=tokenizer.special_tokens)
    for chat in CHATS:
        expected = reference.apply_chat_template(
            chat, chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False, **variables
        )
        assert template.render(chat, **variables) == expected


def test_the_date_is_a_function_of_templates() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", special_tokens={}).render([]).startswith("2")


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.foo.bar }}",
        "{{ 1 / 0 }}",
        # the sandbox: no internals, nothing changed
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_what_a_template_may_not_do_is_the_requests_error(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template") as caught:
        ChatTemplate(source, special_tokens={}).render([{"role": "user", "content": "x"}])
    assert caught.value.field == "messages"
    if "raise_exception" in source:
        assert "roles must alternate" in str(caught.value)


def test_a_template_that_is_no_jinja_is_the_checkpoints_error() -> None:
    with pytest.raises(CheckpointError, match="no legal Jinja"):
        ChatTemplate("{% if %}", special_tokens={})


def test_templates_are_found_by_name_and_file(tmp_path: Path) -> None:
    shutil.copy(BUNDLED_CHECKPOINT / "tokenizer.json", tmp_path)
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.from_pretrained(tmp_path).chat_templates == {"default": "A", "tool_use": "B"}
    (tmp_path / "chat_template.jinja").write_text("C")
    assert Tokenizer.from_pretrained(tmp_path).chat_templates["default"] == "C"
