"""min-p, top-k and top-p over a sharded vocabulary, exact for every parameter value.

Order and meaning follow vLLM: after the temperature, min-p first (probability at least min_p times the best
token's), then top-k (the k best), then top-p over what those two kept, renormalised (the smallest set of
best tokens whose mass reaches top_p, never empty). At a cut, equal logits go to the lower token id. In the
order (logit descending, id ascending) each of the three keeps a prefix, so what survives is a prefix too:
only the heads of the shards' lists have to be exchanged, and longer heads where the cut does not yet show.

Masses are sums of whole numbers, floor(exp(s - max s) * 2^scale): the same on every rank and for every
number of shards, since no order of addition can change them. They are exact to V * 2^-scale of the best
token's probability (V = 6144: 2e-11; V = 150,000: 2e-8).

Shape legend: R filtered rows, P rows not yet decided, V tokens of this rank's slice, W ranks, M candidates
a rank sends for a row, K survivors of all rows together.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels_integration.collectives import Collectives
from kernels_integration.ranking import row_top

_FIRST_CANDIDATES = 256  # of all ranks together
_MASS_ROWS = 8  # float64 rows of 6144 that stay in a core's L2 cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Filters of R rows. Neutral values (top_k 0, top_p 1, min_p 0) switch a filter off."""

    top_k: Tensor
    """[R] int64; 0 or at least the vocabulary: off."""
    top_p: Tensor
    """[R] float, in [0, 1]."""
    min_p: Tensor
    """[R] float, in [0, 1]."""

    def active(self, vocab_size: int) -> Tensor:
        """[R] bool: rows that some filter may cut."""
        cut_k = (self.top_k > 0) & (self.top_k < vocab_size)
        return cut_k | (self.top_p < 1) | (self.min_p > 0)

    def select(self, index: Tensor) -> "Cuts":
        return Cuts(top_k=self.top_k[index], top_p=self.top_p[index], min_p=self.min_p[index])


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivors:
    """The tokens that the filters leave, of all rows in one list; the same on every rank."""

    row: Tensor
    """[K] int64."""
    value: Tensor
    """[K] float64: the scaled logit."""
    token: Tensor
    """[K] int64."""


