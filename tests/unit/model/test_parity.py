"""One rank, float32: logits, greedy tokens and MTP states equal transformers'."""

import itertools

import pytest
import torch

from tests.support.model_ranks import Rank
from tests.support.model_rows import Chunk

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def rank(tiny_dsa):
    return Rank(tiny_dsa, num_mtp_layers=1, num_requests=4)


def assert_equal_before_near_tie(ours, theirs, num_decided, *, at_least):
    assert num_decided >= at_least, "a near-tie leaves too little to compare; choose another prompt"
    difference = (ours - theirs)[:num_decided].abs().amax(-1)
    assert difference.max() <= TOLERANCE, f"row {int(difference.argmax())} differs by {difference.max()}"


@pytest.mark.slow
# index_topk is 64: shorter, at, just beyond, far beyond.
@pytest.mark.parametrize("length", [1, 9, 63, 64, 65, 66, 128, 310])
def test_whole_prefill_equals_transformers(rank, reference, prompts, length):
    ids = prompts[0][:length]
    theirs, num_decided = reference.logits(ids)
    ours = rank.logits([Chunk(0, 0, length)], ids)
    assert_equal_before_near_tie(ours, theirs, num_decided, at_least=min(length, 280))
    assert torch.equal(ours[:num_decided].argmax(-1), theirs[:num_decided].argmax(-1))


@pytest.mark.parametrize("chunk_sizes", [(64, 1, 1, 100), (7, 50, 80, 29), (100, 66)])
def test_chunked_prefill_equals_transformers(rank, reference, prompts, chunk_sizes):
    ids = prompts[1][: sum(chunk_sizes)]
    ours, start = [], 0
    for size in chunk_sizes:
        ours.append(rank.logits([Chunk(0, start, size)], ids[start : start + size]))
        start += size
    theirs, num_decided = reference.logits(ids)
    assert_equal_before_near_tie(torch.cat(ours), theirs, num_decided, at_least=150)


def test_mixed_batch_equals_each_request_alone(rank, reference, prompts):
    """Prefill chunks, a decode row and verify rows of four requests in one forward."""
    ids = [prompts[i][:200] for i in range(4)]
    rank.forward(
        [Chunk(0, 0, 40), Chunk(1, 0, 100), Chunk(2, 0, 130)], ids[0][:40] + ids[1][:100] + ids[2][:130]
    )
    chunks = [Chunk(0, 40, 4), Chunk(1, 100, 4), Chunk(2, 130, 1), Chunk(3, 0, 70)]
    packed = ids[0][40:44] + ids[1][100:104] + ids[2][130:131] + ids[3][:70]
    ours = rank.logits(chunks, packed).split([c.count for c in chunks])
    for chunk, part in zip(chunks, ours, strict=True):
        end = chunk.start + chunk.count
        theirs, num_decided = reference.logits(ids[chunk.request][:end])
        assert num_decided == end
        assert_equal_before_near_tie(part, theirs[chunk.start : end], chunk.count, at_least=1)


def test_greedy_decode_equals_transformers(rank, reference, prompts):
    """Requests below, across and beyond index_topk decode together, row by row.

    Each of our tokens must be the reference's choice after our tokens before it: by induction the streams
    are equal.
    """
    lengths = [5, 55, 64, 150]
    sequences = [prompts[i][:n] for i, n in enumerate(lengths)]
    rows = []
    logits = rank.logits([Chunk(i, 0, n) for i, n in enumerate(lengths)], list(itertools.chain(*sequences)))
    last = logits[torch.tensor(lengths).cumsum(0) - 1]
    for _ in range(24):
        rows.append(last)
        for sequence, token in zip(sequences, last.argmax(-1).tolist(), strict=True):
            sequence.append(token)
        chunks = [Chunk(i, len(s) - 1, 1) for i, s in enumerate(sequences)]
        last = rank.logits(chunks, [s[-1] for s in sequences])
    ours = torch.stack(rows, dim=1)
    for i, sequence in enumerate(sequences):
        theirs, num_decided = reference.logits(sequence[:-1])
        theirs = theirs[lengths[i] - 1 :]
        num_decided -= lengths[i] - 1
        assert_equal_before_near_tie(ours[i], theirs, num_decided, at_least=12)
        margins = theirs.topk(2, dim=-1).values.diff(dim=-1).abs().squeeze(-1)
        certain = (margins > 2 * TOLERANCE)[:num_decided]
        assert int(certain.sum()) >= 12
        chosen = torch.tensor(sequence[lengths[i] :])[:num_decided]
        assert torch.equal(chosen[certain], theirs[:num_decided].argmax(-1)[certain])


def test_mtp_layer_equals_transformers_layer(rank, reference, mtp_reference, prompts):
    """Fill in two chunks, the second beyond index_topk; then a draft chained on the layer's own state."""
    ids = prompts[2][:172]
    n = 170
    h, num_decided = reference.hidden(ids[:n])
    assert num_decided == n
    ours_h = rank.forward([Chunk(0, 0, n)], ids[:n])
    first = rank.mtp_forward([Chunk(0, 1, 90)], ids[1:91], ours_h[:90])
    rest = rank.mtp_forward([Chunk(0, 91, n - 90)], ids[91 : n + 1], ours_h[90:n])
    ours = torch.cat((first, rest))
    theirs, num_decided = mtp_reference(ids[1 : n + 1], h)
    assert_equal_before_near_tie(ours, theirs, num_decided, at_least=140)
    with torch.inference_mode():
        ours_logits = rank.model.logits(ours)
    theirs_logits = torch.nn.functional.linear(theirs, reference.model.lm_head.weight)
    assert_equal_before_near_tie(ours_logits, theirs_logits, num_decided, at_least=140)

    chained = rank.mtp_forward([Chunk(0, n + 1, 1)], ids[n + 1 : n + 2], ours[-1:])
    theirs_chained, num_decided = mtp_reference(ids[1 : n + 2], torch.cat((h, theirs[-1:])))
    assert num_decided == n + 1
    assert_equal_before_near_tie(chained, theirs_chained[-1:], 1, at_least=1)


def test_near_tie_detector_sees_selections_beyond_index_topk(rank, reference, prompts):
    reference.model(torch.tensor([prompts[0][:64]]), use_cache=False)
    assert reference._gaps == []
    reference.model(torch.tensor([prompts[0][:80]]), use_cache=False)
    assert len(reference._gaps) == rank.config.num_hidden_layers
    assert all(torch.isinf(gap[:64]).all() and torch.isfinite(gap[64:]).any() for gap in reference._gaps)
    reference._gaps.clear()
