"""Which backend is taken: the one asked for or a reason, the best that can for auto."""

import dataclasses
import subprocess
import sys
import types
from typing import Any

import pytest
import torch

from kernels_integration import registry
from kernels_integration.errors import ConfigError
from kernels_integration.reference.backend import TorchBackend
from kernels_integration.registry import Capabilities, Needs, choose, create, refusal

CPU = Needs(
    device="cpu",
    dtype="float32",
    kv_cache_dtype="float32",
    indexer_kv_dtype="float32",
    num_heads=16,
    latent_rank=512,
    rope_dim=64,
    index_dim=128,
    needs_lse=False,
)
CUDA = dataclasses.replace(CPU, device="cuda")
DETERMINISTIC = dataclasses.replace(CPU, deterministic=True)


def install(monkeypatch, name, refusal):
    """A backend module that answers with `refusal(needs)`."""
    module: Any = types.ModuleType(f"fake_{name}")
    module.refusal = refusal
    module.create = lambda needs: (name, needs)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entry = dataclasses.replace(registry._ENTRIES[name], module=module.__name__)
    monkeypatch.setitem(registry._ENTRIES, name, entry)


def test_auto_takes_native_on_a_cpu_and_torch_where_it_cannot(monkeypatch):
    install(monkeypatch, "native", lambda needs: None)
    assert choose("auto", CPU) == registry.Choice(name="native")
    install(monkeypatch, "native", lambda needs: "no C compiler is on the PATH")
    reason = "native cannot be used: no C compiler is on the PATH"
    assert choose("auto", CPU) == registry.Choice(name="torch", passed_over=(("native", reason),))
    assert choose("torch", CPU).name == "torch"
    backend = create("torch", dataclasses.replace(CPU, dtype="float64"))
    assert isinstance(backend, TorchBackend)
    assert backend.device == torch.device("cpu")


def test_deterministic_is_refused_where_sums_depend_on_the_batch():
    assert choose("auto", DETERMINISTIC).name == "native"
    with pytest.raises(ConfigError, match="torch cannot be used: its sums depend on the batch"):
        choose("torch", DETERMINISTIC)


@pytest.mark.parametrize("name", ["triton", "aiter"])
def test_a_backend_of_another_device_is_refused_in_one_sentence(name):
    with pytest.raises(
        ConfigError, match=f"attention-backend {name} cannot be used: it computes on cuda, not"
    ):
        choose(name, CPU)


def test_auto_goes_by_the_device_and_says_what_it_passed_over(monkeypatch):
    for name in ("torch", "triton", "aiter"):
        install(monkeypatch, name, lambda needs: None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert choose("auto", CUDA).name == "triton"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert choose("auto", CUDA).name == "aiter"
    install(monkeypatch, "aiter", lambda needs: "gfx90a is not supported")
    choice = choose("auto", CUDA)
    assert choice.name == "torch"
    assert choice.passed_over == (("aiter", "aiter cannot be used: gfx90a is not supported"),)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (SystemExit("the compiler failed"), "SystemExit: the compiler failed"),
        (RuntimeError("no driver"), "RuntimeError: no driver"),
        (ModuleNotFoundError("No module named 'triton'", name="triton"), "package triton is missing"),
    ],
)
def test_a_broken_package_is_a_reason_and_no_crash(monkeypatch, error, reason):
    def fail(needs):
        raise error

    install(monkeypatch, "triton", fail)
    with pytest.raises(ConfigError, match=f"triton cannot be used: {reason}; use --attention-backend auto"):
        choose("triton", CUDA)


def test_nothing_usable_names_every_reason(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    for name in ("torch", "triton"):
        install(monkeypatch, name, lambda needs: "no GPU")
    with pytest.raises(ConfigError, match="triton cannot be used: no GPU; torch cannot be used: no GPU"):
        choose("auto", CUDA)


FEW = Capabilities(
    dtypes=frozenset({"bfloat16"}),
    kv_cache_dtypes=frozenset({"bfloat16", "fp8_ds_mla"}),
    indexer_kv_dtypes=frozenset({"bfloat16"}),
    head_counts=frozenset({16, 128}),
    latent_sizes=frozenset({(512, 64)}),
    returns_lse=False,
)
TAKEN = dataclasses.replace(CUDA, dtype="bfloat16", kv_cache_dtype="fp8_ds_mla", indexer_kv_dtype="bfloat16")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"dtype": "float64"}, "it does not take dtype float64, only bfloat16"),
        ({"kv_cache_dtype": "float32"}, "it does not take kv-cache-dtype float32, only bfloat16, fp8_ds_mla"),
        ({"indexer_kv_dtype": "fp8"}, "it does not take indexer-kv-dtype fp8, only bfloat16"),
        ({"indexer_kv_dtype": "fp8", "index_dim": 0}, None),
        ({"num_heads": 24}, "it does not take number of query heads of a shard 24, only 16, 128"),
        ({"latent_rank": 256}, "it does not take a latent of 256 + 64 values, only 512 + 64"),
        ({"needs_lse": True}, "it returns no LSE, which merging the parts of DCP ranks needs"),
    ],
)
def test_capabilities_name_what_is_not_taken(change, reason):
    assert FEW.refusal(dataclasses.replace(TAKEN, **change)) == reason


def test_the_registry_needs_no_torch():
    code = "import sys, kernels_integration.registry; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_torch_without_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal("torch", CUDA) == "torch cannot be used: this machine's torch finds no GPU"


@pytest.mark.slow
def test_a_group_on_a_cpu_imports_no_kernels():
    code = (
        "import sys, actors.inline_group, cluster.cli; from kernels_integration import registry; "
        f"registry.create('torch', registry.Needs(**{dataclasses.asdict(CPU)!r})); "
        "print([m for m in sys.modules if m.startswith(('triton', 'kernels_integration.triton'))])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
