"""The files of a model's tokenizer: what the server reads is what clients of GetTokenizer get."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from actors.model.model_folder import MAX_INDEX_BYTES, ModelFolder
from kernels_integration.errors import CheckpointError, ConfigError

TOKENIZER = "tokenizer.json"
CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
TEMPLATE = "chat_template.jinja"
TEMPLATE_JSON = "chat_template.json"
MORE_TEMPLATES = "additional_chat_templates"
_OBJECTS = (CONFIG, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS, TEMPLATE_JSON)
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """The parsed content of each file; one that is missing is empty."""

    folder: Path
    """For messages."""
    tokenizer: bytes
    """tokenizer.json, which the `tokenizers` library parses."""
    objects: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of the JSON files that are there."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """Of the *.jinja files, by their names in the directory."""

    @classmethod
    def read(cls, path: str | Path, *, chat_template: str | Path | None = None) -> Self:
        """All files of a checkpoint directory.

        chat_template: the file of --chat-template, which takes the place of all of the checkpoint's.
        Errors: CheckpointError: no tokenizer.json, or a file that cannot be read. ConfigError for
        chat_template.
        """
        folder = ModelFolder(path)
        tokenizer = folder.read_bytes(TOKENIZER, max_bytes=MAX_INDEX_BYTES)
        if tokenizer is None:
            raise CheckpointError(
                f"{folder.path} has no tokenizer.json; save the model's fast tokenizer there "
                "(transformers: tokenizer.save_pretrained)"
            )
        objects = {name: content for name in _OBJECTS if (content := folder.read_object(name)) is not None}
        names = [TEMPLATE, *folder.names(MORE_TEMPLATES, suffix=".jinja")] if chat_template is None else []
        found = cls(
            folder=folder.path,
            tokenizer=tokenizer.removeprefix(_BOM),
            objects=objects,
            templates={name: text for name in names if (text := folder.read_text(name)) is not None},
        )
        if chat_template is None:
            return found
        return replace(found.without_templates(), templates={TEMPLATE: _given_template(Path(chat_template))})

    def without_templates(self) -> Self:
        """The same of a model whose chats no template writes."""
        config = {k: v for k, v in self.object(TOKENIZER_CONFIG).items() if k != "chat_template"}
        objects = {name: content for name, content in self.objects.items() if name != TEMPLATE_JSON}
        return replace(self, objects=objects | {TOKENIZER_CONFIG: config}, templates={})

    def object(self, name: str) -> Mapping[str, Any]:
        """A JSON file's content, empty where there is no such file."""
        return self.objects.get(name, {})

    def members(self) -> dict[str, bytes]:
        """The files as clients get them, written from what was parsed; config.json and
        tokenizer_config.json are always among them."""
        found = {TOKENIZER: self.tokenizer}
        for name in _OBJECTS:
            if name in self.objects or name in (CONFIG, TOKENIZER_CONFIG):
                found[name] = json.dumps(self.object(name), ensure_ascii=False, indent=2).encode()
        return found | {name: text.encode() for name, text in self.templates.items()}


def _given_template(file: Path) -> str:
    """Read like a checkpoint's file; but the operator's own path may lead anywhere."""
    try:
        text = ModelFolder(file.parent.resolve()).read_text(file.resolve().name)
    except (CheckpointError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"chat-template {file}: {error}; it must be a file that holds a Jinja template"
        ) from error
    if text is None:
        raise ConfigError(f"chat-template {file} is no file; it must be a file that holds a Jinja template")
    return text
