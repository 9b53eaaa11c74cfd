from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_integration.collectives import SoloCollectives
from kernels_integration.collectives.in_process import InProcessCollectives
from kernels_integration.dcp import (
    DcpGroup,
    global_position,
    local_index,
    local_length,
    merge_attention,
    merge_partials,
    owner,
)
from kernels_integration.errors import ConfigError

INF = float("inf")


def deal(num_tokens: int, W: int, S: int) -> list[list[int]]:
    """The definition, played out: S tokens to each rank in turn. Entry r: rank r's global positions."""
    hands: list[list[int]] = [[] for _ in range(W)]
    rank = 0
    for g in range(num_tokens):
        hands[rank].append(g)
        if g % S == S - 1:
            rank = (rank + 1) % W
    return hands


groups = {"W": st.integers(1, 9), "S": st.integers(1, 9)}


@given(num_tokens=st.integers(0, 300), **groups)
@settings(max_examples=200, deadline=None)
def test_arithmetic_equals_dealing(num_tokens, W, S):
    hands = deal(num_tokens, W, S)
    for r, hand in enumerate(hands):
        assert local_length(num_tokens, r, W, S) == len(hand)
        assert [global_position(j, r, W, S) for j in range(len(hand))] == hand
        assert [owner(g, W, S) for g in hand] == [r] * len(hand)
        assert [local_index(g, W, S) for g in hand] == list(range(len(hand)))


@given(num_tokens=st.integers(1, 300), **groups)
@settings(max_examples=100, deadline=None)
def test_tensors_and_ints_agree(num_tokens, W, S):
    positions = torch.arange(num_tokens)
    for x in (positions, positions.int()):
        for function in (owner, local_index):
            assert function(x, W, S).tolist() == [function(g, W, S) for g in range(num_tokens)]
        for of_rank in (global_position, local_length):
            for r in range(W):
                values = of_rank(x, r, W, S)
                assert values.dtype == x.dtype
                assert values.tolist() == [of_rank(g, r, W, S) for g in range(num_tokens)]


def count_from_the_end(num_tokens: int, row: int, num_rows: int, r: int, W: int, S: int) -> int:
    """The formula of an unsharded cache, which the contract warns of."""
    return local_length(num_tokens, r, W, S) - num_rows + row + 1


@given(num_tokens=st.integers(1, 200), num_drafts=st.integers(0, 8), **groups)
@settings(max_examples=200, deadline=None)
def test_verify_rows_see_all_tokens_up_to_their_own(num_tokens, num_drafts, W, S):
    num_rows = min(num_drafts + 1, num_tokens)
    hands = deal(num_tokens, W, S)
    for row in range(num_rows):
        p = num_tokens - num_rows + row
        seen = [hands[r][: local_length(p + 1, r, W, S)] for r in range(W)]
        assert sorted(chain.from_iterable(seen)) == list(range(p + 1))
        wrong = [count_from_the_end(num_tokens, row, num_rows, r, W, S) for r in range(W)]
        is_last = row == num_rows - 1
        assert (wrong == [len(hand) for hand in seen]) == (W == 1 or is_last)


def test_counting_from_the_end_drops_the_newest_tokens():
    """3 drafts, 2 ranks: the first row loses tokens on one rank that it must see."""
    right = [local_length(9, r, 2, 1) for r in range(2)]
    wrong = [count_from_the_end(12, 0, 4, r, 2, 1) for r in range(2)]
    assert right == [5, 4]
    assert wrong == [3, 3]


def test_short_requests_leave_shards_empty():
    assert [local_length(3, r, 4, 4) for r in range(4)] == [3, 0, 0, 0]
    assert [local_length(0, r, 4, 1) for r in range(4)] == [0, 0, 0, 0]


def test_group_methods_are_the_functions_of_its_rank():
    comm = InProcessCollectives.create(3)[1]
    group = DcpGroup(interleave=4, comm=comm)
    g = torch.arange(50)
    assert (group.size, group.rank) == (3, 1)
    assert torch.equal(group.owner(g), owner(g, 3, 4))
    assert torch.equal(group.local_index(g), local_index(g, 3, 4))
    assert torch.equal(group.global_position(g), global_position(g, 1, 3, 4))
    assert torch.equal(group.local_length(g), local_length(g, 1, 3, 4))
    assert group.local_length(49) == local_length(49, 1, 3, 4)


