"""Files as users have them: any number, stacked experts, a wrong index, broken ones; every fault by name."""

import json
import os
import struct
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from actors.model.checkpoint import Checkpoint
from actors.model.config import ModelConfig
from actors.model.load_progress import LoadProgress
from actors.model.model import load_model, measure_shard
from actors.model.tensors import main_tensor_shapes, mtp_tensor_shapes, repeated_tensor_shapes
from kernels_integration.collectives import SoloCollectives
from kernels_integration.collectives.in_process import InProcessCollectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.errors import CheckpointError
from kernels_integration.reference.backend import TorchBackend
from tests.support.model_ranks import run_ranks
from tests.support.random_checkpoint import BASE_CONFIG, write_random_checkpoint

SOLO = SoloCollectives()
SOLO_DCP = DcpGroup(1, SOLO)
INDEX = "model.safetensors.index.json"
GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"


@pytest.fixture
def path(tmp_path):
    return write_random_checkpoint(tmp_path)


def load(path, **keywords):
    config = ModelConfig.from_pretrained(path)
    options = {
        "dtype": torch.float32,
        "backend": TorchBackend(),
        "tp": SOLO,
        "dcp": SOLO_DCP,
        "num_mtp_layers": 1,
    }
    return load_model(config, path, **{**options, **keywords})


def refusal(path, **keywords):
    with pytest.raises(CheckpointError) as info:
        load(path, **keywords)
    return str(info.value)


def shapes_of(path):
    config = ModelConfig.from_pretrained(path)
    return main_tensor_shapes(config) | mtp_tensor_shapes(config)


def read_all(path):
    """Every tensor that the model asks for, by the checkpoint reader."""
    with Checkpoint(path) as checkpoint:
        checkpoint.check(shapes_of(path), repeated_tensor_shapes(ModelConfig.from_pretrained(path)))
        return {name: checkpoint.read(name) for name in shapes_of(path)}


