"""Every split of the model and of its KV computes the same: float64, all ranks as threads."""

import pytest
import torch

from tests.support.model_ranks import Rank, run_ranks
from tests.support.model_rows import Chunk
from tests.support.random_checkpoint import write_random_checkpoint

TOPOLOGIES = [(2, 1, 1), (2, 2, 1), (3, 3, 1), (4, 2, 4), (4, 4, 1), (4, 4, 16)]


@pytest.fixture(scope="module")
def random_checkpoint(tmp_path_factory):
    """101 tokens and 6 experts of width 24: the vocabulary needs padding at tp 2 and 4."""
    return write_random_checkpoint(tmp_path_factory.mktemp("random"))


def run_script(path, prompts, dtype=torch.float64, tp=None, dcp=None, device=None):
    """Three requests: whole and chunked prefill, verify rows, decode, MTP fill and a chained draft.

    Returns the logits that this rank holds of everything computed.
    """
    rank = Rank(path, dtype, num_requests=3, capacity=200, num_mtp_layers=1, tp=tp, dcp=dcp, device=device)
    a, b, c = prompts
    states = []
    first = rank.forward([Chunk(0, 0, 20), Chunk(1, 0, 90)], a[:20] + b[:90])
    states.append(first)
    states.append(
        rank.forward([Chunk(0, 20, 4), Chunk(1, 90, 4), Chunk(2, 0, 70)], a[20:24] + b[90:94] + c[:70])
    )
    states.append(rank.forward([Chunk(0, 24, 1), Chunk(1, 94, 1), Chunk(2, 70, 1)], [a[24], b[94], c[70]]))
    filled = rank.mtp_forward([Chunk(1, 1, 90)], b[1:91], first[20:])
    states.append(filled)
    states.append(rank.mtp_forward([Chunk(1, 91, 1)], b[91:92], filled[-1:]))
    with torch.inference_mode():
        return rank.model.logits(torch.cat(states)), rank.model.vocab_start


def assert_topology_agrees(path, prompts, topology, *, dtype=torch.float64, tolerance=1e-9, exchange="a2a"):
    tp, dcp, interleave = topology
    whole, _ = run_script(path, prompts, dtype)
    parts = run_ranks(
        tp, dcp, interleave, lambda tp, dcp: run_script(path, prompts, dtype, tp, dcp), exchange
    )
    assert [start for _, start in parts] == [r * parts[0][0].shape[1] for r in range(tp)]
    gathered = torch.cat([logits for logits, _ in parts], dim=-1)
    assert (gathered[:, : whole.shape[1]] - whole).abs().max() <= tolerance
    assert torch.all(gathered[:, whole.shape[1] :] == float("-inf"))


@pytest.mark.parametrize("topology", [(1, 1, 1), (2, 2, 1), (4, 2, 4)])
def test_rows_of_a_device_give_what_rows_of_a_host_give(random_checkpoint, topology):
    tp, dcp, interleave = topology
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(3, 101, (3, 100), generator=generator).tolist()
    for (ours, _), (theirs, _) in zip(
        *(
            run_ranks(
                tp,
                dcp,
                interleave,
                lambda t, d, at=at: run_script(random_checkpoint, prompts, tp=t, dcp=d, device=at),
            )
            for at in (None, "cpu")
        ),
        strict=True,
    ):
        finite = theirs.isfinite()
        assert torch.equal(finite, ours.isfinite())
        assert (ours[finite] - theirs[finite]).abs().max() < 1e-9


@pytest.mark.parametrize("topology", [(3, 3, 1), (4, 2, 4)])
def test_either_exchange_merges_attention(random_checkpoint, topology):
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 101, (3, 100), generator=generator).tolist()
    assert_topology_agrees(random_checkpoint, prompts, topology, exchange="ag_rs")


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_random_checkpoint(random_checkpoint, topology):
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 101, (3, 100), generator=generator).tolist()
    assert_topology_agrees(random_checkpoint, prompts, topology)


@pytest.mark.parametrize(
    "topology",
    [
        (2, 2, 1),
        pytest.param((4, 2, 4), marks=pytest.mark.slow),
        pytest.param((4, 4, 1), marks=pytest.mark.slow),
        pytest.param((8, 4, 2), marks=pytest.mark.slow),
    ],
)
def test_bundled_checkpoint(tiny_dsa, prompts, topology):
    assert_topology_agrees(tiny_dsa, prompts[:3], topology)


def test_ranks_hold_equal_bits(random_checkpoint):
    """h is replicated: a rank that differed in one bit could select and sample differently."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 101, (60,), generator=generator).tolist()

    def state(tp, dcp):
        return Rank(random_checkpoint, tp=tp, dcp=dcp).forward([Chunk(0, 0, 60)], ids)

    first, *others = run_ranks(4, 2, 1, state)
    assert all(torch.equal(first, other) for other in others)


def test_bfloat16_stays_near_float32(tiny_dsa, prompts):
    """Probabilities move by what 8 bits of mantissa imply, and splitting the model does not add to it."""
    ids = prompts[0][:60]
    exact = Rank(tiny_dsa).logits([Chunk(0, 0, 60)], ids).softmax(-1)
    alone = Rank(tiny_dsa, torch.bfloat16).logits([Chunk(0, 0, 60)], ids)
    assert alone.dtype is torch.float32
    parts = run_ranks(
        2, 2, 1, lambda tp, dcp: Rank(tiny_dsa, torch.bfloat16, tp=tp, dcp=dcp).logits([Chunk(0, 0, 60)], ids)
    )
    for rounded in (alone, torch.cat(parts, dim=-1)):
        assert (rounded.softmax(-1) - exact).abs().sum(-1).mean() < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_float32_equals_transformers(tiny_dsa, reference, prompts, topology):
    ids = prompts[3][:310]
    theirs, num_decided = reference.logits(ids)
    assert num_decided >= 250

    tp_size, dcp_size, interleave = topology

    def logits(tp, dcp):
        rank = Rank(tiny_dsa, tp=tp, dcp=dcp)
        chunks = [(0, 64), (64, 1), (65, 200), (265, 45)]
        return torch.cat([rank.logits([Chunk(0, at, n)], ids[at : at + n]) for at, n in chunks])

    ours = torch.cat(run_ranks(tp_size, dcp_size, interleave, logits), dim=-1)
    assert (ours - theirs)[:num_decided].abs().max() <= 1e-4
