"""Where min-p, top-k and top-p cut each row: by the rule of `kernels_integration.filters`, without a sort.

In the order (score descending, token ascending) each filter keeps a prefix, so a row's cut is a score and, of
the tokens that equal it, the last one kept. Scores become 32-bit ranks that grow with them; the rank at which
a count or a mass is reached is found by narrowing bounds, a pass over the row each time. Masses are sums of
whole numbers, as there, so no order of addition matters.

R rows, V tokens. A row is one program's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_integration.sampling import GREEDY_BELOW

_BLOCK = 4096
ANY_TOKEN = 2**31 - 1


def cut_rows(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """(ranks, tokens) [R] int64: a row keeps tokens of ranks above its, and of that rank up to its token.

    logits [R, V] float32, last dim contiguous; temperature [R] float32, below GREEDY_BELOW: nothing is cut;
    top_k [R] int64, 0: off; top_p, min_p [R] float64. NaN and infinities are never kept. Tokens count from
    the first column. For `sampling.draw`.
    """
    R, V = logits.shape
    ranks = torch.empty(R, dtype=torch.int64, device=logits.device)
    tokens = torch.empty(R, dtype=torch.int64, device=logits.device)
    if R:
        _cut_rows[(R,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p.log(),
            ranks,
            tokens,
            V,
            logits.stride(0),
            float(2.0 ** (61 - V.bit_length())),
            GREEDY_BELOW=GREEDY_BELOW,
            ANY_TOKEN=ANY_TOKEN,
            BLOCK=min(_BLOCK, int(triton.next_power_of_2(V))),
            num_warps=16 if V > 1024 else 4,
        )
    return ranks, tokens


@triton.jit
def over_temperature(logit, scale):
    """The score of finite logits; over a small temperature it is held at float32's greatest number."""
    return tl.minimum(tl.math.div_rn(logit, tl.zeros_like(logit) + scale), 3.4028234663852886e38)


@triton.jit
def rank_of(score):
    """int64 from 1 to 2^32 that grows with float32 scores, none of which is NaN; -0.0 as 0.0."""
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.uint32, bitcast=True)
    rank = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    return rank.to(tl.int64) + 1


@triton.jit
def _block(logits_at, column, num_tokens, scale, floor, peak, unit, BY_MASS: tl.constexpr):
    """(ranks, weights or ones) of tokens: rank 0 of those that min-p, or the row's end, leaves out."""
    logit = tl.load(logits_at + column, mask=column < num_tokens, other=float("-inf"))
    is_finite = (logit < float("inf")) & (logit > float("-inf"))
    score = over_temperature(tl.where(is_finite, logit, 0.0), scale)
    is_finite = is_finite & (score > float("-inf"))
    distance = tl.where(is_finite, score, 0.0).to(tl.float64) - peak
    is_kept = is_finite & (distance >= floor)
    weight = _weight(distance, is_kept, unit) if BY_MASS else is_kept.to(tl.int64)
    return tl.where(is_kept, rank_of(score), 0), weight


@triton.jit
def _weight(distance, is_kept, unit):
    return tl.where(is_kept, (tl.exp(tl.where(is_kept, distance, 0.0)) * unit).to(tl.int64), 0)


