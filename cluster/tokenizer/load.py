"""The tokenizer of a checkpoint directory, chosen by --tokenizer-mode."""

from pathlib import Path
from typing import Literal

from cluster.tokenizer.deepseek_v32_tokenizer import DeepseekV32Tokenizer
from cluster.tokenizer.fast_tokenizer import FastTokenizer
from cluster.tokenizer.json_files import read_json_object
from cluster.tokenizer.template_files import DEFAULT, checkpoint_templates, given_template
from cluster.tokenizer.tokenizer import Tokenizer

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
    directory = Path(path)
    if mode == "deepseek_v32":
        return DeepseekV32Tokenizer.from_pretrained(directory, chat_templates={})
    if chat_template is not None:
        return FastTokenizer.from_pretrained(
            directory, chat_templates={DEFAULT: given_template(chat_template)}
        )
    templates = checkpoint_templates(directory)
    if mode == "auto" and not templates and _model_type(directory) == "deepseek_v32":
        return DeepseekV32Tokenizer.from_pretrained(directory, chat_templates={})
    return FastTokenizer.from_pretrained(directory, chat_templates=templates)


def _model_type(directory: Path) -> object:
    return read_json_object(directory / "config.json").get("model_type")
