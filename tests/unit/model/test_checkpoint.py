import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.model.checkpoint import Checkpoint
from actors.model.config import ModelConfig
from actors.model.model import load_model
from actors.model.tensors import main_tensor_shapes, mtp_tensor_shapes
from actors.model.weights import WeightReader
from kernels_integration.collectives import SoloCollectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.errors import CheckpointError
from kernels_integration.reference.backend import TorchBackend
from kernels_integration.topology import Topology
from tests.support.model_ranks import run_ranks
from tests.support.random_checkpoint import BASE_CONFIG, write_random_checkpoint

SOLO = SoloCollectives()
SOLO_DCP = DcpGroup(1, SOLO)
GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"


@pytest.fixture
def path(tmp_path):
    return write_random_checkpoint(tmp_path)


def load(path, *, num_mtp_layers=1, tp=SOLO, dcp=SOLO_DCP):
    config = ModelConfig.from_pretrained(path)
    return load_model(
        config,
        path,
        dtype=torch.float32,
        backend=TorchBackend(),
        tp=tp,
        dcp=dcp,
        num_mtp_layers=num_mtp_layers,
    )


def change(path, edit):
    file = path / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def refusal(path, **keywords):
    with pytest.raises(CheckpointError) as info:
        load(path, **keywords)
    return str(info.value)


