"""Where min-p, top-k and top-p cut each row: by the rule of `kernels_integration.filters`, without a sort.

In the order (score descending, token ascending) each filter keeps a prefix, so a row's cut is a score and, of
the tokens that equal it, the last one kept. Scores become 32-bit ranks that grow with them; the rank at which
a count or a mass is reached is found by narrowing bounds: by passes over the row, until few tokens are in
question, which are then held. Masses are sums of whole numbers, as there, so no order of addition matters.

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
    block = min(_BLOCK, int(triton.next_power_of_2(V)))
    room = torch.empty(R, block, dtype=torch.int64, device=logits.device)
    if R:
        _cut_rows[(R,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p.log(),
            ranks,
            tokens,
            room,
            V,
            logits.stride(0),
            float(2.0 ** (61 - V.bit_length())),
            GREEDY_BELOW=GREEDY_BELOW,
            ANY_TOKEN=ANY_TOKEN,
            BLOCK=block,
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
def _score_of(rank):
    """The score of a rank."""
    bits = (rank - 1).to(tl.uint32)
    bits = tl.where(bits >> 31 != 0, bits ^ 0x80000000, bits ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _weights_of(ranks, peak, floor, unit, BY_MASS: tl.constexpr):
    """What tokens of these ranks count for; rank 0: nothing."""
    distance = _score_of(tl.maximum(ranks, 1)).to(tl.float64) - peak
    is_kept = (ranks > 0) & (distance >= floor)
    return _weight(distance, is_kept, unit) if BY_MASS else is_kept.to(tl.int64)


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
    """What is reached, by count or mass, from each of three ranks on; and the counts, of 21 bits each."""
    sum_1 = tl.zeros([BLOCK], tl.int64)
    sum_2, sum_3, counts = sum_1, sum_1, sum_1
    for start in range(0, num_tokens, BLOCK):
        column = start + tl.arange(0, BLOCK)
        rank, weight = _block(logits_at, column, num_tokens, scale, floor, peak, unit, BY_MASS)
        in_1, in_2, in_3 = rank >= first, rank >= second, rank >= third
        counts += in_1.to(tl.int64) + (in_2.to(tl.int64) << 21) + (in_3.to(tl.int64) << 42)
        if BY_MASS:
            sum_1 += tl.where(in_1, weight, 0)
            sum_2 += tl.where(in_2, weight, 0)
            sum_3 += tl.where(in_3, weight, 0)
    count = tl.sum(counts, 0)
    num_1, num_2, num_3 = count & 0x1FFFFF, (count >> 21) & 0x1FFFFF, count >> 42
    sum_1 = tl.sum(sum_1, 0) if BY_MASS else num_1
    sum_2 = tl.sum(sum_2, 0) if BY_MASS else num_2
    sum_3 = tl.sum(sum_3, 0) if BY_MASS else num_3
    return sum_1, sum_2, sum_3, num_1, num_2, num_3


@triton.jit
def _between(low, high, part: tl.constexpr):
    """A rank above low, at most high: of the score that lies `part` of the way from low."""
    score, to = _score_of(low), _score_of(tl.maximum(high - 1, low))
    by_score = rank_of(score + (to - score) * part)
    return tl.minimum(tl.maximum(by_score, low + 1), high)


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
    room,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(the largest rank from which `wanted`, float64, is reached, what is reached just above it).

    It is reached from `low` on, a token's rank, and not from `high` on, where nothing is. room [BLOCK] int64.
    """
    above = tl.zeros([], tl.int64)
    # Passes over the row, until no more tokens are in question than there is room for.
    num_low, num_high = tl.zeros([], tl.int64) + num_tokens, above
    turn = tl.zeros([], tl.int32)
    while (high - low > 1) & (num_low - num_high > BLOCK):
        step = tl.maximum((high - low) // 4, 1)
        # Scores lie evenly; where many are equal ranks get on.
        is_even = turn % 4 < 3
        first = tl.where(is_even, _between(low, high, 0.25), low + step)
        second = tl.where(is_even, _between(low, high, 0.5), tl.minimum(low + 2 * step, high))
        third = tl.where(is_even, _between(low, high, 0.75), tl.minimum(low + 3 * step, high))
        sum_1, sum_2, sum_3, num_1, num_2, num_3 = _reached(
            logits_at, num_tokens, scale, floor, peak, unit, first, second, third, BY_MASS, BLOCK
        )
        in_1 = sum_1.to(tl.float64) >= wanted
        in_2 = sum_2.to(tl.float64) >= wanted
        in_3 = sum_3.to(tl.float64) >= wanted
        above = tl.where(in_3, above, tl.where(in_2, sum_3, tl.where(in_1, sum_2, sum_1)))
        num_high = tl.where(in_3, num_high, tl.where(in_2, num_3, tl.where(in_1, num_2, num_1)))
        num_low = tl.where(in_3, num_3, tl.where(in_2, num_2, tl.where(in_1, num_1, num_low)))
        high = tl.where(in_3, high, tl.where(in_2, third, tl.where(in_1, second, first)))
        low = tl.where(in_3, third, tl.where(in_2, second, tl.where(in_1, first, low)))
        turn += 1
    if high - low > 1:
        offset = tl.arange(0, BLOCK)
        num_held = tl.zeros([], tl.int32)
        for start in range(0, num_tokens, BLOCK):
            ranks, _ = _block(logits_at, start + offset, num_tokens, scale, floor, peak, unit, False)
            is_held = (ranks >= low) & (ranks < high)
            place = num_held + tl.cumsum(is_held.to(tl.int32), 0) - 1
            tl.store(room + place, ranks, mask=is_held)
            num_held += tl.sum(is_held.to(tl.int32), 0)
        tl.debug_barrier()  # threads read what others wrote
        held = tl.load(room + offset, mask=offset < num_held, other=0)
        weights = _weights_of(held, peak, floor, unit, BY_MASS)
        beyond = above
        while high - low > 1:
            middle = low + (high - low) // 2
            num = beyond + tl.sum(tl.where(held >= middle, weights, 0), 0)
            is_in = num.to(tl.float64) >= wanted
            above = tl.where(is_in, above, num)
            low, high = tl.where(is_in, middle, low), tl.where(is_in, high, middle)
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
    room,
    num_tokens,
    stride_logits,
    unit,
    GREEDY_BELOW: tl.constexpr,
    ANY_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_at = logits + row * stride_logits
    room_at = room + row * BLOCK
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
            logits_at,
            num_tokens,
            scale,
            floor,
            peak,
            unit,
            lowest,
            end,
            limit.to(tl.float64),
            room_at,
            False,
            BLOCK,
        )
        ties = limit - above
    if share < 1.0:
        from_rank, above, _, _, _, _ = _reached(
            logits_at, num_tokens, scale, floor, peak, unit, rank, rank + 1, end, True, BLOCK
        )
        weight = _weights_of(rank, peak, floor, unit, True)
        total = tl.where(is_limited, above + ties * weight, from_rank)
        wanted = tl.maximum(share * total.to(tl.float64), 1.0)
        share_rank, above = _largest_reaching(
            logits_at, num_tokens, scale, floor, peak, unit, rank, end, wanted, room_at, True, BLOCK
        )
        ties = tl.where(share_rank > rank, num_tokens, ties)
        rank = share_rank
        weight = tl.maximum(_weights_of(rank, peak, floor, unit, True), 1)
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