def test_an_impossible_interleave_is_refused():
    with pytest.raises(ConfigError, match="interleave 0"):
        DcpGroup(interleave=0, comm=SoloCollectives())


@pytest.fixture(params=["a2a", "ag_rs"])
def exchange(request):
    return request.param


def merge_on_all_ranks(o: torch.Tensor, lse: torch.Tensor, exchange: str) -> torch.Tensor:
    """o [W, rows, heads_all, C], lse [W, rows, heads_all]: the heads of all ranks, in rank order."""
    groups = [DcpGroup(1, comm, exchange) for comm in InProcessCollectives.create(len(o), timeout_s=20)]
    with ThreadPoolExecutor(len(o)) as pool:
        return torch.cat(list(pool.map(merge_attention, o, lse, groups)), 1)


def attend(q: torch.Tensor, kv: torch.Tensor, C: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = q @ kv.T
    return scores.softmax(-1).nan_to_num(0.0) @ kv[:, :C], scores.logsumexp(-1)


@pytest.mark.parametrize("W", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_merge_equals_attention_over_all_kv(W, dtype, tolerance, exchange):
    generator = torch.Generator().manual_seed(W)
    rows, heads, C, S = 5, 2 * W, 16, 2
    q = torch.randn(rows, heads, 24, generator=generator, dtype=torch.float64)
    kv = torch.randn(rows, 11, 24, generator=generator, dtype=torch.float64)
    # Row t sees t tokens: row 0 none at all, the next ones leave ranks empty.
    expected = torch.stack([attend(q[t], kv[t, :t], C)[0] for t in range(rows)])
    shards = [
        [attend(q[t], kv[t, [g for g in range(t) if owner(g, W, S) == r]], C) for t in range(rows)]
        for r in range(W)
    ]
    o = torch.stack([torch.stack([o for o, _ in shard]) for shard in shards]).to(dtype)
    lse = torch.stack([torch.stack([lse for _, lse in shard]) for shard in shards])
    lse = lse.to(torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.isinf(lse).any()
    merged = merge_on_all_ranks(o, lse, exchange)
    assert merged.dtype == dtype
    torch.testing.assert_close(merged.double(), expected, atol=tolerance, rtol=tolerance)
    assert not merged[0].any()


@pytest.mark.parametrize("broken", [float("nan"), INF, -INF])
def test_a_broken_or_absent_shard_contributes_nothing(broken, exchange):
    o = torch.stack([torch.randn(2, 4, 8), torch.full((2, 4, 8), float("nan"))])
    lse = torch.stack([torch.randn(2, 4), torch.full((2, 4), broken)])
    assert torch.equal(merge_on_all_ranks(o, lse, exchange), o[0])
    nothing = merge_on_all_ranks(o, torch.full((2, 2, 4), broken), exchange)
    assert torch.equal(nothing, torch.zeros(2, 4, 8))


def test_large_lse_do_not_overflow(exchange):
    o = torch.randn(2, 3, 2, 8)
    lse = torch.tensor([1000.0, 999.0]).view(2, 1, 1).expand(2, 3, 2)
    weights = torch.tensor([1.0, 0.0]).softmax(0)
    merged = merge_on_all_ranks(o, lse, exchange)
    torch.testing.assert_close(merged, weights[0] * o[0] + weights[1] * o[1])


@pytest.mark.parametrize("W", [3, 8])
def test_merging_again_gives_the_same_bits(W, exchange):
    o, lse = torch.randn(W, 7, 24, 19), torch.randn(W, 7, 24)
    merged = merge_on_all_ranks(o, lse, exchange)
    assert torch.equal(merge_on_all_ranks(o, lse, exchange), merged)
    torch.testing.assert_close(merged, merge_partials(o, lse))


def test_a_group_of_one_gets_its_own_tensor_back():
    o, lse = torch.randn(2, 4, 8), torch.full((2, 4), -INF)
    assert merge_attention(o, lse, DcpGroup(interleave=1, comm=SoloCollectives())) is o


def test_heads_that_do_not_divide_are_refused():
    group = DcpGroup(interleave=1, comm=InProcessCollectives.create(2)[0])
    with pytest.raises(ConfigError, match="3 query heads"):
        merge_attention(torch.randn(2, 3, 8), torch.randn(2, 3), group)
