"""What a request says about single tokens, applied to logits before the temperature; sharded by vocabulary.

Order and meaning follow vLLM: allowed ids (all others: -inf), a mask that a grammar set, bans (-inf), bias
(added), then the penalties:
repetition over prompt and completion (a positive logit is divided, another multiplied), frequency times the
number of times that the completion holds the token, presence once if it holds it. Each entry depends on
itself alone, so a rank edits its own slice and nothing is exchanged.

Shape legend: R rows of a batch, V tokens of this rank's slice, P rows with penalties, G rows with a mask.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Single logits: (row, column) pairs, each at most once. Columns count from the slice's first token."""

    row: Tensor
    """[N] int64."""
    column: Tensor
    """[N] int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMasks:
    """Tokens that G rows may draw: all others become -inf."""

    row: Tensor
    """[G] int64, ascending."""
    bits: Tensor
    """[G, at least (first_bit + V) / 8] uint8, the least significant bit first; 1: may be drawn."""
    first_bit: int
    """Of the slice's first token, below 8."""

    def is_legal(self, num_tokens: int) -> Tensor:
        """[G, num_tokens] bool."""
        powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=self.bits.device)
        each = (self.bits.unsqueeze(2) & powers) != 0
        return each.flatten(1)[:, self.first_bit : self.first_bit + num_tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Penalties of P rows, and the tokens that they count."""

    row: Tensor
    """[P] int64, ascending."""
    repetition: Tensor
    """[P] float64, above 0; 1: off."""
    frequency: Tensor
    """[P] float64; 0: off."""
    presence: Tensor
    """[P] float64; 0: off."""
    counts: Tensor
    """[P, V] int32: how often the completion before the row holds each token."""
    in_prompt: Tensor
    """[P, V] bool."""

    def apply(self, logits: Tensor) -> Tensor:
        """[P, V] of the penalised rows; logits: [P, V], not written."""
        dtype = logits.dtype
        held = self.counts > 0
        repetition = self.repetition.to(dtype).unsqueeze(1)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        # A finite logit stays one: a division may overflow, and -inf stands for what nobody may draw.
        end = torch.finfo(dtype).max
        repeated = torch.where(logits.isinf(), logits, repeated.clamp_(-end, end))
        logits = torch.where(held | self.in_prompt, repeated, logits)
        logits = logits - self.frequency.to(dtype).unsqueeze(1) * self.counts
        return logits - self.presence.to(dtype).unsqueeze(1) * held


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitRules:
    """Edits of some rows of a batch. What is None asks for nothing."""

    restricted_rows: Tensor | None = None
    """[A] int64: rows that may draw nothing but `allowed`."""
    allowed: Entries | None = None
    masks: TokenMasks | None = None
    banned: Entries | None = None
    biased: Entries | None = None
    bias: Tensor | None = None
    """Float64, one value for each entry of `biased`."""
    penalties: Penalties | None = None
    failed_rows: Tensor | None = None
    """[F] int64: rows whose rules could not be had. They become NaN, and so draw nothing on any rank."""

    def apply(self, logits: Tensor) -> Tensor:
        """[R, V] edited logits; `logits` itself is not written."""
        edited = logits.clone()
        if self.restricted_rows is not None:
            edited[self.restricted_rows] = -torch.inf
        if self.allowed is not None:
            edited[self.allowed.row, self.allowed.column] = logits[self.allowed.row, self.allowed.column]
        if self.masks is not None:
            legal = self.masks.is_legal(logits.shape[1])
            if len(self.masks.row) == len(edited):  # all of them: no copies of rows
                edited.masked_fill_(~legal, -torch.inf)
            else:
                edited[self.masks.row] = edited[self.masks.row].masked_fill_(~legal, -torch.inf)
        if self.banned is not None:
            edited[self.banned.row, self.banned.column] = -torch.inf
        if self.biased is not None and self.bias is not None:
            edited[self.biased.row, self.biased.column] += self.bias.to(logits.dtype)
        if self.penalties is not None:
            edited[self.penalties.row] = self.penalties.apply(edited[self.penalties.row])
        if self.failed_rows is not None:
            edited[self.failed_rows] = torch.nan
        return edited
