"""The tokenizer of a checkpoint directory, chosen by --tokenizer-mode."""

from pathlib import Path
from typing import Literal

from cluster.tokenizer.deepseek_v32_tokenizer import DeepseekV32Tokenizer
from cluster.tokenizer.fast_tokenizer import FastTokenizer
from cluster.tokenizer.files import CONFIG, TokenizerFiles
from cluster.tokenizer.template_files import chat_templates
from cluster.tokenizer.tokenizer import Tokenizer
from kernels_integration.errors import CheckpointError, ConfigError

TokenizerMode = Literal["auto", "hf", "deepseek_v32"]


def load_tokenizer(
    path: str | Path, *, mode: TokenizerMode = "auto", chat_template: str | Path | None = None
) -> Tokenizer:
    """Read a checkpoint's tokenizer files.

    mode: "hf" renders chats by Jinja templates; "deepseek_v32" by DeepSeek-V3.2's encoding; "auto" by that
    encoding where config.json says deepseek_v32 and there is no template.
    chat_template: a file that is used instead of all templates of the checkpoint.
    Errors: CheckpointError; ConfigError for chat_template.
    """
    files = TokenizerFiles.read(path, chat_template=chat_template)
    if mode == "deepseek_v32":
        return DeepseekV32Tokenizer.of_files(files.without_templates(), chat_templates={})
    try:
        templates = chat_templates(files)
    except CheckpointError as error:
        if chat_template is None:
            raise
        raise ConfigError(
            f"chat-template {chat_template}: {error}; it must be a file that holds a Jinja template"
        ) from error
    if mode == "auto" and not templates and files.object(CONFIG).get("model_type") == "deepseek_v32":
        return DeepseekV32Tokenizer.of_files(files, chat_templates={})
    return FastTokenizer.of_files(files, chat_templates=templates)
