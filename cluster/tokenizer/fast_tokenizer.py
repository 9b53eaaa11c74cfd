"""A checkpoint's tokenizer as transformers would load it, on the `tokenizers` library alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import AddedToken

from cluster.tokenizer.chat_template import ChatTemplate
from cluster.tokenizer.json_files import read_json_object
from kernels_integration.errors import CheckpointError, InvalidRequestError

SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class FastTokenizer:
    """A `Tokenizer` whose chats are rendered by Jinja templates.

    chat_templates: by name; a checkpoint with one template has it under "default". With tools the one named
    "tool_use" is used, where there is one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, ChatTemplate],
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_templates = dict(chat_templates)

    @classmethod
    def from_pretrained(cls, path: str | Path, *, chat_templates: Mapping[str, ChatTemplate]) -> Self:
        """Read tokenizer.json and tokenizer_config.json of a checkpoint directory.

        What is added to a text (bos, eos) is tokenizer.json's post-processor alone: transformers ignores
        add_bos_token and add_eos_token of tokenizer_config.json where there is a tokenizer.json.

        Errors: CheckpointError when tokenizer.json is missing or a file cannot be read.
        """
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                f"{directory} has no tokenizer.json; save the model's fast tokenizer there "
                "(transformers: tokenizer.save_pretrained)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{file} cannot be read as a tokenizer: {error}") from error
        backend.no_padding()
        backend.no_truncation()
        config = read_json_object(directory / "tokenizer_config.json")
        special = {
            name: text for name in SPECIAL_TOKEN_NAMES if (text := _token_text(config.get(name))) is not None
        }
        _add_missing_tokens(backend, config, special)
        return cls(backend, special_tokens=special, chat_templates=chat_templates)

    @property
    def eos_token_id(self) -> int | None:
        text = self.special_tokens.get("eos_token")
        return None if text is None else self.backend.token_to_id(text)

    @property
    def renders_chats(self) -> bool:
        return bool(self.chat_templates)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

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


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    """Tokens that only tokenizer_config.json knows are added behind the vocabulary, as transformers does."""
    decoder = config.get("added_tokens_decoder")
    entries = (
        [entry for _, entry in sorted(decoder.items(), key=lambda item: _token_id(item[0]))]
        if isinstance(decoder, Mapping)
        else []
    )
    extra = config.get("extra_special_tokens", config.get("additional_special_tokens")) or []
    more = list(extra.values()) if isinstance(extra, Mapping) else list(extra)
    for entry in [*entries, *special.values(), *more]:
        text = _token_text(entry)
        if text is None or backend.token_to_id(text) is not None:
            continue
        flags = entry if isinstance(entry, Mapping) else {}
        is_special = bool(flags.get("special", True))
        token = AddedToken(
            text,
            special=is_special,
            normalized=bool(flags.get("normalized", not is_special)),
            lstrip=bool(flags.get("lstrip", False)),
            rstrip=bool(flags.get("rstrip", False)),
            single_word=bool(flags.get("single_word", False)),
        )
        backend.add_special_tokens([token]) if is_special else backend.add_tokens([token])


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit()):
        raise CheckpointError(
            f"tokenizer_config.json: added_tokens_decoder has the key {key!r}; it must be a token id"
        )
    return int(key)


def _token_text(value: object) -> str | None:
    """A token is text, or an object that holds it as "content"."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None
