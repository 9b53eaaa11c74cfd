"""How many characters a prompt may have at most: told before the work of tokenising it is done."""

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

_KEEPING_NORMALIZERS = ("Prepend", "ByteLevel")
_KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Split", "Digits", "Metaspace", "Punctuation", "Sequence")
_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def longest_token(backend: tokenizers.Tokenizer) -> int | None:
    """The most characters of a text that one token can stand for; None where no bound can be shown.

    It can where nothing in a text is skipped, shortened or joined into one unknown token: for byte-level BPE
    and for byte fallback, as all served families have them.
    """
    parts = json.loads(backend.to_str())
    vocabulary = backend.get_vocab()
    if not (_keeps_length(parts["normalizer"]) and _keeps_all(parts["pre_tokenizer"])):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"]):
        return None
    if not _knows_every_byte(parts, vocabulary):
        return None
    return max(map(len, vocabulary))


def _knows_every_byte(parts: Mapping[str, Any], vocabulary: Mapping[str, int]) -> bool:
    model = parts["model"]
    if model.get("type") != "BPE":
        return False
    if "ByteLevel" in _types(parts["pre_tokenizer"]) | _types(parts["normalizer"]):
        return all(letter in vocabulary for letter in tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return bool(model.get("byte_fallback")) and all(token in vocabulary for token in _BYTE_TOKENS)


def _types(part: Mapping[str, Any] | None) -> set[str]:
    if part is None:
        return set()
    inner = part.get("normalizers", part.get("pretokenizers", ()))
    return {part["type"]}.union(*map(_types, inner))


def _keeps_length(normalizer: Mapping[str, Any] | None) -> bool:
    if normalizer is None or normalizer["type"] in _KEEPING_NORMALIZERS:
        return True
    if normalizer["type"] == "Sequence":
        return all(map(_keeps_length, normalizer["normalizers"]))
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return pattern is not None and len(normalizer["content"]) >= len(pattern)
    return False


def _keeps_all(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return True
    if pre_tokenizer["type"] not in _KEEPING_PRE_TOKENIZERS or pre_tokenizer.get("behavior") == "Removed":
        return False
    return all(map(_keeps_all, pre_tokenizer.get("pretokenizers", ())))
