"""transformers' own model of the bundled checkpoint: the reference that nobody here wrote."""

import functools

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.groups import TINY_DSA


@functools.cache
def reference_model(dtype: torch.dtype = torch.float32):
    """Eager attention on the CPU; layer 6 (MTP) is ignored by transformers."""
    model = AutoModelForCausalLM.from_pretrained(TINY_DSA, dtype=dtype, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def next_token_logits(sequences: list[tuple[int, ...]]) -> Tensor:
    """[len(sequences), vocabulary] float64 logits after each sequence; all equally long."""
    return reference_model()(torch.tensor(sequences), use_cache=False).logits[:, -1].double()


def filtered_probabilities(
    logits: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """The distribution that sampling parameters ask for, by full sorts: [rows, vocabulary] float64.

    Order as in vLLM: temperature, min-p, top-k, top-p.
    """
    scaled = logits.double() / temperature
    if min_p > 0:
        probabilities = scaled.softmax(-1)
        floor = min_p * probabilities.max(-1, keepdim=True).values
        scaled = scaled.masked_fill(probabilities < floor, -torch.inf)
    if top_k:
        cut = scaled.sort(-1, descending=True).values[:, top_k - 1 : top_k]
        scaled = scaled.masked_fill(scaled < cut, -torch.inf)
    if top_p < 1:
        order = torch.sort(scaled, dim=-1, descending=True, stable=True)
        before = order.values.softmax(-1).cumsum(-1) - order.values.softmax(-1)
        dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order.indices, before >= top_p)
        scaled = scaled.masked_fill(dropped, -torch.inf)
    return scaled.softmax(-1)