def surviving(scaled: Tensor, vocab_start: int, cuts: Cuts, comm: Collectives) -> Survivors:
    """What min-p, top-k and top-p leave of each row.

    scaled: [R, V] logits over temperature of this rank's slice, without +inf; rank r + 1's slice lies above
    rank r's. A row of -inf alone, or with a NaN on some rank, has no survivors. Collective.
    """
    num_rows, slice_size = scaled.shape
    vocab_size = comm.size * slice_size
    peak = comm.all_gather(scaled.amax(dim=1).double()).amax(dim=0)
    peak = peak.clamp(min=torch.finfo(peak.dtype).min)  # keeps the distances of a row of -inf free of NaN
    unit, has_top_p = _unit(vocab_size), bool((cuts.top_p < 1).any())
    limit = torch.where(cuts.top_k > 0, cuts.top_k, vocab_size).clamp_max_(vocab_size)
    floor = cuts.min_p.double().log()
    mass = _mass(scaled, peak, floor, cuts, limit, unit, comm)

    found: list[Survivors] = []
    pending = torch.arange(num_rows, device=scaled.device)
    num_candidates = min(max(_FIRST_CANDIDATES // comm.size, 64), slice_size)
    while len(pending):
        rows = scaled if len(pending) == num_rows else scaled[pending]
        value, token, num_certain = _merged_candidates(rows, vocab_start, num_candidates, comm)
        num_kept, decided = _cut(
            value - peak[pending].unsqueeze(1),
            num_certain,
            limit[pending].unsqueeze(1),
            cuts.top_p[pending].double().unsqueeze(1),
            floor[pending].unsqueeze(1),
            mass[pending].unsqueeze(1),
            unit,
            has_top_p=has_top_p,
        )
        kept = torch.arange(value.shape[1], device=value.device) < num_kept
        kept &= decided
        row, column = kept.nonzero(as_tuple=True)
        found.append(Survivors(row=pending[row], value=value[row, column], token=token[row, column]))
        pending = pending[~decided.squeeze(1)]
        num_candidates = min(4 * num_candidates, slice_size)
    if len(found) == 1:
        return found[0]
    return Survivors(
        row=torch.cat([part.row for part in found]),
        value=torch.cat([part.value for part in found]),
        token=torch.cat([part.token for part in found]),
    )


def num_kept(distance: Tensor, *, limit: Tensor, top_p: Tensor, floor: Tensor, vocab_size: int) -> Tensor:
    """[R, 1] int64: how many of whole rows, sorted best first, the three filters keep. Reads nothing back.

    distance [R, vocab_size] float64: value - best value; limit [R, 1]: top-k or the vocabulary; top_p,
    floor [R, 1]: floor is log(min_p).
    """
    whole, unknown = torch.full_like(limit, vocab_size), torch.zeros_like(limit)
    kept, _ = _cut(distance, whole, limit, top_p, floor, unknown, _unit(vocab_size), has_top_p=True)
    return kept


def _unit(vocab_size: int) -> float:
    """What a weight of 1 becomes: sums of up to vocab_size weights stay below 2^62."""
    return float(2.0 ** (61 - vocab_size.bit_length()))


def _mass(
    scaled: Tensor, peak: Tensor, floor: Tensor, cuts: Cuts, limit: Tensor, unit: float, comm: Collectives
) -> Tensor:
    """[R] int64: what top-p takes its share of, where no top-k ends the list; 0 in rows that need it not."""
    vocab_size = comm.size * scaled.shape[1]
    mass = torch.zeros(scaled.shape[0], dtype=torch.int64, device=scaled.device)
    index = ((cuts.top_p < 1) & (limit == vocab_size)).nonzero().squeeze(1)
    if len(index):
        local = [
            _weights(_distance(scaled[part], peak[part], floor[part]), unit).sum(dim=1)
            for part in (index[row : row + _MASS_ROWS] for row in range(0, len(index), _MASS_ROWS))
        ]
        mass[index] = comm.all_gather(torch.cat(local)).sum(dim=0)
    return mass


def _distance(scaled: Tensor, peak: Tensor, floor: Tensor) -> Tensor:
    """Float64 distance from the best token; -inf below the min-p floor."""
    distance = scaled.double().sub_(peak.unsqueeze(1))
    if bool((floor > -torch.inf).any()):
        distance.masked_fill_(distance < floor.unsqueeze(1), -torch.inf)
    return distance


def _merged_candidates(
    scaled: Tensor, vocab_start: int, count: int, comm: Collectives
) -> tuple[Tensor, Tensor, Tensor]:
    """All ranks' `count` best of P rows, merged: ([P, W * count] float64 values, ids, [P, 1] certain length).

    Positions below the certain length hold what the full sort of the whole vocabulary would hold there.
    """
    value, token = row_top(scaled, count)
    token += vocab_start
    num_certain = torch.full_like(token[:, :1], comm.size * count)
    if comm.size == 1:
        return value.double(), token, num_certain
    heads = comm.all_gather(torch.stack((value.double().view(torch.int64), token)))  # [W, 2, P, count]
    value = heads[:, 0].transpose(0, 1).flatten(1).view(torch.float64)
    token = heads[:, 1].transpose(0, 1).flatten(1)
    _, order = row_top(value.to(scaled.dtype), comm.size * count)
    value, token = value.gather(1, order), token.gather(1, order)
    if count < scaled.shape[1]:
        # What a rank did not send comes after the last entry it sent: certain up to the first of those.
        is_last = order % count == count - 1
        num_certain = is_last.to(torch.uint8).argmax(dim=1, keepdim=True) + 1
    return value, token, num_certain


def _cut(
    distance: Tensor,
    num_certain: Tensor,
    limit: Tensor,
    top_p: Tensor,
    floor: Tensor,
    mass: Tensor,
    unit: float,
    *,
    has_top_p: bool,
) -> tuple[Tensor, Tensor]:
    """([P, 1] number kept, [P, 1] bool: certain) of merged candidates.

    distance: [P, N] float64 value - best value, descending; limit: top-k or the vocabulary; floor:
    log(min_p); mass: as from _mass.
    """
    place = torch.arange(distance.shape[1], device=distance.device)
    passes = (distance >= floor) & (distance > -torch.inf)
    num_kept = passes.sum(dim=1, keepdim=True).minimum(limit)
    decided = (num_kept < num_certain) | (limit <= num_certain)
    if has_top_p:
        cut_p = top_p < 1
        weight = _weights(distance, unit).masked_fill_(place >= num_kept, 0)
        reached = weight.cumsum(dim=1)
        share = top_p * torch.where(mass > 0, mass, reached[:, -1:]).double()
        # A token stays while the mass before it falls short of the share.
        num_share = ((reached - weight).double() < share).sum(dim=1, keepdim=True).clamp_(min=1)
        falls_short = reached.gather(1, num_certain - 1).double() < share
        num_kept = torch.where(cut_p, num_kept.minimum(num_share), num_kept)
        # With the mass known, reaching the share within the certain part settles the row, whatever follows.
        decided |= cut_p & (mass > 0) & ~falls_short
    return num_kept, decided


def _weights(distance: Tensor, unit: float) -> Tensor:
    return distance.exp().mul_(unit).to(torch.int64)