def assert_equal(got, want):
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def write_index(path, weight_map):
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def scatter(path, files):
    """Spread the tensors of model.safetensors over files; returns them and where they are."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {name: files[i % len(files)] for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, path / file)
    return tensors, weight_map


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_any_scattering_with_any_index_over_the_right_files(tmp_path_factory, data):
    """The index may be missing, right, or name a wrong file for any tensor, one that does not exist too."""
    path = write_random_checkpoint(tmp_path_factory.mktemp("scattered"), {"num_nextn_predict_layers": 0})
    files = [f"{n}.safetensors" for n in data.draw(st.lists(st.integers(0, 9), min_size=1, unique=True))]
    tensors, weight_map = scatter(path, files)
    if data.draw(st.booleans()):
        wrong = st.sampled_from([*files, "gone.safetensors"])
        said = {n: data.draw(wrong) if data.draw(st.booleans()) else f for n, f in weight_map.items()}
        write_index(path, {n: f for n, f in said.items() if data.draw(st.booleans())})
    if not (path / INDEX).exists() or set(json.loads((path / INDEX).read_text())["weight_map"]):
        covered = names_within_reach(path, weight_map)
        if covered == tensors.keys():
            assert_equal(read_all(path), tensors)
        else:  # the index names neither the tensor nor its file: it is not part of the checkpoint
            missing = sorted(tensors.keys() - covered)
            with pytest.raises(CheckpointError) as info:
                read_all(path)
            assert all(f"missing     {name}," in str(info.value) for name in missing[:50])


def names_within_reach(path, weight_map):
    if not (path / INDEX).exists():
        return weight_map.keys()
    index = json.loads((path / INDEX).read_text())["weight_map"]
    return {name for name, file in weight_map.items() if name in index or file in set(index.values())}


def test_a_wrong_index_is_noted(path):
    _, weight_map = scatter(path, ["a.safetensors", "b.safetensors"])
    assert weight_map[GATE] in ("a.safetensors", "b.safetensors")
    wrong = {"a.safetensors": "b.safetensors", "b.safetensors": "a.safetensors"}[weight_map[GATE]]
    write_index(path, {**weight_map, GATE: wrong})
    with Checkpoint(path) as checkpoint:
        assert checkpoint[GATE].file == weight_map[GATE]
        assert checkpoint.notes == [
            f"{INDEX} says that {GATE} is in {wrong}; it is read from {weight_map[GATE]}"
        ]
        assert checkpoint.problems == []


def test_the_index_settles_which_of_two_files_counts(path):
    _, weight_map = scatter(path, ["a.safetensors", "b.safetensors"])
    other = torch.full((24, 64), 7.0)
    save_file({GATE: other}, path / "c.safetensors")
    message = refusal(path)
    assert f"tensor {GATE} is in {weight_map[GATE]} and in c.safetensors" in message
    assert f"add {INDEX}" in message
    write_index(path, weight_map)
    load(path)
    write_index(path, {**weight_map, GATE: "c.safetensors"})
    assert torch.equal(read_all(path)[GATE], other)


def test_all_faults_of_a_directory_at_once(path):
    """A duplicate and a truncated file do not hide a wrong shape, a wrong dtype and a missing tensor."""
    tensors, weight_map = scatter(path, ["a.safetensors", "b.safetensors", "c.safetensors"])
    names = [n for n in tensors if n.startswith("model.layers.2.mlp.experts.")][:6]
    part = {n: t for n, t in tensors.items() if weight_map[n] == "a.safetensors"}
    own = [n for n in part if part[n].dim() == 2][:2]
    part[own[0]], part[own[1]] = torch.zeros(3, 3), part[own[1]].to(torch.int8)
    lost = next(n for n in part if n not in own)
    del part[lost]
    twice = next(n for n in names if weight_map[n] == "b.safetensors")
    part[twice] = tensors[twice]
    save_file(part, path / "a.safetensors")
    whole = (path / "c.safetensors").read_bytes()
    (path / "c.safetensors").write_bytes(whole[:-9])
    message = refusal(path)
    assert "(5 problems)" in message
    assert f"tensor {twice} is in a.safetensors and in b.safetensors" in message
    assert "c.safetensors is truncated or not a safetensors file (9 of" in message
    assert f"wrong shape {own[0]}: [3, 3]" in message
    assert f"wrong dtype {own[1]}: I8" in message
    assert f"missing     {lost}," in message


def test_an_unreadable_file_does_not_flood_the_list(path):
    _, weight_map = scatter(path, ["a.safetensors", "b.safetensors"])
    (path / "b.safetensors").write_bytes(b"not a header")
    message = refusal(path)
    assert "b.safetensors is truncated or not a safetensors file" in message
    num = sum(file == "b.safetensors" for file in weight_map.values())
    assert f"missing     {num} tensors, unless the files that cannot be read hold them" in message
    write_index(path, weight_map)
    assert "(1 problem)" in refusal(path)


def test_long_lists_are_cut(path):
    tensors = load_file(path / "model.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, path / "model.safetensors")
    message = refusal(path)
    assert len(message.splitlines()) == 102
    assert message.endswith(f"more; `latentray inspect {path}` lists them")


HEADERS = {
    "huge": struct.pack("<Q", 1 << 60) + b"{}",
    "short": b"abc",
    "no json": struct.pack("<Q", 4) + b"{{{{",
    "a list": struct.pack("<Q", 2) + b"[]",
    "no offsets": struct.pack("<Q", 8) + b'{"a":{}}',
    "no utf-8": struct.pack("<Q", 4) + b'"\xff\xff"',
}


@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS.keys())
def test_files_that_are_no_safetensors(path, content):
    (path / "model.safetensors").write_bytes(content)
    assert "model.safetensors is truncated or not a safetensors file" in refusal(path)


def header_file(entries, data):
    text = json.dumps(entries) if isinstance(entries, dict) else entries
    return struct.pack("<Q", len(text)) + text.encode() + data


@pytest.mark.parametrize(
    ("entries", "num_bytes", "message"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, 4, "takes 4 bytes instead of 8"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, 8, "overlaps or has holes at byte 0"),
        (
            {n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"},
            4,
            "overlaps or has holes at byte 0",
        ),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 6, "2 bytes follow the last tensor"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, 4, "-1 is no size"),
        (
            '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
            '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            4,
            "the header names a twice",
        ),
    ],
)
def test_headers_that_lie(path, entries, num_bytes, message):
    (path / "model.safetensors").write_bytes(header_file(entries, bytes(num_bytes)))
    assert message in refusal(path)


@given(st.integers(0, 400), st.integers(0, 255))
@settings(max_examples=100, deadline=None)
def test_a_flipped_byte_of_a_header_is_never_a_crash(tmp_path_factory, at, value):
    path = tmp_path_factory.mktemp("flipped")
    save_file({"a": torch.ones(3, 2), "b": torch.ones(5)}, path / "model.safetensors")
    content = bytearray((path / "model.safetensors").read_bytes())
    content[at % len(content)] = value
    (path / "model.safetensors").write_bytes(content)
    with Checkpoint(path) as checkpoint:
        for name in list(checkpoint):
            if not checkpoint.find_problems({n: checkpoint[n].shape for n in checkpoint}, {}):
                checkpoint.find_bad_values(name)


# Experts in one tensor, as transformers 5 keeps them in memory and saves them when asked for that.


def stack(tensors, layers):
    """experts.gate_up_proj [E, 2I, hidden] and experts.down_proj [E, hidden, I] of these layers."""
    stacked = dict(tensors)
    for layer in layers:
        prefix = f"model.layers.{layer}.mlp.experts"
        each = [
            {part: stacked.pop(f"{prefix}.{e}.{part}_proj.weight") for part in ("gate", "up", "down")}
            for e in range(BASE_CONFIG["n_routed_experts"])
        ]
        stacked[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat((e["gate"], e["up"])) for e in each])
        stacked[f"{prefix}.down_proj"] = torch.stack([e["down"] for e in each])
    return stacked


def test_stacked_experts_of_some_layers(path):
    tensors = load_file(path / "model.safetensors")
    save_file(stack(tensors, [1, 3]), path / "model.safetensors")
    assert_equal(read_all(path), tensors)


def test_what_transformers_saves(path, tmp_path_factory):
    """Both of its spellings: experts one by one (its default), and stacked."""
    import transformers

    transformers.logging.disable_progress_bar()
    tensors = load_file(path / "model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for original in (True, False):
        saved = tmp_path_factory.mktemp("saved")
        model.save_pretrained(saved, save_original_format=original, max_shard_size="100KB")
        assert (saved / INDEX).exists()
        with Checkpoint(saved) as checkpoint:
            assert (checkpoint[GATE].stored_as is None) is original
            got = {name: checkpoint.read(name) for name in checkpoint}
        assert_equal(got, {n: t for n, t in tensors.items() if not n.startswith("model.layers.3.")})


def test_stacked_and_single_at_once(path):
    tensors = load_file(path / "model.safetensors")
    save_file({**stack(tensors, [1]), GATE: tensors[GATE]}, path / "model.safetensors")
    message = refusal(path)
    assert (
        f"tensor {GATE} of {path} is stored by itself and within model.layers.1.mlp.experts.gate" in message
    )


def test_stacked_fp8(tmp_path):
    """Halves end where blocks do: read. Else the blocks of gate and up would mix: refused."""
    from tests.support.fp8_weights import is_kept_high, make_fp8

    for block, is_legal in (((8, 16), True), ((16, 16), False)):
        path = write_random_checkpoint(tmp_path / str(block[0]))
        meant = make_fp8(path, block, is_kept_high)
        tensors = load_file(path / "model.safetensors")
        stacked = stack(tensors, [1])
        prefix = "model.layers.1.mlp.experts"
        scales = {
            part: [stacked.pop(f"{prefix}.{e}.{part}_proj.weight_scale_inv") for e in range(6)]
            for part in ("gate", "up", "down")
        }
        stacked[f"{prefix}.down_proj_scale_inv"] = torch.stack(scales["down"])
        stacked[f"{prefix}.gate_up_proj_scale_inv"] = torch.stack(
            [torch.cat(pair) for pair in zip(scales["gate"], scales["up"], strict=True)]
        )
        save_file(stacked, path / "model.safetensors")
        if is_legal:
            with Checkpoint(path, block) as checkpoint:
                for name in (n for n in meant if "layers.1.mlp.experts" in n):
                    assert torch.equal(checkpoint.read(name, dtype=torch.float64), meant[name])
            load(path)
        else:
            assert f"{prefix}.gate_up_proj in model.safetensors: no FP8 block of 16 rows" in refusal(path)


# Repeated tensors.


@pytest.mark.parametrize(
    ("copy", "original"),
    [
        ("model.layers.3.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.3.shared_head.head.weight", "lm_head.weight"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_mtp_copies_must_be_equal_to_draft(path, copy, original, size):
    tensors = load_file(path / "model.safetensors")
    tensors[copy] = tensors[original].clone()
    save_file(tensors, path / "model.safetensors")
    load(path)
    tensors[copy][99, 5] += 1
    save_file(tensors, path / "model.safetensors")
    assert load(path, num_mtp_layers=0)
    last = InProcessCollectives.create(size)[-1]
    message = refusal(path, tp=last, dcp=SOLO_DCP)
    assert f"tensor {copy} differs from {original}" in message
    assert "--num-speculative-tokens 0" in message


def test_a_tied_head_that_differs(path):
    raw = json.loads((path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (path / "config.json").write_text(json.dumps(raw))
    assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(path, num_mtp_layers=0)


# What loading costs is known beforehand, and told while it goes on.


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("fp8", [False, True])
def test_bytes_are_foreseen(path, size, fp8):
    from tests.support.fp8_weights import make_fp8

    if fp8:
        make_fp8(path, (16, 16))
    config = ModelConfig.from_pretrained(path)
    seen = run_ranks(size, 1, 1, lambda tp, dcp: load_and_count(config, path, tp, dcp))
    for progress, foreseen, num_weight_bytes in seen:
        assert progress.state().num_bytes == progress.state().total_bytes == foreseen.file_bytes
        assert num_weight_bytes == foreseen.weight_bytes
    if size == 1:
        file_bytes = sum(t.nbytes for t in load_file(path / "model.safetensors").values())
        assert seen[0][1].file_bytes == file_bytes


def load_and_count(config, path, tp, dcp):
    options = {"dtype": torch.bfloat16, "backend": TorchBackend(), "tp": tp, "dcp": dcp, "num_mtp_layers": 1}
    progress = LoadProgress()
    model = load_model(config, path, **options, progress=progress)
    with Checkpoint(path, config.weight_block_size) as checkpoint:
        foreseen = measure_shard(config, checkpoint.tensors, **options)
    return progress, foreseen, sum(t.untyped_storage().nbytes() for t in distinct_storages(model))


def distinct_storages(model):
    from tests.unit.model.test_quantization import tensors_of

    parameters = [t for t in tensors_of(model) if t.is_floating_point() and t is not model.frequencies]
    return list({t.untyped_storage().data_ptr(): t for t in parameters}.values())


def test_seconds_left():
    now = [100.0]
    progress = LoadProgress(clock=lambda: now[0])
    assert progress.state().total_bytes == 0
    progress.begin(1000)
    assert progress.state().seconds_left is None
    now[0] += 2
    progress.advance(250)
    state = progress.state()
    assert (state.num_bytes, state.total_bytes, state.seconds_left) == (250, 1000, 6.0)
    progress.advance(750)
    assert progress.state().seconds_left == 0


@pytest.mark.slow
def test_no_more_than_a_slice_is_held(tmp_path):
    """Reading half the columns of 32 MB takes half of it and tiles, in this process's own memory."""
    save_file({"w": torch.ones(4096, 4096, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    code = (
        "import resource, sys, torch\n"
        "from actors.model.checkpoint import Checkpoint\n"
        "torch.set_num_threads(1)\n"
        "with Checkpoint(sys.argv[1]) as c:\n"
        "    c.read('w', rows=slice(0, 64), columns=slice(0, 64))\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "    part = c.read('w', columns=slice(2048, 4096))\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, part.nbytes >> 10)\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=root, capture_output=True, text=True, check=True
    )
    grown, size = map(int, done.stdout.split())
    assert size == 16 * 1024
    assert grown < size * 1.3


# Directories.


def test_links_of_a_download_cache(path, tmp_path_factory):
    """A directory of symbolic links into a store of blobs, itself read through a link."""
    snapshot = tmp_path_factory.mktemp("cache")
    for file in path.iterdir():
        (snapshot / file.name).symlink_to(file)
    link = snapshot / "latest"
    link.symlink_to(snapshot)
    load(link)
    (path / "model.safetensors").unlink()
    assert "model.safetensors cannot be read: No such file or directory" in refusal(link)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_with_the_reason(path, name):
    (path / "model.safetensors").rename(path / name)
    message = refusal(path)
    assert f"it holds {name}, but pickle files" in message
    assert "can execute code" in message
