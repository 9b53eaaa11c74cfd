"""Random checkpoints of other shapes against transformers, float32, one rank."""

import pytest
import torch

from tests.support.model_ranks import Rank
from tests.support.model_rows import Chunk
from tests.support.random_checkpoint import write_random_checkpoint
from tests.support.transformers_reference import MtpReference, Reference, set_latent_eps

VARIANTS = {
    "base": {},
    "one group, all layers sparse": {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
    "two shared experts, plain weights": {"n_shared_experts": 2, "norm_topk_prob": False},
    "all layers dense, tied": {"first_k_dense_replace": 3, "tie_word_embeddings": True},
    "other eps": {"rms_norm_eps": 1e-4},
    "nested rope": {"rope_theta": None, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_mtp_equal_transformers(tmp_path, variant):
    path = write_random_checkpoint(tmp_path, VARIANTS[variant])
    reference = Reference(path)
    mtp_reference = MtpReference(reference)
    reference.follow_the_config_in_latent_norms()
    set_latent_eps(mtp_reference.block, reference.config.rms_norm_eps)

    ids = torch.randint(3, 101, (72,), generator=torch.Generator().manual_seed(5)).tolist()
    n = len(ids) - 1
    rank = Rank(path, num_mtp_layers=1)
    h = rank.forward([Chunk(0, 0, n)], ids[:n])
    with torch.inference_mode():
        logits = rank.model.logits(h)
    theirs, num_decided = reference.logits(ids[:n])
    assert num_decided >= 40
    assert (logits - theirs)[:num_decided].abs().max() <= 1e-4

    z = rank.mtp_forward([Chunk(0, 1, n)], ids[1:], h)
    theirs_h, num_decided = reference.hidden(ids[:n])
    theirs_z, num_mtp_decided = mtp_reference(ids[1:], theirs_h)
    num_decided = min(num_decided, num_mtp_decided)
    assert num_decided >= 40
    assert (z - theirs_z)[:num_decided].abs().max() <= 1e-4
