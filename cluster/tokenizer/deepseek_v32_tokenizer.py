"""The tokenizer of DeepSeek-V3.2, which has no chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.tokenizer.deepseek_v32_encoding import MARKS, DeepseekV32Encoding
from cluster.tokenizer.fast_tokenizer import FastTokenizer
from kernels_integration.errors import InvalidRequestError, shown

_SWITCHES = ("thinking", "enable_thinking", "drop_thinking")


class DeepseekV32Tokenizer(FastTokenizer):
    """A `Tokenizer` whose chats are written by DeepSeek-V3.2's encoding.

    Template arguments: thinking, or enable_thinking (false), and drop_thinking (true).
    """

    @property
    def renders_chats(self) -> bool:
        return True

    @property
    def template_source(self) -> str | None:
        return MARKS

    def knows_field(self, name: str) -> bool:
        return name in ("tools", "response_format", "prefix")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        switches = dict(template_kwargs or {})
        for name, value in switches.items():
            if name not in _SWITCHES or not isinstance(value, bool):
                raise InvalidRequestError(
                    f"chat_template_kwargs holds {shown(name)}: {shown(value)}; DeepSeek-V3.2's encoding has "
                    f"{', '.join(_SWITCHES)}, which are true or false",
                    field="chat_template_kwargs",
                )
        encoding = DeepseekV32Encoding(
            thinking=switches.get("thinking", False) or switches.get("enable_thinking", False),
            drop_thinking=switches.get("drop_thinking", True),
            add_generation_prompt=add_generation_prompt,
        )
        return encoding.encode(messages, tools=tools)
