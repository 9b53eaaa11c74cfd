"""Prompts that are too long are refused before the work; tokenising lets other threads run."""

import random
import threading
import time

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from cluster.config import BUNDLED_CHECKPOINT
from cluster.frontend.front_end import ModelFrontend
from cluster.frontend.prompt_bound import longest_token
from cluster.tokenizer import load_tokenizer
from kernels_integration.errors import InvalidRequestError

BACKEND: tokenizers.Tokenizer = load_tokenizer(BUNDLED_CHECKPOINT).backend


@pytest.fixture(scope="module")
def frontend() -> ModelFrontend:
    return ModelFrontend.from_pretrained(BUNDLED_CHECKPOINT, served_model_name="tiny", max_model_len=64)


def byte_fallback() -> tokenizers.Tokenizer:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "▁a": 258, "<unk>": 259}
    model = models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.ByteFallback()
    return backend


@pytest.mark.product(16)
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("make", [lambda: BACKEND, byte_fallback], ids=["byte level", "byte fallback"])
def test_no_text_has_more_characters_than_its_tokens_can_stand_for(make, seed):
    """Over words, one repeated letter, spaces, other scripts, special tokens and noise."""
    backend, rng = make(), random.Random(seed)
    vocabulary = sorted(backend.get_vocab())
    kinds = [
        lambda: rng.choice(vocabulary),
        lambda: rng.choice(" \n\t=-_a") * rng.randrange(1, 300),
        lambda: chr(rng.randrange(0x20, 0xD7FF)),
        lambda: chr(rng.randrange(0x10000, 0x10FFFF)),
    ]
    text = "".join(rng.choice(kinds)() for _ in range(rng.randrange(1, 60)))
    longest = longest_token(backend)
    assert longest is not None
    assert len(text) <= longest * len(backend.encode(text, add_special_tokens=False).ids)


def changed(edit):
    backend = tokenizers.Tokenizer.from_str(BACKEND.to_str())
    edit(backend)
    return backend


@pytest.mark.parametrize(
    "edit",
    [
        lambda b: setattr(b, "normalizer", normalizers.NFKC()),
        lambda b: setattr(b, "normalizer", normalizers.Replace("    ", "")),
        lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
        lambda b: setattr(b, "pre_tokenizer", None),
        lambda b: b.add_tokens([AddedToken("<|wide|>", lstrip=True)]),
    ],
)
def test_there_is_no_bound_where_a_token_may_stand_for_any_length(edit):
    assert longest_token(changed(edit)) is None


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(frontend, monkeypatch):
    limit = frontend.max_prompt_characters
    assert limit == 63 * max(map(len, BACKEND.get_vocab()))
    monkeypatch.setattr(frontend.tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenised"))
    with pytest.raises(InvalidRequestError, match=f"prompt has {limit + 1} characters; max_model_len 64"):
        frontend.encode_prompt("a" * (limit + 1))
    with pytest.raises(InvalidRequestError, match=r"messages have \d+ characters") as caught:
        frontend.render_chat([{"role": "user", "content": "a" * limit}])
    assert caught.value.field == "messages"


def test_a_text_up_to_the_bound_is_judged_by_its_tokens(frontend):
    longest = max((token for token in BACKEND.get_vocab() if token.isascii() and token.isalpha()), key=len)
    assert len(frontend.encode_prompt(longest)) == 2
    with pytest.raises(InvalidRequestError, match=r"prompt has \d+ tokens"):
        frontend.encode_prompt("a" * frontend.max_prompt_characters)


@pytest.mark.slow
def test_other_threads_run_while_a_long_text_is_tokenised():
    """A thread that counts every millisecond is stopped for the whole time by `encode`."""
    text = "many words of a text " * 50_000
    gaps: list[float] = []
    done = threading.Event()

    def count() -> None:
        last = time.monotonic()
        while not done.is_set():
            time.sleep(0.001)
            gaps.append(time.monotonic() - last)
            last += gaps[-1]

    tokenizer = load_tokenizer(BUNDLED_CHECKPOINT)
    thread = threading.Thread(target=count)
    thread.start()
    started = time.monotonic()
    ids = tokenizer.encode(text)
    taken = time.monotonic() - started
    done.set()
    thread.join()
    assert ids == BACKEND.encode(text).ids
    assert max(gaps) < taken / 2
