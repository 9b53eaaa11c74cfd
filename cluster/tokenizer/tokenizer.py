"""A checkpoint's tokenizer as transformers would load it, on the `tokenizers` library alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from cluster.tokenizer.json_files import read_json_object
from kernels_integration.errors import CheckpointError

SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """Text to ids and back. `backend` is the `tokenizers.Tokenizer`, special tokens included.

    special_tokens: the named tokens of tokenizer_config.json, such as {"bos_token": "<s>"}.
    chat_templates: by name; a checkpoint with one template has it under "default".
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_templates = dict(chat_templates)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "Tokenizer":
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja of a checkpoint directory.

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
        # Named tokens that tokenizer.json lacks are added, as transformers does.
        backend.add_special_tokens(
            [
                AddedToken(text, special=True, normalized=False)
                for text in special.values()
                if backend.token_to_id(text) is None
            ]
        )
        return cls(backend, special_tokens=special, chat_templates=_read_chat_templates(directory, config))

    @property
    def eos_token_id(self) -> int | None:
        text = self.special_tokens.get("eos_token")
        return None if text is None else self.backend.token_to_id(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of the text. Special tokens written in the text become their ids."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def _token_text(value: object) -> str | None:
    """A special token is text, or an object that holds it as "content"."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None


def _read_chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """chat_template.jinja wins over tokenizer_config.json: one template, or a list of named ones."""
    inline = config.get("chat_template")
    templates = {}
    if isinstance(inline, str):
        templates["default"] = inline
    elif isinstance(inline, list):
        templates = {str(entry["name"]): str(entry["template"]) for entry in inline}
    file = directory / "chat_template.jinja"
    if file.is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    return templates
