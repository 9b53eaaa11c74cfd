"""What the rest of the system needs of a tokenizer, whichever it is."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tokenizers

from cluster.tokenizer.files import TokenizerFiles
from cluster.tokenizer.token_bytes import TokenBytes


class Tokenizer(Protocol):
    """Text to ids and back, and chats to text. Implementations: FastTokenizer, DeepseekV32Tokenizer."""

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The `tokenizers` object, special tokens included, as the coordinator and streams use it."""

    @property
    def files(self) -> TokenizerFiles:
        """What it was made of, and what clients get to make the same."""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The named tokens of tokenizer_config.json, such as {"bos_token": "<s>"}."""

    @property
    def token_bytes(self) -> TokenBytes:
        """The bytes of each token, for log probabilities."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def renders_chats(self) -> bool:
        """Whether `render_chat` can work at all."""

    @property
    def template_source(self) -> str | None:
        """A text with the marks that chats are written with; None: they cannot be written."""

    def knows_field(self, name: str) -> bool:
        """Whether chats are written with a field of this name of a message, a call or a tool, beside those
        that OpenAI's have."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of the text. Special tokens written in the text become their ids."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat, with the special tokens that it begins with.

        messages: as `checked_messages` returns them. tools: as OpenAI's, of type function.
        template_kwargs: the template's own arguments, such as thinking.
        Errors: InvalidRequestError: no template, or messages and arguments that it refuses.
        """
