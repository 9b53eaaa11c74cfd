"""Sigmoid routing with a correction bias and group limit ("noaux_tc"; DeepSeek-V3 report, section 2.1.2)."""

import triton
import triton.language as tl
from torch import Tensor


def route(
    logits: Tensor,
    bias: Tensor,
    experts: Tensor,
    weights: Tensor,
    *,
    num_groups: int,
    topk_group: int,
    normalise: bool,
    scaling_factor: float,
) -> None:
    """Experts [T, K] int32 or int64 and weights [T, K] of router logits; bias [E]; all float32.

    logits [P, T, E], contiguous: their sum over P, in that order, is what counts.

    p = sigmoid(logits), c = p + bias; of the topk_group groups with the largest sum of their 2 best c the K
    best c, best first; weights are their p, over their sum + 1e-20 if normalise, times scaling_factor. Of
    equal c the lower expert, of equal groups the lower group.
    """
    num_parts, T, E = logits.shape
    if T == 0:
        return
    per_group = E // num_groups
    _route[(T,)](
        logits,
        bias,
        experts,
        weights,
        scaling_factor,
        T,
        num_parts,
        E=E,
        K=experts.shape[1],
        GROUPS=num_groups,
        KEPT_GROUPS=topk_group,
        PER_GROUP=per_group,
        NORMALISE=normalise,
        BLOCK_G=triton.next_power_of_2(num_groups),
        BLOCK_E=triton.next_power_of_2(per_group),
        BLOCK_K=triton.next_power_of_2(experts.shape[1]),
        num_warps=1,
    )


@triton.jit
def _route(
    logits,
    bias,
    experts,
    weights,
    scaling_factor,
    num_rows,
    num_parts,
    E: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)
    inside = tl.arange(0, BLOCK_E)
    expert = group[:, None] * PER_GROUP + inside[None, :]
    is_expert = (group < GROUPS)[:, None] & (inside < PER_GROUP)[None, :]
    logit = tl.zeros([BLOCK_G, BLOCK_E], tl.float32)
    for part in range(num_parts):
        at = logits + (part * num_rows + row) * E + expert
        logit += tl.load(at, mask=is_expert, other=0.0)
    p = 1.0 / (1.0 + tl.exp(-logit))
    c = tl.where(is_expert, p + tl.load(bias + expert, mask=is_expert, other=0.0), float("-inf"))
    if KEPT_GROUPS < GROUPS:
        best = tl.max(c, 1)
        first = tl.min(tl.where(c == best[:, None], inside[None, :], BLOCK_E), 1)
        second = tl.max(tl.where(inside[None, :] == first[:, None], float("-inf"), c), 1)
        group_score = tl.where(group < GROUPS, best + second, float("-inf"))
        kept = group < 0
        for _ in tl.static_range(KEPT_GROUPS):
            best_score = tl.max(group_score, 0)
            chosen_group = tl.min(tl.where((group_score == best_score) & (kept == 0), group, BLOCK_G), 0)
            kept = kept | (group == chosen_group)
            group_score = tl.where(group == chosen_group, float("-inf"), group_score)
        c = tl.where(kept[:, None], c, float("-inf"))
    place = tl.arange(0, BLOCK_K)
    chosen_experts = tl.zeros([BLOCK_K], tl.int32)
    chosen_weights = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(K):
        best_c = tl.max(tl.max(c, 1), 0)
        # NaN equals nothing: the last expert then, which exists.
        chosen = tl.min(tl.min(tl.where(c == best_c, expert, E - 1), 1), 0)
        chosen_p = tl.sum(tl.sum(tl.where((expert == chosen) & is_expert, p, 0.0), 1), 0)
        chosen_experts = tl.where(place == k, chosen, chosen_experts)
        chosen_weights = tl.where(place == k, chosen_p, chosen_weights)
        c = tl.where(expert == chosen, float("-inf"), c)
    if NORMALISE:
        chosen_weights = chosen_weights / (tl.sum(chosen_weights, 0) + 1e-20)
    tl.store(experts + row * K + place, chosen_experts, mask=place < K)
    tl.store(weights + row * K + place, chosen_weights * scaling_factor, mask=place < K)
