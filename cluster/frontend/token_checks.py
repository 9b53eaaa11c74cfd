"""Rules over texts and token ids that the tokenizer and the vocabulary set."""

from collections.abc import Iterable, Sequence

from actors.parameter_kinds import is_text
from actors.sampling_params import SamplingParams
from cluster.tokenizer import Tokenizer
from kernels_integration.errors import InvalidRequestError


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word at the start of a text, and after a space.

    A spaced form that only puts a token before the plain one is caught by that. vLLM also leaves out spaced
    forms of another length, and then does generate " instance" where "instance" is banned.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        plain = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        found.append(plain)
        if spaced[-len(plain) :] != plain:
            found.append(spaced)
    return tuple(dict.fromkeys(found))


def require_text(text: str, field: str) -> None:
    """Errors: InvalidRequestError where the tokenizer could not read it."""
    if not is_text(text):
        position = next(i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff")
        raise InvalidRequestError(
            f"{field} holds {text[position]!r} at character {position}, half of a surrogate pair; it must be "
            "text that UTF-8 can carry: send whole characters",
            field=field,
        )


def require_end_of_text(params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
    """Where a grammar is complete, only an end of text is legal: there must be one that may be drawn.

    Errors: InvalidRequestError.
    """
    if not eos_token_ids:
        raise InvalidRequestError(
            "structured_outputs needs a token that ends the text, and the checkpoint names none; add "
            "eos_token_id to its generation_config.json",
            field="structured_outputs",
        )
    allowed = params.allowed_token_ids
    if allowed is not None and set(allowed).isdisjoint(eos_token_ids):
        raise InvalidRequestError(
            f"allowed_token_ids holds none of the tokens {list(eos_token_ids)} that end the text, so "
            "structured_outputs could never be complete; allow one of them",
            field="allowed_token_ids",
        )


def require_candidates(
    params: SamplingParams,
    *,
    bad_words: Iterable[Sequence[int]],
    eos_token_ids: Iterable[int],
    vocab_size: int,
) -> None:
    """Every row must have a token to draw, whatever stands before it.

    Strict: a bad word counts as if its last token were always banned. Errors: InvalidRequestError.
    """
    banned = {word[-1] for word in bad_words}
    if params.min_tokens:
        banned.update(eos_token_ids, params.stop_token_ids)
    candidates = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if all(token_id in banned for token_id in candidates):
        raise InvalidRequestError(
            f"bad_words and min_tokens {params.min_tokens} may ban all {len(candidates)} tokens that may be "
            "drawn; allow more token ids, or ban fewer",
            field="bad_words" if params.bad_words else "min_tokens",
        )
