"""A checkpoint's tokenizer as transformers would load it, on the `tokenizers` library alone."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import tokenizers

from cluster.chat.template import ChatTemplate
from cluster.tokenizer.added_tokens import added_tokens, special_tokens
from cluster.tokenizer.files import TOKENIZER, TokenizerFiles
from cluster.tokenizer.token_bytes import TokenBytes
from kernels_integration.errors import CheckpointError, InvalidRequestError, shortened


class FastTokenizer:
    """A `Tokenizer` whose chats are rendered by Jinja templates.

    chat_templates: by name; a checkpoint with one template has it under "default". With tools the one named
    "tool_use" is used, where there is one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        files: TokenizerFiles,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, ChatTemplate],
    ) -> None:
        self.backend = backend
        self.files = files
        self.special_tokens = dict(special_tokens)
        self.chat_templates = dict(chat_templates)

    @classmethod
    def of_files(cls, files: TokenizerFiles, *, chat_templates: Mapping[str, ChatTemplate]) -> Self:
        """The tokenizer that a checkpoint's files describe.

        What is added to a text (bos, eos) is tokenizer.json's post-processor alone: transformers ignores
        add_bos_token and add_eos_token of tokenizer_config.json where there is a tokenizer.json.

        Errors: CheckpointError naming the file and what is wrong in it.
        """
        backend = _backend(files)
        backend.no_padding()
        backend.no_truncation()
        special = special_tokens(files)
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        backend.add_tokens(added_tokens(files, special, known))
        return cls(backend, files=files, special_tokens=special, chat_templates=chat_templates)

    @property
    def eos_token_id(self) -> int | None:
        text = self.special_tokens.get("eos_token")
        return None if text is None else self.backend.token_to_id(text)

    @property
    def renders_chats(self) -> bool:
        return bool(self.chat_templates)

    @property
    def template_source(self) -> str | None:
        return "\n".join(template.source for template in self.chat_templates.values()) or None

    def knows_field(self, name: str) -> bool:
        word = re.escape(name)
        read = rf"""\.{word}\b(?!\s*\()|(\[|\bget\()\s*(['"]){word}\2|(['"]){word}\3\s+(not\s+)?in\b"""
        return re.search(read, self.template_source or "") is not None

    @cached_property
    def token_bytes(self) -> TokenBytes:
        return TokenBytes(self.backend)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # Unlike `encode`, it lets other threads run; without offsets it takes half the time and memory.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        default = self.chat_templates.get("default")
        template = self.chat_templates.get("tool_use", default) if tools else default
        if template is None:
            names = ", ".join(sorted(self.chat_templates))
            found = f"templates only under the names {names}, none under default" if names else "none"
            raise InvalidRequestError(
                f"the model has no chat template ({found}); send a prompt instead, or give the template by "
                "--chat-template FILE or as chat_template.jinja in the checkpoint",
                field="messages",
            )
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            special_tokens=self.special_tokens,
            template_kwargs=template_kwargs,
        )


def _backend(files: TokenizerFiles) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_buffer(files.tokenizer)
    except BaseException as error:  # the library raises plain Exception, and a panic is not even that
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(
            f"{files.folder / TOKENIZER} cannot be read as a tokenizer: {shortened(str(error))}"
        ) from None
