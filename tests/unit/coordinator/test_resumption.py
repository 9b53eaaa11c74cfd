"""A sequence goes on at a coordinator that knows of it what its reader was told."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from actors.requests import Progress, Request, RequestUpdate
from kernels_integration.errors import InvalidRequestError
from tests.support.fake_group import Group, group_config, request
from tests.support.groups import load_tokenizer

TOKENIZER = load_tokenizer()
LETTERS = [TOKENIZER.decode([token]) for token in range(60, 97)]


def updates_of(group: Group, asked: Request) -> list[RequestUpdate]:
    group.coordinator.submit(asked)
    group.run()
    found = group.updates_of(asked.request_id)
    assert all(isinstance(update, RequestUpdate) for update in found), found
    return [update for update in found if isinstance(update, RequestUpdate)]


def group() -> Group:
    return Group(tokenizer=TOKENIZER)


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 999),
    prompt=st.lists(st.integers(2, 96), min_size=1, max_size=40),
    cut=st.integers(0, 30),
    stop=st.lists(st.sampled_from(LETTERS), max_size=3),
    min_tokens=st.integers(0, 10),
)
def test_a_stream_that_goes_on_elsewhere_is_the_undisturbed_one(
    seed: int, prompt: list[int], cut: int, stop: list[str], min_tokens: int
) -> None:
    asked = request(
        prompt=prompt, seed=seed, max_tokens=30, min_tokens=min_tokens, stop=tuple(stop), stop_token_ids=(50,)
    )
    whole = updates_of(group(), asked)
    told = whole[: cut % len(whole)]
    if not told:
        return
    progress = Progress(
        token_ids=tuple(token for update in told for token in update.token_ids),
        num_cached_tokens=told[-1].num_cached_tokens,
        num_draft_tokens=told[-1].num_draft_tokens,
        num_accepted_tokens=told[-1].num_accepted_tokens,
    )
    rest = updates_of(group(), replace(asked, incarnation=1, progress=progress))
    both = [*told, *rest]
    assert [t for u in both for t in u.token_ids] == [t for u in whole for t in u.token_ids]
    assert (rest[-1].finish_reason, rest[-1].matched_stop) == (
        whole[-1].finish_reason,
        whole[-1].matched_stop,
    )
    assert rest[-1].num_completion_tokens == whole[-1].num_completion_tokens
    assert rest[-1].num_prompt_tokens == len(prompt)
    assert rest[-1].phases is not None
    # What was held stays held until it is decided: nobody may see a token sooner than undisturbed.
    held = {}
    for updates in (whole, both):
        num_tokens = 0
        for update in updates:
            num_tokens += len(update.token_ids)
            held.setdefault(num_tokens, set()).add(update.num_held)
    assert all(len(numbers) == 1 for numbers in held.values())


@pytest.mark.parametrize(
    ("token_ids", "params", "match"),
    [
        ((5, 6, 7), {"max_tokens": 3}, "goes on from 3 tokens behind 3"),
        ((5, 50), {"stop_token_ids": (50,)}, "ended among them"),
        ((5, 2**31 - 1), {}, "token ids are below"),
    ],
)
def test_progress_that_cannot_be_is_refused(
    token_ids: tuple[int, ...], params: dict[str, object], match: str
) -> None:
    tested = Group(group_config(vocab_size=97))
    with pytest.raises(InvalidRequestError, match=match):
        tested.coordinator.submit(replace(request(**params), progress=Progress(token_ids=token_ids)))
    assert not tested.coordinator.has_work
