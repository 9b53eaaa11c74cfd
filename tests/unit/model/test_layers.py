"""Norms, RoPE, router, experts and the matrix product against their formulas, written out."""

import math

import pytest
import torch

from actors.model.checkpoint import Checkpoint
from actors.model.config import ModelConfig
from actors.model.config_fields import FieldReader
from actors.model.moe import MixtureOfExperts
from actors.model.rope_config import read_rope
from actors.model.rotary import halves_to_pairs, rotary_frequencies
from actors.model.weights import WeightReader
from kernels_integration.reference import linear
from kernels_integration.reference.backend import TorchBackend
from kernels_integration.reference.layers import layer_norm, rms_norm, rotary_table, rotate_pairs
from kernels_integration.reference.linear import MatrixProduct
from kernels_integration.topology import Topology
from tests.support.random_checkpoint import write_random_checkpoint

GENERATOR = torch.Generator().manual_seed(0)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("rows", [0, 1, 3, 128])
@pytest.mark.parametrize("shape", [(6, 10), (384, 256), (6144, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_linear(rows, shape, dtype):
    """Both sides of the threshold; inputs that are columns of a wider tensor, as the layers pass them."""
    weight = randn(*shape, dtype=dtype)
    x = randn(rows, shape[1] + 8, dtype=dtype)[:, : shape[1]]
    product = MatrixProduct(weight)(x)
    assert product.dtype is dtype
    exact = x.double() @ weight.double().t()
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-4, torch.bfloat16: 0.5}[dtype]
    assert torch.allclose(product.double(), exact, rtol=0, atol=tolerance)


def test_linear_takes_both_libraries(monkeypatch):
    weight, x = randn(384, 256), randn(64, 256)
    monkeypatch.setattr(linear, "ONEDNN_MIN_PRODUCTS", 1 << 20)
    large = MatrixProduct(weight)(x)
    monkeypatch.setattr(linear, "ONEDNN_MIN_PRODUCTS", 1 << 60)
    small = MatrixProduct(weight)(x)
    assert torch.allclose(large, small, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_norms(dtype):
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    x, weight, bias = randn(5, 64, dtype=dtype), randn(64, dtype=exact), randn(64, dtype=exact)
    wide = x.double()
    mean_square = wide.square().mean(-1, keepdim=True)
    rms = weight.double() * (wide / (mean_square + 1e-3).sqrt())
    centred = wide - wide.mean(-1, keepdim=True)
    layer = (
        centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double() + bias.double()
    )
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 0.05}[dtype]
    for ours, theirs in ((rms_norm(x, weight, 1e-3), rms), (layer_norm(x, weight, bias, 1e-3), layer)):
        assert ours.dtype is dtype
        assert torch.allclose(ours.double(), theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rope_turns_neighbours_by_position_times_frequency(dtype):
    positions = torch.tensor([0, 1, 1999])
    table = rotary_table(positions, rotary_frequencies(10000.0, 8, dtype))
    x = randn(3, 2, 8, dtype=dtype)
    turned = x.clone()
    rotate_pairs(turned, table)
    elsewhere = torch.zeros(3, 2, 12, dtype=dtype)
    rotate_pairs(x, table, out=elsewhere[..., 4:])
    assert torch.equal(elsewhere[..., 4:], turned)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.05}[dtype]
    for t, p in enumerate(positions.tolist()):
        for j in range(4):
            angle = p * 10000.0 ** (-2 * j / 8)
            a, b = x[t, :, 2 * j].double(), x[t, :, 2 * j + 1].double()
            expected = torch.stack(
                (a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)), -1
            )
            assert torch.allclose(turned[t, :, 2 * j : 2 * j + 2].double(), expected, rtol=0, atol=tolerance)


YARNS = [
    # As released with DeepSeek-V3 and V3.2, and with Kimi-K2.
    (
        10000.0,
        64,
        {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    (50000.0, 64, {"factor": 64, "original_max_position_embeddings": 4096, "beta_fast": 1, "beta_slow": 1}),
    (10000.0, 32, {"factor": 3.5, "original_max_position_embeddings": 500, "truncate": False}),
    (500.0, 16, {"factor": 8, "original_max_position_embeddings": 100, "mscale": 0.7, "mscale_all_dim": 1.4}),
    (1e6, 8, {"factor": 2, "original_max_position_embeddings": 12, "attention_factor": 0.8, "beta_fast": 9}),
]


@pytest.mark.parametrize(("theta", "dim", "fields"), YARNS)
def test_yarn_equals_transformers_to_the_last_bit(theta, dim, fields):
    """Frequencies, and the table at positions up to the extended length."""
    from transformers.models.deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    length = int(fields["factor"] * fields["original_max_position_embeddings"])
    rope = {"rope_type": "yarn", "rope_theta": theta, **fields}
    theirs = DeepseekV3RotaryEmbedding(
        DeepseekV3Config(qk_rope_head_dim=dim, max_position_embeddings=length, rope_parameters=dict(rope))
    )
    read = FieldReader({"rope_parameters": rope})
    read_theta, yarn = read_rope(read, length)
    assert (read.problems, read_theta) == ([], theta)
    frequencies = rotary_frequencies(theta, dim, torch.float32, yarn)
    assert torch.equal(frequencies, theirs.inv_freq)
    positions = torch.tensor([0, 1, length // 3, length - 1])
    cos, sin = theirs(torch.zeros(1), positions[None])
    table = rotary_table(positions, frequencies, yarn.embedding_factor)
    assert torch.allclose(table.real, cos[0, :, : dim // 2], rtol=0, atol=1e-6)
    assert torch.allclose(table.imag, sin[0, :, : dim // 2], rtol=0, atol=1e-6)
    exact = rotary_frequencies(theta, dim, torch.float64, yarn)
    assert torch.allclose(frequencies.double(), exact, rtol=1e-6, atol=0)


def test_halves_to_pairs_leaves_the_rest():
    assert halves_to_pairs(9, 6).tolist() == [0, 3, 1, 4, 2, 5, 6, 7, 8]


def moe_by_hand(config, tensors, x):
    """One row at a time, from the formulas of the numerics contract, in float64."""
    prefix = "model.layers.1.mlp."

    def expert(name, row):
        gate, up, down = (tensors[f"{prefix}{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        hidden = gate @ row
        return down @ (hidden * torch.sigmoid(hidden) * (up @ row))

    out = []
    for row in x:
        p = torch.sigmoid(tensors[f"{prefix}gate.weight"] @ row)
        c = (p + tensors[f"{prefix}gate.e_score_correction_bias"]).tolist()
        per_group = config.n_routed_experts // config.n_group
        groups = [range(g * per_group, (g + 1) * per_group) for g in range(config.n_group)]
        groups.sort(key=lambda g: -sum(sorted((c[e] for e in g), reverse=True)[:2]))
        candidates = [e for g in groups[: config.topk_group] for e in g]
        chosen = sorted(candidates, key=lambda e: -c[e])[: config.num_experts_per_tok]
        weights = p[chosen] / (p[chosen].sum() + 1e-20) * config.routed_scaling_factor
        total = expert("shared_experts", row)
        for e, weight in zip(chosen, weights, strict=True):
            total = total + weight * expert(f"experts.{e}", row)
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize("rows", [1, 2, 50])
def test_mixture_of_experts(tmp_path, rows):
    path = write_random_checkpoint(tmp_path)
    config = ModelConfig.from_pretrained(path)
    x = randn(rows, 64, dtype=torch.float64)
    with Checkpoint(path) as checkpoint:
        tensors = {name: checkpoint.read(name).double() for name in checkpoint if "layers.1.mlp" in name}
        expected = moe_by_hand(config, tensors, x)
        parts = [
            MixtureOfExperts(
                config,
                WeightReader(
                    checkpoint=checkpoint,
                    dtype=torch.float64,
                    rank=r,
                    topology=Topology(tp=2),
                    prefix="model.layers.1.mlp.",
                ),
                TorchBackend(torch.float64),
            )(x)
            for r in range(2)
        ]
    assert torch.allclose(sum(parts), expected, rtol=0, atol=1e-10)