@triton.jit
def _reached(
    logits_at,
    num_tokens,
    scale,
    floor,
    peak,
    unit,
    first,
    second,
    third,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many tokens, or what mass, have ranks of `first` or more; `second`; `third`."""
    sum_1 = tl.zeros([BLOCK], tl.int64)
    sum_2, sum_3 = sum_1, sum_1
    for start in range(0, num_tokens, BLOCK):
        column = start + tl.arange(0, BLOCK)
        rank, weight = _block(logits_at, column, num_tokens, scale, floor, peak, unit, BY_MASS)
        sum_1 += tl.where(rank >= first, weight, 0)
        sum_2 += tl.where(rank >= second, weight, 0)
        sum_3 += tl.where(rank >= third, weight, 0)
    return tl.sum(sum_1, 0), tl.sum(sum_2, 0), tl.sum(sum_3, 0)


@triton.jit
def _largest_reaching(
    logits_at,
    num_tokens,
    scale,
    floor,
    peak,
    unit,
    low,
    high,
    wanted,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(the largest rank from which `wanted`, float64, is reached, what is reached just above it).

    It is reached from `low` on, and not from `high` on, where nothing is.
    """
    above = tl.zeros([], tl.int64)
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        num_1, num_2, num_3 = _reached(
            logits_at, num_tokens, scale, floor, peak, unit, first, second, third, BY_MASS, BLOCK
        )
        in_1 = num_1.to(tl.float64) >= wanted
        in_2 = num_2.to(tl.float64) >= wanted
        in_3 = num_3.to(tl.float64) >= wanted
        above = tl.where(in_3, above, tl.where(in_2, num_3, tl.where(in_1, num_2, num_1)))
        high = tl.where(in_3, high, tl.where(in_2, third, tl.where(in_1, second, first)))
        low = tl.where(in_3, third, tl.where(in_2, second, tl.where(in_1, first, low)))
    return low, above


@triton.jit
def _keep_all(ranks, tokens, row, ANY_TOKEN: tl.constexpr):
    tl.store(ranks + row, 0)
    tl.store(tokens + row, ANY_TOKEN)


@triton.jit
def _cut_rows(
    logits,
    temperature,
    top_k,
    top_p,
    log_min_p,
    ranks,
    tokens,
    num_tokens,
    stride_logits,
    unit,
    GREEDY_BELOW: tl.constexpr,
    ANY_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_at = logits + row * stride_logits
    scale = tl.load(temperature + row)
    limit = tl.load(top_k + row)
    share = tl.load(top_p + row)
    floor = tl.load(log_min_p + row)
    zero = tl.zeros([], tl.int64)
    is_cut = ((limit > 0) & (limit < num_tokens)) | (share < 1.0) | (floor > float("-inf"))
    if (scale < GREEDY_BELOW) | (is_cut == 0):
        _keep_all(ranks, tokens, row, ANY_TOKEN)
        return
    offset = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, num_tokens, BLOCK):
        logit = tl.load(logits_at + start + offset, mask=start + offset < num_tokens, other=float("-inf"))
        is_finite = (logit < float("inf")) & (logit > float("-inf"))
        score = over_temperature(tl.where(is_finite, logit, 0.0), scale)
        best = tl.maximum(best, tl.where(is_finite, score, float("-inf")))
    top = tl.max(best, 0)
    if top == float("-inf"):
        _keep_all(ranks, tokens, row, ANY_TOKEN)
        return
    peak = top.to(tl.float64)
    end = rank_of(top) + 1
    unit = tl.zeros([], tl.float64) + unit
    # What min-p leaves: so many tokens, from `lowest` on.
    counts, least = tl.zeros([BLOCK], tl.int64), tl.full([BLOCK], 1 << 33, tl.int64)
    for start in range(0, num_tokens, BLOCK):
        ranks_here, _ = _block(logits_at, start + offset, num_tokens, scale, floor, peak, unit, False)
        counts += (ranks_here > 0).to(tl.int64)
        least = tl.minimum(least, tl.where(ranks_here > 0, ranks_here, 1 << 33))
    num_kept, lowest = tl.sum(counts, 0), tl.min(least, 0)
    # The cut: all above `rank`, and `ties` of those that equal it.
    rank, ties = lowest, zero + num_tokens
    is_limited = (limit > 0) & (limit < num_kept)
    if is_limited:
        rank, above = _largest_reaching(
            logits_at, num_tokens, scale, floor, peak, unit, lowest, end, limit.to(tl.float64), False, BLOCK
        )
        ties = limit - above
    if share < 1.0:
        from_rank, above, _ = _reached(
            logits_at, num_tokens, scale, floor, peak, unit, rank, rank + 1, end, True, BLOCK
        )
        weight = _weight_of(rank, peak, floor, unit)
        total = tl.where(is_limited, above + ties * weight, from_rank)
        wanted = tl.maximum(share * total.to(tl.float64), 1.0)
        share_rank, above = _largest_reaching(
            logits_at, num_tokens, scale, floor, peak, unit, rank, end, wanted, True, BLOCK
        )
        ties = tl.where(share_rank > rank, num_tokens, ties)
        rank = share_rank
        weight = tl.maximum(_weight_of(rank, peak, floor, unit), 1)
        # Of equal tokens those before which the mass falls short.
        num = ((wanted - above.to(tl.float64)) / weight.to(tl.float64)).to(tl.int64)
        num = tl.maximum(num - 2, 0)
        for _ in range(5):
            num += ((above + num * weight).to(tl.float64) < wanted).to(tl.int64)
        ties = tl.minimum(ties, tl.maximum(num, 1))
    # The last of the ties, where some of them are cut.
    last = zero - 1
    seen = zero
    for start in range(0, num_tokens, BLOCK):
        ranks_here, _ = _block(logits_at, start + offset, num_tokens, scale, floor, peak, unit, False)
        is_tied = ranks_here == rank
        place = seen + tl.cumsum(is_tied.to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(is_tied & (place == ties), start + offset, -1), 0))
        seen += tl.sum(is_tied.to(tl.int64), 0)
    tl.store(ranks + row, rank)
    tl.store(tokens + row, tl.where(last < 0, ANY_TOKEN, last))


@triton.jit
def _weight_of(rank, peak, floor, unit):
    """Of a token of that rank."""
    bits = (rank - 1).to(tl.uint32)
    bits = tl.where(bits >> 31 != 0, bits ^ 0x80000000, bits ^ 0xFFFFFFFF)
    distance = bits.to(tl.float32, bitcast=True).to(tl.float64) - peak
    return _weight(distance, distance >= floor, unit)
