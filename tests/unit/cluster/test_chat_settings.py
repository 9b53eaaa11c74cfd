"""How chats are written and what requests leave open: the settings, bodies and flags of it."""

import os
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import main
from cluster.config import BUNDLED_CHECKPOINT, EngineArgs, load_settings
from cluster.config.resolve import resolve
from cluster.frontend.front_end import ModelFrontend
from cluster.openai.bodies import parse_body
from kernels_integration.errors import ConfigError, InvalidRequestError

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
TEMPLATE = "{{ messages[0].content }}{{ '<think>' if thinking else '</think>' }}"


def resolved(**settings: Any) -> Any:
    return resolve(load_settings(EngineArgs, settings, environ={}).args)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    file = tmp_path / "thinking.jinja"
    file.write_text(TEMPLATE)
    return file


def test_a_group_knows_them(template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolved()
    assert (config.tokenizer_mode, config.chat_template, config.generation_config) == ("auto", None, "auto")
    monkeypatch.chdir(template.parent)
    config = resolved(chat_template=template.name, generation_config="vllm")
    assert config.chat_template == str(template)  # actors run elsewhere
    frontend = ModelFrontend.of_group(config)
    assert frontend.default_sampling_params == {}
    assert frontend.tokenizer.render_chat(MESSAGES) == "Hi</think>"
    deepseek = ModelFrontend.of_group(resolved(tokenizer_mode="deepseek_v32"))
    assert deepseek.tokenizer.render_chat(MESSAGES).startswith("<｜begin▁of▁sentence｜><｜User｜>Hi")
    assert ModelFrontend.of_group(resolved(max_logprobs=3)).max_logprobs == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"chat_template": "/nope"}, "chat-template /nope is no file"),
        ({"chat_template": os.curdir}, "is no file"),
        ({"chat_template": "x", "tokenizer_mode": "deepseek_v32"}, "exclude each other"),
        ({"tokenizer_mode": "slow"}, "auto, hf or deepseek_v32"),
        ({"generation_config": "none"}, "auto or vllm"),
    ],
)
def test_what_cannot_work_is_said(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved(**settings)


def test_bodies_switch_thinking(template: Path) -> None:
    frontend = ModelFrontend.from_pretrained(
        BUNDLED_CHECKPOINT, served_model_name="m", max_model_len=64, chat_template=template
    )

    def prompt(**body: Any) -> str:
        request = parse_body(CHAT, {"messages": MESSAGES} | body).to_requests("r", frontend)[0]
        return frontend.tokenizer.decode(request.prompt_token_ids)

    assert prompt() == "Hi</think>"
    assert prompt(chat_template_kwargs={"thinking": True}) == "Hi<think>"
    with pytest.raises(InvalidRequestError) as caught:
        prompt(chat_template_kwargs={"messages": []})
    assert caught.value.field == "chat_template_kwargs"


def test_a_body_wins_over_the_checkpoint_and_vllm_leaves_it_alone() -> None:
    for mode, expected in (("auto", (0.7, 0.9)), ("vllm", (1.0, 1.0))):
        frontend = ModelFrontend.of_group(resolved(generation_config=mode))
        params = parse_body(CHAT, {"messages": MESSAGES}).to_requests("r", frontend)[0].params
        assert (params.temperature, params.top_p) == expected
        params = (
            parse_body(CHAT, {"messages": MESSAGES, "temperature": 0.1}).to_requests("r", frontend)[0].params
        )
        assert (params.temperature, params.top_p) == (0.1, expected[1])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--chat-template-kwargs", "{}"], "pass --chat too"),
        (["--chat", "--chat-template-kwargs", "[1]"], "must be a JSON object"),
        (["--chat", "--chat-template-kwargs", "{"], "must be a JSON object"),
        (["--chat", "--chat-template-kwargs", '{"tools": []}'], "chat_template_kwargs holds 'tools'"),
    ],
)
def test_the_command_line_checks_template_arguments(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "Hi", *argv])
    assert caught.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())
