"""What the answers of a batch depend on, beside its rows: by these two runs may share one output."""

import hashlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from actors.config import GroupConfig
from actors.model.model_folder import ModelFolder

_OF_ANSWERS = (
    "served_model_name",
    "load_format",
    "max_model_len",
    "dtype",
    "kv_cache_dtype",
    "indexer_kv_dtype",
    "rejection_sampling",
    "tokenizer_mode",
    "tool_call_parser",
    "reasoning_parser",
    "generation_config",
    "seed",
)
"""Topology, drafts, batch sizes and caches are not among them: streams do not depend on those."""
_SUFFIXES = (".json", ".jinja", ".model", ".safetensors", ".txt")
_SAMPLE_BYTES = 64 * 2**10
_WHOLE_BYTES = 64 * 2**20


def answer_settings(config: GroupConfig) -> dict[str, Any]:
    """By name, in JSON's types; `model` is a digest of the checkpoint, wherever it lies."""
    values = asdict(config)
    found = {name: values[name] for name in _OF_ANSWERS}
    if config.rejection_sampling == "standard":  # there the streams depend on the drafts
        found["num_speculative_tokens"] = config.num_speculative_tokens
    template = config.chat_template
    found["chat_template"] = None if template is None else _digest_of(Path(template))
    return {"model": checkpoint_digest(Path(config.model_path))} | found


def checkpoint_digest(folder: Path) -> str:
    """Of the names, sizes and content of the files that count; of large ones their beginning and end.

    A file of weights begins with the names and places of its tensors, and ends with values: one that was
    trained on shows.
    """
    total = hashlib.blake2b(digest_size=16)
    for name in ModelFolder(folder).names():
        path = folder / name
        if path.suffix in _SUFFIXES and path.is_file():
            total.update(f"{name}\0{path.stat().st_size}\0{_digest_of(path)}\0".encode())
    return total.hexdigest()


def _digest_of(path: Path) -> str:
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= _WHOLE_BYTES and path.suffix != ".safetensors":
            found.update(stream.read())
        else:
            found.update(stream.read(_SAMPLE_BYTES))
            stream.seek(max(0, size - _SAMPLE_BYTES))
            found.update(stream.read(_SAMPLE_BYTES))
    return found.hexdigest()
