"""One token a row, and how many drafts a verify keeps.

R rows, V tokens of a slice. The noise is that of `kernels_integration.noise`: a pure function of (seed,
position, token), in float64, so that every device draws the same tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_integration.sampling import GREEDY_BELOW
from kernels_integration.token_marks import NO_TOKEN
from kernels_integration.triton.filters import over_temperature, rank_of

_BLOCK = 4096


def draw(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    tokens: Tensor,
    *,
    vocab_start: int = 0,
    purpose: int = 0,
    cuts: tuple[Tensor, Tensor] | None = None,
) -> None:
    """tokens [R] int64 = argmax over the slice of logits / temperature + gumbel(seed, position, token).

    logits [R, V] float32 of tokens vocab_start..; temperature [R] float32, below GREEDY_BELOW: the best
    logit; seed, position [R] int64. Of equal scores the lower id. NaN and +inf count as -inf; where nothing
    else is, the token is NO_TOKEN. cuts: of `filters.cut_rows`, whose tokens alone are drawn.
    """
    R, V = logits.shape
    if R == 0:
        return
    # Blocks of four tokens share their random words, so tiles begin at a multiple of four.
    first_block = vocab_start // 4
    num_tiles = triton.cdiv(vocab_start + V - 4 * first_block, _BLOCK)
    best = torch.empty(2, R, num_tiles, dtype=torch.float64, device=logits.device)
    best_token = torch.empty(R, num_tiles, dtype=torch.int64, device=logits.device)
    _draw_tiles[(num_tiles, R)](
        logits,
        temperature,
        seed,
        position,
        best[0],
        best[1],
        best_token,
        V,
        logits.stride(0),
        vocab_start,
        first_block,
        purpose,
        *(cuts or (position, position)),
        HAS_CUTS=cuts is not None,
        GREEDY_BELOW=GREEDY_BELOW,
        BLOCKS=_BLOCK // 4,
        num_warps=4,
    )
    _best_tile[(R,)](
        best[0],
        best[1],
        best_token,
        tokens,
        num_tiles,
        NO_TOKEN=NO_TOKEN,
        BLOCK=triton.next_power_of_2(num_tiles),
        num_warps=1,
    )


@triton.jit
def _gumbel(word):
    """Standard Gumbel noise of 32 random bits, float64; 1 - v is exact, so log serves as log1p."""
    v = (word.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return -tl.log(-tl.log(1.0 - v))


@triton.jit
def _better(
    value,
    rest,
    token,
    logits_at,
    noise,
    block,
    place: tl.constexpr,
    vocab_start,
    num_tokens,
    scale,
    is_greedy,
    cut_rank,
    cut_token,
    HAS_CUTS: tl.constexpr,
):
    """The better of what was found and of token `place` of each block, as (value, rest, token).

    value + rest is logit / temperature + noise exactly: `gumbel_max.Scores`.
    """
    column = 4 * block + place - vocab_start
    is_token = (column >= 0) & (column < num_tokens)
    logit = tl.load(logits_at + column, mask=is_token, other=float("-inf"))
    is_finite = is_token & (logit < float("inf")) & (logit > float("-inf"))
    divided = over_temperature(logit, scale)
    s = tl.where(is_greedy, logit, divided).to(tl.float64)
    is_finite = is_finite & (s > float("-inf"))
    if HAS_CUTS:
        rank = rank_of(divided)
        is_finite = is_finite & ((rank > cut_rank) | ((rank == cut_rank) & (column <= cut_token)))
    s = tl.where(is_finite, s, 0.0)
    total = s + noise
    noise_part = total - s
    lost = (s - (total - noise_part)) + (noise - noise_part)
    total = tl.where(is_finite, total, float("-inf"))
    lost = tl.where(is_finite, lost, 0.0)
    # Places are visited in ascending order, so a tie keeps the lower token.
    wins = (total > value) | ((total == value) & (lost > rest))
    return tl.where(wins, total, value), tl.where(wins, lost, rest), tl.where(wins, 4 * block + place, token)


@triton.jit
def _best_of(value, rest, token):
    """(value, rest, token) of the best of a tile: of equal scores the lower token."""
    best = tl.max(value, 0)
    best_rest = tl.max(tl.where(value == best, rest, float("-inf")), 0)
    is_best = (value == best) & (rest == best_rest)
    return best, best_rest, tl.min(tl.where(is_best, token, 9223372036854775807), 0)


@triton.jit
def _draw_tiles(
    logits,
    temperature,
    seed,
    position,
    best_value,
    best_rest,
    best_token,
    num_tokens,
    stride_logits,
    vocab_start,
    first_block,
    purpose,
    cut_ranks,
    cut_tokens,
    HAS_CUTS: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    block = first_block + tile * BLOCKS + tl.arange(0, BLOCKS)
    scale = tl.load(temperature + row)
    is_greedy = scale < GREEDY_BELOW
    scale = tl.where(is_greedy, 1.0, scale)
    n_0 = tl.zeros([BLOCKS], tl.float64)
    n_1, n_2, n_3 = n_0, n_0, n_0
    if not is_greedy:
        row_position = tl.load(position + row)
        low = (row_position & 0xFFFFFFFF).to(tl.uint32)
        high = ((row_position >> 32) & 0xFFFFFFFF).to(tl.uint32)
        zero = tl.zeros([BLOCKS], tl.uint32)
        w_0, w_1, w_2, w_3 = tl.philox(
            tl.load(seed + row), block.to(tl.uint32), zero + low, zero + high, zero + purpose
        )
        n_0, n_1, n_2, n_3 = _gumbel(w_0), _gumbel(w_1), _gumbel(w_2), _gumbel(w_3)
    v = tl.full([BLOCKS], float("-inf"), tl.float64)
    r = tl.zeros([BLOCKS], tl.float64)
    t = tl.full([BLOCKS], 9223372036854775807, tl.int64)
    at = logits + row * stride_logits
    cut_rank, cut_token = tl.load(cut_ranks + row), tl.load(cut_tokens + row)
    v, r, t = _better(
        v, r, t, at, n_0, block, 0, vocab_start, num_tokens, scale, is_greedy, cut_rank, cut_token, HAS_CUTS
    )
    v, r, t = _better(
        v, r, t, at, n_1, block, 1, vocab_start, num_tokens, scale, is_greedy, cut_rank, cut_token, HAS_CUTS
    )
    v, r, t = _better(
        v, r, t, at, n_2, block, 2, vocab_start, num_tokens, scale, is_greedy, cut_rank, cut_token, HAS_CUTS
    )
    v, r, t = _better(
        v, r, t, at, n_3, block, 3, vocab_start, num_tokens, scale, is_greedy, cut_rank, cut_token, HAS_CUTS
    )
    value, rest, token = _best_of(v, r, t)
    out = row * tl.num_programs(0) + tile
    tl.store(best_value + out, value)
    tl.store(best_rest + out, rest)
    tl.store(best_token + out, token)


@triton.jit
def _best_tile(
    best_value, best_rest, best_token, tokens, num_tiles, NO_TOKEN: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    at, mask = row * num_tiles + tile, tile < num_tiles
    value = tl.load(best_value + at, mask=mask, other=float("-inf"))
    rest = tl.load(best_rest + at, mask=mask, other=0.0)
    token = tl.load(best_token + at, mask=mask, other=9223372036854775807)
    value, rest, token = _best_of(value, rest, token)
    tl.store(tokens + row, tl.where(value == float("-inf"), NO_TOKEN, token))


def count_emitted(tokens: Tensor, drafts: Tensor, num_drafts: Tensor, emitted: Tensor) -> None:
    """emitted [B] int32: how many of tokens [B, K + 1] each verify emits, by the rule of `length_of_walk`.

    drafts [B, K]; num_drafts [B], at most K. x_0 is emitted; x_i follows while d_i equals x_{i-1}; MASKED
    and what follows it is not.
    """
    B, num_tokens = tokens.shape
    if B == 0:
        return
    block_k = triton.next_power_of_2(num_tokens)
    block_b = max(1, 256 // block_k)
    _count_emitted[(triton.cdiv(B, block_b),)](
        tokens,
        drafts,
        num_drafts,
        emitted,
        B,
        NUM_TOKENS=num_tokens,
        BLOCK_B=block_b,
        BLOCK_K=block_k,
        num_warps=1,
    )


@triton.jit
def _count_emitted(
    tokens,
    drafts,
    num_drafts,
    emitted,
    num_requests,
    NUM_TOKENS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    request = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    is_request = request < num_requests
    depth = tl.arange(0, BLOCK_K)[None, :]
    k = tl.load(num_drafts + request, mask=is_request, other=0).to(tl.int32)
    in_row = is_request[:, None] & (depth < NUM_TOKENS) & (depth <= k[:, None])
    at = request[:, None] * NUM_TOKENS + depth
    token = tl.load(tokens + at, mask=in_row, other=-1).to(tl.int64)
    has_draft = in_row & (depth > 0)
    before = tl.load(tokens + at - 1, mask=has_draft, other=-1).to(tl.int64)
    draft_at = request[:, None] * (NUM_TOKENS - 1) + depth - 1
    draft = tl.load(drafts + draft_at, mask=has_draft, other=-1).to(tl.int64)
    goes_on = in_row & (token != -1) & ((depth == 0) | (draft == before))
    count = tl.min(tl.where(goes_on, BLOCK_K, depth), 1)
    tl.store(emitted + request, count, mask=is_request)