def split(path, *, index):
    """Three files of every third tensor, with or without an index."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {}
    for part in range(3):
        names = list(tensors)[part::3]
        save_file({n: tensors[n] for n in names}, path / f"part-{part}.safetensors")
        weight_map |= dict.fromkeys(names, f"part-{part}.safetensors")
    if index:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


@pytest.mark.parametrize("index", [True, False])
def test_any_number_of_files_with_or_without_an_index(path, index):
    whole = load(path)
    split(path, index=index)
    parts = load(path)
    assert torch.equal(parts.embed_tokens, whole.embed_tokens)
    x = torch.randn(3, 64)
    assert torch.equal(parts.layers[2].mlp(x), whole.layers[2].mlp(x))
    assert torch.equal(parts.logits(x), whole.logits(x))
    both = torch.randn(3, 128)
    assert torch.equal(parts.mtp_layers[0].eh_proj(both), whole.mtp_layers[0].eh_proj(both))


def test_names_shapes_and_dtypes(tiny_dsa):
    with Checkpoint(tiny_dsa) as checkpoint:
        assert len(list(checkpoint)) == len(load_file_names(tiny_dsa))
        info = checkpoint["model.layers.6.eh_proj.weight"]
        assert (info.shape, info.dtype) == ((256, 512), "BF16")
        assert checkpoint["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == "F32"


def load_file_names(path):
    return json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_slices_of_all_ranks_make_the_tensor(path, size):
    tensors = load_file(path / "model.safetensors")
    with Checkpoint(path) as checkpoint:
        readers = [
            WeightReader(checkpoint=checkpoint, dtype=torch.float64, rank=r, topology=Topology(tp=size))
            for r in range(size)
        ]
        down = GATE.replace("gate_proj", "down_proj")
        assert torch.equal(torch.cat([r.rows(GATE).values for r in readers]), tensors[GATE].double())
        assert torch.equal(torch.cat([r.columns(down).values for r in readers], 1), tensors[down].double())
        under = readers[-1].under("model.layers.1.").under("mlp.experts.3.")
        assert torch.equal(under.whole("gate_proj.weight"), tensors[GATE].double())
        vocabulary = torch.cat([r.vocabulary("lm_head.weight") for r in readers])
        assert torch.equal(vocabulary[:101], tensors["lm_head.weight"].double())
        assert not vocabulary[101:].any()


def test_all_problems_are_listed_by_name(path):
    def edit(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.3.eh_proj.weight"]
        tensors["model.layers.2.surprise"] = torch.zeros(3)
        tensors[GATE] = torch.zeros(24, 63)
        tensors["lm_head.weight"] = torch.zeros(101, 64, dtype=torch.int8)

    change(path, edit)
    message = refusal(path)
    assert "(5 problems)" in message
    assert "missing     model.norm.weight, shape [64]" in message
    assert "missing     model.layers.3.eh_proj.weight, shape [64, 128]" in message
    assert "unexpected  model.layers.2.surprise, shape [3] in model.safetensors" in message
    assert f"wrong shape {GATE}: [24, 63] in model.safetensors, must be [24, 64]" in message
    assert "wrong dtype lm_head.weight: I8" in message


def test_mtp_tensors_are_needed_only_to_draft(path):
    mtp = mtp_tensor_shapes(ModelConfig.from_pretrained(path))
    change(path, lambda tensors: [tensors.pop(name) for name in mtp])
    assert load(path, num_mtp_layers=0).mtp_layers == []
    message = refusal(path)
    assert all(f"missing     {name}," in message for name in mtp)


def test_mtp_tensors_are_unexpected_where_the_config_has_no_mtp(path):
    (path / "config.json").write_text(json.dumps({**BASE_CONFIG, "num_nextn_predict_layers": 0}))
    assert "tensors of layer 3, such as model.layers.3." in refusal(path, num_mtp_layers=0)
    assert "no MTP layer" in refusal(path, num_mtp_layers=1)


def test_mtp_weights_are_not_read_without_drafts(path):
    change(path, lambda tensors: tensors["model.layers.3.eh_proj.weight"].fill_(float("nan")))
    load(path, num_mtp_layers=0)
    assert "model.layers.3.eh_proj.weight holds NaN" in refusal(path)


def test_embedding_and_head_may_be_repeated_in_the_mtp_layer(path):
    def edit(tensors):
        tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()

    change(path, edit)
    assert len(load(path).mtp_layers) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(path, value):
    change(path, lambda tensors: tensors[GATE].__setitem__((5, 7), value))
    assert f"model.safetensors: tensor {GATE} holds NaN or infinite values" in refusal(path)


def test_truncated_file(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors is truncated or not a safetensors file" in refusal(path)
    file.write_bytes(b"")
    assert "model.safetensors is truncated or not a safetensors file" in refusal(path)


def test_what_is_no_regular_file(path):
    (path / "folder.safetensors").mkdir()
    os.mkfifo(path / "pipe.safetensors")
    (path / "link.safetensors").symlink_to("nowhere")
    text = refusal(path)
    assert "folder.safetensors cannot be read: it is no regular file" in text
    assert "pipe.safetensors cannot be read: it is no regular file" in text
    assert "link.safetensors cannot be read: No such file" in text


def test_missing_file_of_the_index_and_missing_tensor(path):
    weight_map = split(path, index=True)
    (path / "part-1.safetensors").unlink()
    assert "lacks files that model.safetensors.index.json names: part-1.safetensors" in refusal(path)
    index = {"weight_map": {**weight_map, "model.ghost": "part-0.safetensors"}}
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f != "part-1.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "that tensor model.ghost is in part-0.safetensors, but no file holds it" in refusal(path)


@pytest.mark.parametrize(
    "text",
    ["{", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../x.safetensors"}}', '{"weight_map": {"a": 1}}'],
)
def test_broken_index(path, text):
    (path / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refusal(path)


def test_tensor_in_two_files(path):
    save_file({GATE: torch.zeros(24, 64)}, path / "other.safetensors")
    message = refusal(path)
    assert f"tensor {GATE} is in model.safetensors and in other.safetensors" in message


def test_pickles_are_never_opened(path):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was loaded",))

    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    message = refusal(path)
    assert "holds no *.safetensors" in message
    assert "pickle files" in message


def test_read_only_symlinked_directory(path, tmp_path_factory):
    link = tmp_path_factory.mktemp("links") / "model"
    link.symlink_to(path)
    path.chmod(0o555)
    try:
        assert load(link).dtype is torch.float32
    finally:
        path.chmod(0o755)


def test_half_precision_weights_are_widened(path):
    change(path, lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()}))
    assert load(path).embed_tokens.dtype is torch.float32


def test_expected_names_are_those_of_the_bundled_release(tiny_dsa):
    config = ModelConfig.from_pretrained(tiny_dsa)
    assert set(main_tensor_shapes(config) | mtp_tensor_shapes(config)) == set(load_file_names(tiny_dsa))


def test_a_rank_reads_only_its_slices(path, monkeypatch):
    """Replicated are norms, router, indexer and the projections into latents; the rest is shared out."""
    shapes = main_tensor_shapes(ModelConfig.from_pretrained(path))
    reads = []
    plain = Checkpoint.fill

    def counting(self, name, rows, columns, out):
        plain(self, name, rows, columns, out)
        reads.append((name, len(rows) * len(columns)))

    monkeypatch.setattr(Checkpoint, "fill", counting)
    run_ranks(2, 1, 1, lambda tp, dcp: load(path, num_mtp_layers=0, tp=tp, dcp=dcp))
    replicated = ("norm", "mlp.gate.", "indexer", "q_a_proj", "kv_a_proj")
    for name, shape in shapes.items():
        copies = 2 if any(part in name for part in replicated) else 1
        assert sum(n for read, n in reads if read == name) == copies * torch.Size(shape).numel(), name
