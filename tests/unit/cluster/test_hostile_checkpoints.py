"""Checkpoint directories that nobody wrote in good faith: an error that names the file, and soon."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.config import BUNDLED_CHECKPOINT
from cluster.frontend.front_end import ModelFrontend
from cluster.report.inspection import inspect_checkpoint
from cluster.tokenizer import load_tokenizer
from kernels_integration.errors import CheckpointError

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)
NASTY: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    5,
    2**63,
    2**200,
    1e308,
    float("nan"),
    "",
    "x",
    "\ud800",
    "<|bos|>",
    "x" * 100_000,
    [],
    [[]],
    {},
    {"content": 5},
    {"a": {"b": {"c": 1}}},
    [1, "a", None],
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundled checkpoint with every optional file, its weights linked."""
    path = tmp_path / "model"
    path.mkdir()
    for file in BUNDLED_CHECKPOINT.iterdir():
        if file.suffix == ".safetensors":
            (path / file.name).symlink_to(file)
        elif file.suffix == ".json":
            shutil.copy(file, path)
    (path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<|bos|>", "lstrip": false}}')
    (path / "added_tokens.json").write_text('{"<|more|>": 6144}')
    (path / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return path


def load(folder: Path) -> None:
    """What `serve` and `inspect` read of it before weights. Errors: CheckpointError, and nothing else."""
    found = inspect_checkpoint(folder)
    assert all(isinstance(problem, str) for problem in found.problems)
    ModelFrontend.from_pretrained(folder, served_model_name="m", max_model_len=64)


def nodes(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to some of the values inside; long lists and objects by their first entries."""
    children = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    return [at, *(path for key, child in children[:40] for path in nodes(child, (*at, key)))]


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], new)
    return copy


def mutated(rng: random.Random, content: bytes) -> bytes:
    """One file of the fuzzer: a value replaced, a key renamed, or bytes changed, cut or repeated."""
    kind = rng.randrange(6)
    if kind < 4 and content[:2] != b"{%":
        value = json.loads(content)
        path = rng.choice(nodes(value))
        text = json.dumps(changed(value, path, rng.choice(NASTY)))
        if kind == 3:
            text = text.replace('"content"', '"kontent"', 1)
        return text.encode("utf-8", "surrogatepass")
    at = rng.randrange(len(content))
    if kind == 4:
        return content[:at]
    return content[:at] + rng.randbytes(rng.randrange(1, 9)) + content[at:]


@pytest.mark.product(4)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(9))
def test_any_damage_to_any_file_is_an_error_of_the_checkpoint(folder: Path, seed: int) -> None:
    """Every file in turn. Neither another exception nor a crash of the tokenizers library."""
    rng = random.Random(seed)
    name = FILES[seed]
    original = (folder / name).read_bytes()
    messages = []
    for _ in range(12):
        (folder / name).write_bytes(mutated(rng, original))
        try:
            load(folder)
        except CheckpointError as error:
            messages.append(str(error))
    assert all(len(message) < 20_000 for message in messages)
    (folder / name).write_bytes(original)
    load(folder)


@pytest.mark.product(18)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "deep", "digits", "other user's file"])
def test_what_is_no_file_of_a_checkpoint_is_named(folder: Path, tmp_path: Path, name: str, kind: str) -> None:
    file = folder / name
    file.unlink()
    makers: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(file),
        "device": lambda: file.symlink_to("/dev/zero"),
        "folder": file.mkdir,
        "deep": lambda: file.write_text('{"a":' * 100_000),
        "digits": lambda: file.write_text(f'{{"eos_token_id": {"7" * 5000}}}'),
        "other user's file": lambda: file.symlink_to("/etc/hostname"),
    }
    makers[kind]()
    if name == "chat_template.jinja" and kind in ("deep", "digits"):
        return  # text like any other
    found = inspect_checkpoint(folder)
    assert any(name in problem for problem in found.problems), found.problems


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra_special_tokens": 5}, "extra_special_tokens is 5; it must be a list of tokens"),
        ({"extra_special_tokens": [5]}, "extra_special_tokens is 5; it must be a text"),
        ({"additional_special_tokens": [None]}, "additional_special_tokens is null; it must be a text"),
        ({"added_tokens_decoder": []}, r"added_tokens_decoder is \[\]; it must be an object"),
        ({"added_tokens_decoder": {"x": "a"}}, "has the id 'x'; it must be a whole number"),
        ({"added_tokens_decoder": {"7" * 5000: "a"}}, "it must be a whole number"),
        ({"added_tokens_decoder": {"1": 5}}, "token 1 is 5; it must be a text"),
        ({"added_tokens_decoder": {"1": {"content": "a", "special": 3}}}, "special is 3; it must be true"),
        ({"bos_token": 5}, "bos_token is 5; it must be a text"),
    ],
)
def test_declared_tokens_of_another_form_are_named(folder: Path, change: dict[str, Any], words: str) -> None:
    (folder / "special_tokens_map.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(change))
    with pytest.raises(CheckpointError, match=words):
        load_tokenizer(folder)


def added(count: int) -> str:
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "special": True, "normalized": False}
    tokens = {str(9000 + i): {"content": f"<|{i}|>"} | flags for i in range(count)}
    return json.dumps({"added_tokens_decoder": tokens})


def index(count: int) -> str:
    return json.dumps({"weight_map": {f"t{i}": "a.safetensors" for i in range(count)}})


def header(count: int) -> bytes:
    entry = '{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'
    text = ("{" + ",".join(f'"n{i % (count // 2)}": {entry}' for i in range(count)) + "}").encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("tokenizer_config.json", added),
        ("model.safetensors.index.json", index),
        ("model-00001-of-00002.safetensors", header),
    ],
)
def test_the_work_grows_with_the_size_of_a_file_and_not_with_its_square(
    folder: Path, name: str, make: Callable[[int], str | bytes]
) -> None:
    """Four times as much may take ten times as long on a busy machine; a square takes sixteen."""

    def seconds(count: int) -> float:
        content = make(count)
        (folder / name).unlink()
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        best = float("inf")
        for _ in range(2):
            start = time.process_time()
            inspect_checkpoint(folder)
            best = min(best, time.process_time() - start)
        return best

    assert seconds(64_000) < 10 * seconds(16_000)


def test_a_config_of_very_many_layers_is_refused_before_any_is_built(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 65536}
    (folder / "config.json").write_text(json.dumps(config))
    assert any("num_hidden_layers 65536 must be at most" in p for p in inspect_checkpoint(folder).problems)


def test_a_config_of_another_model_is_not_built_to_be_measured(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 300}
    (folder / "config.json").write_text(json.dumps(config))
    found = inspect_checkpoint(folder)
    assert len(found.problems) > 1000
    assert found.shard is None
    assert "config.json describes another model than the weights: sizes are left out" in found.notes


@pytest.mark.slow
def test_a_user_sees_one_message_and_no_traceback(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"extra_special_tokens": 5}')
    command = [sys.executable, "-m", "cluster", "inspect", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "extra_special_tokens is 5" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
