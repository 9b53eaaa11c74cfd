"""FP8: values bit for bit, whatever the slice; and which other formats are refused, by name."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from actors.model import checkpoint as checkpoint_module
from actors.model.checkpoint import Checkpoint
from actors.model.config import ModelConfig
from actors.model.dequantize import e4m3_to_float
from actors.model.load_progress import LoadProgress
from actors.model.model import load_model, measure_shard
from actors.model.weights import WeightReader
from kernels_integration.collectives import SoloCollectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.errors import CheckpointError
from kernels_integration.reference.backend import TorchBackend
from kernels_integration.topology import Topology
from tests.support.fp8_weights import QUANTIZATION, make_fp8, quantize, reference
from tests.support.model_ranks import run_ranks
from tests.support.random_checkpoint import BASE_CONFIG, write_random_checkpoint

SOLO = SoloCollectives()
GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def write_fp8(path, shape, block, *, seed=0, scale_dtype=torch.float32):
    """A file of one random tensor "w.weight"; returns its values in float64."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    stored, scale = quantize(noise, block)
    scale = scale.to(scale_dtype)
    save_file({"w.weight": stored, "w.weight_scale_inv": scale}, path / "model.safetensors")
    return reference(stored, scale, block)


def test_all_values_of_the_format():
    stored = torch.arange(256, dtype=torch.uint8)
    want = stored.view(torch.float8_e4m3fn).float()
    for part in (slice(0, 256), slice(0, 255), slice(1, 128)):  # even, odd and unaligned
        assert torch.equal(e4m3_to_float(stored[part]).nan_to_num(), want[part].nan_to_num())
    assert e4m3_to_float(stored).isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    by_hand = [  # sign, 4 bits of exponent, 3 of mantissa
        (-1) ** (b >> 7) * (math.ldexp(8 + (b & 7), (b >> 3 & 15) - 10) if b >> 3 & 15 else (b & 7) / 512)
        for b in range(256)
        if b & 127 != 127
    ]
    assert e4m3_to_float(stored[(stored & 127) != 127]).tolist() == by_hand


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(256, 384), (130, 300), (1, 1), (127, 129), (300, 7)])
def test_equals_the_float64_reference_bit_for_bit(tmp_path, shape, dtype):
    want = write_fp8(tmp_path, shape, (128, 128)).to(dtype)
    with Checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read("w.weight", dtype=dtype), want)
        assert torch.equal(checkpoint.read("w.weight").to(dtype), want) or dtype is torch.float64


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_slices_take_the_scales_of_their_blocks(tmp_path_factory, data):
    """Slices begin and end anywhere, blocks and tiles too."""
    path = tmp_path_factory.mktemp("fp8")
    shape = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    block = data.draw(st.tuples(st.integers(1, 16), st.integers(1, 16)))
    want = write_fp8(path, shape, block, seed=data.draw(st.integers(0, 9)))
    first_row, first_column = (data.draw(st.integers(0, n - 1)) for n in shape)
    rows = slice(first_row, data.draw(st.integers(first_row, shape[0])))
    columns = slice(first_column, data.draw(st.integers(first_column, shape[1])))
    dtype = data.draw(st.sampled_from(DTYPES))
    with pytest.MonkeyPatch.context() as patch, Checkpoint(path, block) as checkpoint:
        patch.setattr(checkpoint_module, "TILE_BYTES", data.draw(st.sampled_from([1, 50, 1 << 20])))
        patch.setattr(checkpoint_module, "_MAX_SKIPPED_BYTES", data.draw(st.sampled_from([0, 8, 1 << 14])))
        got = checkpoint.read("w.weight", rows, columns, dtype=dtype)
    assert torch.equal(got, want[rows, columns].to(dtype))


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_in_other_formats(tmp_path, scale_dtype):
    want = write_fp8(tmp_path, (130, 200), (128, 128), scale_dtype=scale_dtype)
    with Checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read("w.weight", dtype=torch.bfloat16), want.to(torch.bfloat16))


