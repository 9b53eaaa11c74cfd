"""The acceptance rule against its definition."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.acceptance import count_emitted, length_of_walk
from kernels_integration.token_marks import MASKED, NO_TOKEN


def accept(drafts: list[int], tokens: list[int]) -> list[int]:
    """The contract's walk, one token at a time."""
    emitted: list[int] = []
    for i, token in enumerate(tokens):
        if token == MASKED or (i > 0 and drafts[i - 1] != tokens[i - 1]):
            break
        emitted.append(token)
    return emitted


def counts(*verifies: tuple[list[int], list[int]]) -> list[int]:
    drafts = np.array([d for ds, _ in verifies for d in ds], np.int32)
    tokens = np.array([t for _, ts in verifies for t in ts], np.int32)
    return count_emitted(drafts, tokens, np.array([len(ds) for ds, _ in verifies], np.uint8)).tolist()


def test_the_walk_stops_after_the_first_wrong_draft() -> None:
    assert counts(([], [5])) == [1]
    assert counts(([5, 6, 7], [5, 6, 7, 8])) == [4]
    assert counts(([5, 9, 7], [5, 6, 7, 8])) == [2]
    assert counts(([9, 6, 7], [5, 6, 7, 8])) == [1]
    assert counts() == []


def test_nothing_follows_a_row_without_a_token() -> None:
    assert counts(([5, 6], [5, NO_TOKEN, 7])) == [2]
    assert counts(([0, 6], [NO_TOKEN, 6, 7]), ([], [NO_TOKEN]), ([9], [5, NO_TOKEN])) == [1, 1, 1]


def test_masked_rows_emit_nothing() -> None:
    assert counts(([5, 6], [5, 6, MASKED])) == [2]
    assert counts(([5, MASKED], [5, MASKED, MASKED])) == [1]
    assert counts(([5], [MASKED, MASKED]), ([], [MASKED]), ([], [3])) == [0, 0, 1]


@given(
    st.lists(st.integers(0, 8), max_size=6).flatmap(
        lambda ks: st.tuples(
            *(
                st.tuples(
                    st.lists(st.integers(0, 1), min_size=k, max_size=k),
                    st.lists(st.integers(-1, 1), min_size=k + 1, max_size=k + 1),
                )
                for k in ks
            )
        )
    )
)
def test_a_whole_step_is_counted_as_each_verify_alone(verifies) -> None:
    assert counts(*verifies) == [len(accept(drafts, tokens)) for drafts, tokens in verifies]


@given(st.data(), st.integers(0, 8))
def test_emits_one_more_than_the_longest_right_prefix(data, k) -> None:
    token = st.integers(0, 1)
    drafts = data.draw(st.lists(token, min_size=k, max_size=k))
    tokens = data.draw(st.lists(token, min_size=k + 1, max_size=k + 1))
    right = max(n for n in range(k + 1) if drafts[:n] == tokens[:n])
    assert counts((drafts, tokens)) == [right + 1]


@given(st.data(), st.integers(1, 5), st.integers(0, 6))
def test_the_walk_is_the_same_of_arrays_and_tensors(data, num_verifies, k) -> None:
    def rows(low: int, width: int) -> list[list[int]]:
        row = st.lists(st.integers(low, 1), min_size=width, max_size=width)
        return data.draw(st.lists(row, min_size=num_verifies, max_size=num_verifies))

    drafts, tokens = np.array(rows(0, k)).reshape(num_verifies, k), np.array(rows(NO_TOKEN, k + 1))
    expected = [len(accept(d, t)) for d, t in zip(drafts.tolist(), tokens.tolist(), strict=True)]
    assert length_of_walk(drafts, tokens.copy()).tolist() == expected
    found = length_of_walk(torch.from_numpy(drafts), torch.from_numpy(tokens))
    assert (found.tolist(), found.dtype) == (expected, torch.int64)
