"""Tokens that stand beside a tokenizer's vocabulary, from wherever a checkpoint declares them.

As transformers 5.24 reads them: tokenizer_config.json's added_tokens_decoder; without one, added_tokens.json,
and special_tokens_map.json, whose entries replace those of tokenizer_config.json; then the named special
tokens and the extra ones. A token that the vocabulary has keeps its id and stops being split.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tokenizers import AddedToken

from cluster.tokenizer.files import ADDED_TOKENS, SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG, TokenizerFiles
from kernels_integration.errors import CheckpointError, shown

SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_DECODER = "added_tokens_decoder"
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
"""The newer name goes first."""
_FLAGS = ("lstrip", "rstrip", "single_word")
_MAX_ID = 2**31 - 1


def special_tokens(files: TokenizerFiles) -> dict[str, str]:
    """The named tokens, such as {"bos_token": "<s>"}: the seven of old, and the model's own.

    Errors: CheckpointError when one of the seven is no token.
    """
    declared = _declared(files)
    found = {
        name: _text(declared[name], f"{TOKENIZER_CONFIG}: {name}")
        for name in SPECIAL_TOKEN_NAMES
        if declared.get(name) is not None
    }
    found |= {
        name: value
        for name, value in declared.items()
        if name.endswith("_token") and name not in found and isinstance(value, str)
    }
    _, extra = _extra(declared)
    if isinstance(extra, Mapping):
        found |= {name: _text(token, f"{TOKENIZER_CONFIG}: {name}") for name, token in extra.items()}
    return found


def added_tokens(
    files: TokenizerFiles, special: Mapping[str, str], known: Collection[str]
) -> list[AddedToken]:
    """What to add to tokenizer.json's own tokens, in this order.

    special: of `special_tokens`. known: tokens that tokenizer.json itself declares as added.
    Errors: CheckpointError naming the file and the entry that is no token.
    """
    declared = _declared(files)
    extra_place, extra = _extra(declared)
    if not isinstance(extra, list | Mapping):
        raise CheckpointError(
            f"{extra_place} is {shown(extra)}; it must be a list of tokens, or an object of named ones"
        )
    tokens = [_token(entry, place) for place, entry in _decoder_entries(files)]
    found = {token.content: token for token in tokens}
    named = [(f"{TOKENIZER_CONFIG}: {name}", declared.get(name, text)) for name, text in special.items()]
    more = [] if isinstance(extra, Mapping) else [(extra_place, entry) for entry in extra]
    for place, entry in named + more:
        token = _token(entry, place)
        if token.content not in known:
            found.setdefault(token.content, token)
    for text in special.values():
        if text in found:
            found[text].special = True
    return [token for text, token in found.items() if text]


def _declared(files: TokenizerFiles) -> Mapping[str, Any]:
    config = files.object(TOKENIZER_CONFIG)
    return config if _DECODER in config else {**config, **files.object(SPECIAL_TOKENS_MAP)}


def _extra(declared: Mapping[str, Any]) -> tuple[str, Any]:
    """Where the extra special tokens are declared, and they."""
    name = next((name for name in _EXTRA if declared.get(name) is not None), _EXTRA[0])
    value = declared.get(name)
    return f"{TOKENIZER_CONFIG}: {name}", [] if value is None else value


def _decoder_entries(files: TokenizerFiles) -> Iterable[tuple[str, Any]]:
    """Where each numbered token is declared, and its entry, by id."""
    decoder = files.object(TOKENIZER_CONFIG).get(_DECODER)
    if decoder is not None:
        file = TOKENIZER_CONFIG
        if not isinstance(decoder, Mapping):
            raise CheckpointError(
                f"{file}: {_DECODER} is {shown(decoder)}; it must be an object of tokens by their ids"
            )
        by_id = {_token_id(number, f"{file}: {_DECODER}"): entry for number, entry in decoder.items()}
    else:
        file = ADDED_TOKENS
        special = set(special_tokens(files).values())
        by_id = {
            _token_id(number, f"{file}: {text!r}"): {"content": text, "special": text in special}
            for text, number in files.object(ADDED_TOKENS).items()
        }
    return [(f"{file}: token {number}", by_id[number]) for number in sorted(by_id)]


def _token(entry: object, place: str) -> AddedToken:
    """A token is text, which is special, or an object that holds it as "content" and says more."""
    content = _text(entry, place)
    flags = entry if isinstance(entry, Mapping) else {"special": True}
    for name in (*_FLAGS, "special", "normalized"):
        if not isinstance(flags.get(name, False), bool):
            raise CheckpointError(f"{place}: {name} is {shown(flags[name])}; it must be true or false")
    special = flags.get("special", False)
    return AddedToken(
        content,
        special=special,
        normalized=flags.get("normalized", not special),
        **{name: flags.get(name, False) for name in _FLAGS},
    )


def _text(value: object, place: str) -> str:
    content = value.get("content") if isinstance(value, Mapping) else value
    if isinstance(content, str):
        return content
    raise CheckpointError(f"{place} is {shown(value)}; it must be a text, or an object with content")


def _token_id(value: object, place: str) -> int:
    digits = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if digits.isascii() and digits.isdigit() and len(digits) <= len(str(_MAX_ID)) and int(digits) <= _MAX_ID:
        return int(digits)
    raise CheckpointError(
        f"{place} has the id {shown(value)}; it must be a whole number of at most {_MAX_ID}"
    )
