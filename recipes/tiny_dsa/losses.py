"""Cross entropies over the output head: h [B, S, H] bfloat16, head [V, H] float32, targets [B, S]."""

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.tiny_dsa.model import BF16


def flat_logits(h: Tensor, head: Tensor) -> Tensor:
    """[N, V] bfloat16."""
    return h.flatten(0, 1) @ head.to(BF16).t()


def cross_entropy(h: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(flat_logits(h, head).float(), targets.flatten())


def cross_entropy_and_logits(h: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = flat_logits(h, head)
    return F.cross_entropy(logits.float(), targets.flatten()), logits


def soft_cross_entropy(h: Tensor, head: Tensor, teacher_logits: Tensor, row_weights: Tensor) -> Tensor:
    """Cross entropy against the teacher's softmax, the mean over rows [N] weighted by `row_weights`."""
    logits = flat_logits(h, head).float()
    teacher = torch.softmax(teacher_logits.float(), -1)
    loss = torch.logsumexp(logits, -1) - (teacher * logits).sum(-1)
    return (loss * row_weights).sum() / row_weights.sum()