@pytest.mark.parametrize("block", [(128, 128), (16, 32), (20, 24)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_read_their_slices_of_a_mixture(tmp_path, block, size):
    """eh_proj, gate and weights_proj stay float32; which tensors are FP8, the scales alone tell."""
    meant = make_fp8(write_random_checkpoint(tmp_path), block)
    config = ModelConfig.from_pretrained(tmp_path)
    assert config.weight_block_size == block
    with Checkpoint(tmp_path, config.weight_block_size) as checkpoint:
        assert checkpoint[GATE].dtype == "F8_E4M3"
        assert checkpoint["model.layers.3.eh_proj.weight"].dtype == "F32"
        readers = [
            WeightReader(checkpoint=checkpoint, dtype=torch.float64, rank=r, topology=Topology(tp=size))
            for r in range(size)
        ]
        for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.2.self_attn.o_proj.weight"):
            assert torch.equal(torch.cat([r.rows(name).values for r in readers]), meant[name])
            assert torch.equal(torch.cat([r.columns(name).values for r in readers], 1), meant[name])


class KeepsFp8(TorchBackend):
    """A backend that takes fp8 as it is stored; it dequantises then, which others leave to a product."""

    keeps_fp8 = True

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[int, ...]] = []

    def _note(self, weight):
        if weight.scales is not None:
            assert weight.values.dtype is torch.float8_e4m3fn
            self.kept.append(tuple(weight.shape))

    def linear(self, weight):
        self._note(weight)
        return super().linear(weight)

    def experts(self, gate_up, down, *, first_expert, num_experts):
        self._note(gate_up)
        self._note(down)
        return super().experts(gate_up, down, first_expert=first_expert, num_experts=num_experts)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize(
    ("block", "size"), [((8, 8), 1), ((12, 8), 1), ((6, 16), 2), ((32, 32), 2), ((7, 5), 2)]
)
def test_a_backend_that_keeps_fp8_gets_what_is_stored(tmp_path, block, size, expert_parallel):
    """Dequantised afterwards, the weights are those of the loader; parts that cut blocks come dequantised."""
    path = write_random_checkpoint(tmp_path)
    make_fp8(path, block)
    config = ModelConfig.from_pretrained(path)
    kept = []

    def weights(tp, dcp, backend):
        model = load_model(
            config,
            path,
            dtype=torch.float32,
            backend=backend,
            tp=tp,
            dcp=dcp,
            num_mtp_layers=1,
            expert_parallel=expert_parallel,
        )
        return list(tensors_of(model)), getattr(backend, "kept", [])

    ours = run_ranks(size, 1, 1, lambda tp, dcp: weights(tp, dcp, KeepsFp8()))
    theirs = run_ranks(size, 1, 1, lambda tp, dcp: weights(tp, dcp, TorchBackend()))
    for (found, kept), (expected, _) in zip(ours, theirs, strict=True):
        numbers = [t for t in found if t.is_floating_point()]
        assert len(numbers) == len([t for t in expected if t.is_floating_point()]) > 50
        assert all(map(torch.equal, numbers, [t for t in expected if t.is_floating_point()]))
        hidden, wide, narrow = 64, 96 // size, 24 if expert_parallel else 24 // size
        num_held = 6 // size if expert_parallel else 6
        assert ((2 * wide, hidden) in kept) == (wide % block[0] == 0)
        assert ((hidden, wide) in kept) == (size == 1 or wide % block[1] == 0)
        assert ((num_held, 2 * narrow, hidden) in kept) == (narrow % block[0] == 0)
        assert ((num_held, hidden, narrow) in kept) == (narrow == 24 or narrow % block[1] == 0)


def test_a_fault_of_kept_fp8_is_found(tmp_path):
    path = write_random_checkpoint(tmp_path)
    make_fp8(path, (8, 8))
    tensors = load_file(path / "model.safetensors")
    tensors[GATE].view(torch.uint8)[3, 5] = 0x7F
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{GATE} holds NaN"):
        load_model(
            ModelConfig.from_pretrained(path),
            path,
            dtype=torch.float32,
            backend=KeepsFp8(),
            tp=SOLO,
            dcp=DcpGroup(1, SOLO),
            num_mtp_layers=1,
        )


def test_kept_fp8_is_counted_as_it_is_kept(tmp_path):
    path = write_random_checkpoint(tmp_path)
    make_fp8(path, (8, 8))
    config = ModelConfig.from_pretrained(path)
    options = {"dtype": torch.bfloat16, "tp": SOLO, "dcp": DcpGroup(1, SOLO), "num_mtp_layers": 1}
    progress = LoadProgress()
    load_model(config, path, backend=KeepsFp8(), progress=progress, **options)
    with Checkpoint(path, config.weight_block_size) as checkpoint:
        kept, dequantised = (
            measure_shard(config, checkpoint.tensors, backend=backend, **options)
            for backend in (KeepsFp8(), TorchBackend())
        )
    assert progress.state().num_bytes == progress.state().total_bytes == kept.file_bytes
    assert kept.file_bytes == dequantised.file_bytes
    # Of 2 layers of experts and one dense layer: half of bfloat16, and 4 bytes for 64 values.
    values = 3 * 64 * (2 * 6 * 24 + 96)
    assert dequantised.weight_bytes - kept.weight_bytes >= values - values // 16


def test_model_equals_the_one_of_dequantised_weights(tmp_path):
    """Every layer's weights, on one rank and on two: the same model as from the values that FP8 means."""
    path = write_random_checkpoint(tmp_path / "fp8")
    meant = make_fp8(path, (32, 32))
    plain = write_random_checkpoint(tmp_path / "plain")
    save_file({name: t.float() for name, t in meant.items()}, plain / "model.safetensors")

    def weights(path, tp, dcp):
        config = ModelConfig.from_pretrained(path)
        model = load_model(
            config, path, dtype=torch.float32, backend=TorchBackend(), tp=tp, dcp=dcp, num_mtp_layers=1
        )
        return list(tensors_of(model))

    for size in (1, 2):
        fp8, wide = (run_ranks(size, 1, 1, lambda tp, dcp, p=p: weights(p, tp, dcp)) for p in (path, plain))
        for ours, theirs in zip(fp8, wide, strict=True):
            assert len(ours) == len(theirs) > 100
            assert all(map(torch.equal, ours, theirs))


def tensors_of(value):
    """All tensors that an object of the model holds, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
    elif type(value).__module__.startswith(
        ("actors.model", "kernels_integration.reference")
    ) and not isinstance(value, ModelConfig):
        names = getattr(type(value), "__slots__", None) or vars(value)
        for name in sorted(names):
            yield from tensors_of(getattr(value, name))


def refusal(path):
    config = ModelConfig.from_pretrained(path)
    with pytest.raises(CheckpointError) as info:
        load_model(
            config,
            path,
            dtype=torch.float32,
            backend=TorchBackend(),
            tp=SOLO,
            dcp=DcpGroup(1, SOLO),
            num_mtp_layers=1,
        )
    return str(info.value)


@pytest.fixture
def fp8_path(tmp_path):
    path = write_random_checkpoint(tmp_path)
    make_fp8(path)
    return path


def change(path, edit):
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{GATE}_scale_inv"), f"wrong dtype {GATE}: F8_E4M3 in model.safetensors without"),
        (
            lambda t: t.update({f"{GATE}_scale_inv": torch.ones(2, 1)}),
            f"wrong shape {GATE}_scale_inv: [2, 1] in model.safetensors, must be [1, 1]: one scale for each",
        ),
        (
            lambda t: t.update({f"{GATE}_scale_inv": torch.ones(1, 1, dtype=torch.int32)}),
            f"wrong dtype {GATE}_scale_inv: I32",
        ),
        (
            lambda t: t.update({GATE: torch.ones(24, 64)}),
            f"unexpected  {GATE}_scale_inv in model.safetensors",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}),
            "wrong dtype model.norm.weight: F8_E4M3 in model.safetensors, must be one of BF16",
        ),
        (
            lambda t: t.update({GATE: torch.ones(24, 64).to(torch.float8_e5m2)}),
            f"wrong dtype {GATE}: F8_E5M2 in model.safetensors, must be one of",
        ),
        (lambda t: t.update({"x.weight_scale_inv": torch.ones(1, 1)}), "unexpected  x.weight_scale_inv"),
    ],
)
def test_what_does_not_fit_together_is_named(fp8_path, edit, message):
    change(fp8_path, edit)
    assert message in refusal(fp8_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_scales_that_leave_no_numbers(fp8_path, value):
    change(fp8_path, lambda t: t[f"{GATE}_scale_inv"].fill_(value))
    message = refusal(fp8_path)
    assert f"tensor {GATE}" in message
    assert "holds NaN or infinite values" in message


def test_nan_among_the_fp8_values(fp8_path):
    change(fp8_path, lambda t: t[GATE].view(torch.uint8).__setitem__((3, 5), 0x7F))
    assert f"tensor {GATE} holds NaN" in refusal(fp8_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "awq", "bits": 4}, ["'awq' (bits 4)", "supported: bfloat16"]),
        ({"quant_method": "gptq", "bits": 8}, ["'gptq' (bits 8)"]),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            ["'compressed-tensors' (format 'pack-quantized')"],
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ["'modelopt' (quant_algo 'NVFP4')"]),
        ({**QUANTIZATION, "fmt": "e5m2"}, ["fmt 'e5m2'", "must be 'e4m3'"]),
        ({**QUANTIZATION, "activation_scheme": "static"}, ["activation_scheme 'static'"]),
        ({**QUANTIZATION, "weight_block_size": [128]}, ["weight_block_size is [128]"]),
        ({**QUANTIZATION, "weight_block_size": [0, 128]}, ["weight_block_size is [0, 128]"]),
        ({**QUANTIZATION, "weight_block_size": None}, ["weight_block_size is null", "per tensor or channel"]),
        ([], ["quantization_config is []; it must be an object"]),
    ],
)
def test_formats_that_are_not_read_are_named(config, words):
    with pytest.raises(CheckpointError) as info:
        ModelConfig.from_dict({**BASE_CONFIG, "quantization_config": config})
    assert all(word in str(info.value) for word in words)


def test_packed_tensors_without_a_word_in_the_config(tmp_path):
    def pack(tensors):
        for name in [n for n in tensors if ".experts." in n]:
            del tensors[name]
            stem = name.removesuffix(".weight")
            tensors[f"{stem}.qweight"] = torch.zeros(3, 3, dtype=torch.int32)
            tensors[f"{stem}.scales"] = torch.ones(3, 3)

    path = write_random_checkpoint(tmp_path)
    change(path, pack)
    message = refusal(path)
    assert "(1 problem)" in message
    assert "108 tensors such as model.layers." in message
    assert " hold packed integers (AWQ or GPTQ); supported" in message
    assert "supported: bfloat16" in message


def test_block_size_without_a_config_is_128(fp8_path):
    config = json.loads((fp8_path / "config.json").read_text())
    del config["quantization_config"]
    assert ModelConfig.from_dict(config).weight_block_size == (128, 128)
