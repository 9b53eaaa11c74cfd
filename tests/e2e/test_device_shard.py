"""A shard of fixed shapes reports what the ragged one reports, step by step, over random lives.

In float64: the two sum in other orders. tests/e2e/test_random_lives.py holds the ragged one to plain streams.
"""

import functools
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from actors import inline_group
from actors.inline_group import InlineGroup
from actors.messages import RowKind, StepInput, StepOutput, TokenLogprobs
from actors.requests import Request
from actors.shard.boundary import Boundary
from actors.shard.build import build_shard
from actors.shard.device_passes import DevicePasses, Passed
from actors.shard.device_shard import DeviceShard
from cluster.answering.choices import choices
from kernels_integration.token_marks import MASKED
from tests.support.groups import EOS, Collected, group_config, request, run, text_prompts
from tests.support.steps import LoneShard, Rows, admission, step_input
from tests.support.tiny_models import Weights, write_tiny_model

TEXTS = text_prompts([96, 96])
MAX_LEN = 160
FAST = range(6)


class _Both:
    """A ragged shard and one of fixed shapes, which run the same steps; their reports must be equal."""

    num_compared = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._ragged = build_shard(*args, **kwargs, fixed_shapes=False)
        self._fixed = build_shard(*args, **kwargs, fixed_shapes=True)

    def execute(self, step: StepInput, report: Callable[[StepOutput], None]) -> None:
        reports: list[StepOutput] = []
        self._ragged.execute(step, reports.append)
        self._fixed.execute(step, reports.append)
        if not reports:  # not rank 0
            return
        expected, found = reports
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.length.tolist() == expected.length.tolist()
        relevant = _relevant(step, expected)
        assert found.drafts[relevant].tolist() == expected.drafts[relevant].tolist()
        _check_logprobs(found.logprobs, expected.logprobs)
        _check_logprobs(found.prompt_logprobs, expected.prompt_logprobs)
        type(self).num_compared += int(relevant.sum())
        report(found)

    def settle(self, *, wait: bool) -> bool:
        return self._fixed.settle(wait=wait)


def _relevant(step: StepInput, output: StepOutput) -> np.ndarray:
    """Drafts whose own rows are not masked: a request at its limit drafts from nothing."""
    relevant, first = [], 0
    for k in step.k[step.kind == RowKind.VERIFY].tolist():
        relevant.append(output.tokens[first + 1 : first + k + 1] != MASKED)
        first += k + 1
    return np.concatenate([np.zeros(0, bool), *relevant])


def _check_logprobs(found: TokenLogprobs | None, expected: TokenLogprobs | None) -> None:
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.num_top == expected.num_top
        np.testing.assert_allclose(found.sampled, expected.sampled, atol=1e-6)
        np.testing.assert_allclose(found.top_values, expected.top_values, atol=1e-6)


@pytest.fixture(autouse=True)
def compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline_group, "build_shard", _Both)
    monkeypatch.setattr(_Both, "num_compared", 0)


def _params(rng: random.Random, prompt: tuple[int, ...]) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_tokens": rng.choice([1, 2, 9, 17, 30]),
        "temperature": rng.choice([0, 0.6, 1]),
    }
    if rng.random() < 0.3:
        params |= {"top_k": rng.choice([1, 8, 50]), "top_p": 0.85, "min_p": 0.05}
    if rng.random() < 0.2:
        params |= {"presence_penalty": 0.7, "frequency_penalty": 0.8, "repetition_penalty": 1.3}
    if rng.random() < 0.2:
        params |= {"logit_bias": {EOS: 4.0, prompt[-1]: -9.0}, "min_tokens": rng.randint(0, 1)}
    if rng.random() < 0.3:
        params |= {"logprobs": rng.choice([0, 3]), "ignore_eos": False}
    if rng.random() < 0.15:
        params |= {"prompt_logprobs": 2, "n": 2}
    return params


def _requests(rng: random.Random, num: int) -> list[Request]:
    made: list[Request] = []
    for i in range(num):
        prompt = rng.choice(TEXTS)[: rng.choice([1, 7, 16, 33, 64, 90])] + tuple(
            rng.choices(range(2, 6144), k=rng.choice([0, 0, 1, 5]))
        )
        req = request(f"{i}", prompt, seed=rng.getrandbits(64), **_params(rng, prompt))
        bad_words = ((5,), (prompt[-1], 7)) if rng.random() < 0.2 else ()
        changes = {"bad_words": bad_words, "priority": rng.randint(-2, 2)}
        for choice in choices(msgspec.structs.replace(req, **changes)):
            made.append(msgspec.structs.replace(choice, request_id=f"{req.request_id}/{choice.index}"))
    return made


def _config(rng: random.Random) -> dict[str, Any]:
    block_size, k = rng.choice([1, 4, 16]), rng.choice([0, 1, 3, 5, 8])
    tp, dcp = rng.choice([(1, 1), (1, 1), (1, 1), (2, 1), (2, 2)])
    least = -(-(MAX_LEN - 1) // (block_size * dcp))
    is_table = rng.random() < 0.4
    return {
        "tensor_parallel_size": tp,
        "decode_context_parallel_size": dcp,
        "cp_kv_cache_interleave_size": rng.choice([1, block_size]),
        "max_model_len": MAX_LEN,
        "num_speculative_tokens": k,
        "num_speculative_tokens_per_batch_size": ((1, 1, k), (2, 3, 0), (4, 99, k // 2)) if is_table else (),
        "block_size": block_size,
        "num_kv_blocks": least + rng.choice([0, 1, least // 3, 4 * least]),
        "max_num_seqs": rng.choice([1, 2, 5, 16]),
        "max_num_batched_tokens": rng.choice([2, 7, 23, 64, 512]),
        "scheduling": rng.choice(["sync", "deferred"]),
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "enable_prefix_caching": rng.random() < 0.7,
    }


def _live(group: InlineGroup, requests: list[Request], rng: random.Random) -> None:
    waiting, ended = list(requests), {r.request_id: Collected() for r in requests}
    while group.has_work or waiting:
        while waiting and (rng.random() < 0.5 or not group.has_work):
            group.submit(waiting.pop())
        if rng.random() < 0.06:
            group.abort([rng.choice(requests).key])
        for update in group.step():
            ended[update.request_id].add(update)
    assert all(c.failed is None or c.failed.code == "aborted" for c in ended.values())


@pytest.mark.product(2)
@pytest.mark.parametrize(
    "seed", [s if s in FAST else pytest.param(s, marks=pytest.mark.slow) for s in range(40)]
)
def test_reports_are_those_of_the_ragged_shard(seed) -> None:
    rng = random.Random(seed)
    config = _config(rng)
    group = InlineGroup(group_config(**config))
    requests = _requests(rng, 8)
    again = [msgspec.structs.replace(r, request_id=f"{r.request_id}-again") for r in requests]
    for wave in (requests, again):
        _live(group, wave, rng)
    group.close()
    assert (_Both.num_compared > 0) == (config["num_speculative_tokens"] > 0)


@pytest.mark.product(1)
@pytest.mark.parametrize("num_modules", [2, 3])
@pytest.mark.parametrize("scheduling", ["sync", "deferred"])
def test_several_modules(tmp_path, num_modules, scheduling) -> None:
    weights = Weights(residual_scale=0.15, mtp_align=0.8)
    path = write_tiny_model(tmp_path, "deepseek_v32", weights, num_nextn_predict_layers=num_modules)
    prompts = [tuple(random.Random(n).choices(range(3, 101), k=n)) for n in (1, 9, 40, 40, 90)]
    group = InlineGroup(
        group_config(
            model_path=str(path),
            max_model_len=256,
            block_size=4,
            num_speculative_tokens=5,
            num_speculative_tokens_per_batch_size=((1, 1, 5), (2, 3, 0), (4, 99, 3)),
            num_mtp_modules=num_modules,
            max_num_batched_tokens=23,
            scheduling=scheduling,
        )
    )
    for wave in ("a", "b"):
        requests = [request(f"{wave}{i}", p, max_tokens=10 + 14 * i) for i, p in enumerate(prompts)]
        run(group, requests)
    group.close()
    assert _Both.num_compared > 50


# --- what a graph can replay ---


class _Recording(TorchDispatchMode):
    """Operators and shapes of what the passes run outside the model; refuses what the host would wait for."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = False
        self.seen: list[tuple[str, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not self.is_paused:
            name = func.overloadpacket.__name__
            assert name not in self.REFUSED, f"{name} waits for the device"
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            indices = [
                i for a in args if isinstance(a, list | tuple) for i in a if isinstance(i, torch.Tensor)
            ]
            if name in ("index", "index_put", "index_put_"):
                assert all(i.dtype != torch.bool for i in indices), "the shape depends on values"
            self.seen.append((name, *(str(tuple(t.shape)) for t in tensors + indices)))
        return out

    def pausing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The model's own code: the torch backend on a CPU reads what it likes."""

        @functools.wraps(call)
        def paused(*args: Any, **kwargs: Any) -> Any:
            was_paused, self.is_paused = self.is_paused, True
            try:
                return call(*args, **kwargs)
            finally:
                self.is_paused = was_paused

        return paused


def _decode_steps(k: int, mode: _Recording, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, ...]]]:
    """What three decode steps of the same three requests run between message and report."""
    config = group_config(max_model_len=256, num_speculative_tokens=k, max_num_seqs=4, num_kv_blocks=64)
    lone = LoneShard(config, fixed_shapes=True)
    shard = lone.shard
    assert isinstance(shard, DeviceShard)
    prompts = text_prompts([9, 20, 33])
    for slot, prompt in enumerate(prompts):
        blocks = range(10 * slot, 10 * slot + 10)
        lone.run(
            Rows(slot=slot, ids=prompt, start=0, new_blocks=tuple(blocks)),
            admit=[admission(slot, temperature=[0.0, 0.8, 1.2][slot], top_p=[1.0, 1.0, 0.9][slot])],
        )
    lone.run(*(Rows(slot=slot, k=k) for slot in range(3)))  # from here on as many rows may be pending

    for name in ("forward", "mtp_forward", "logits"):
        monkeypatch.setattr(shard._model, name, mode.pausing(getattr(shard._model, name)))
    mode.is_paused = True
    passes_run = DevicePasses.run

    def recorded_run(self: DevicePasses, *args: Any, **kwargs: Any) -> Passed:
        mode.is_paused = False
        try:
            return passes_run(self, *args, **kwargs)
        finally:
            mode.is_paused = True

    monkeypatch.setattr(DevicePasses, "run", recorded_run)
    for name in ("up", "down"):
        carry = getattr(Boundary, name)

        def refusing(self: Boundary, value: Any, carry: Any = carry, name: str = name) -> Any:
            assert mode.is_paused, f"Boundary.{name} between the passes"
            return carry(self, value)

        monkeypatch.setattr(Boundary, name, refusing)
    for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"):
        original = getattr(torch.Tensor, name)

        def refused(self, *args, original=original, name=name, **kwargs):
            assert mode.is_paused, f"Tensor.{name} waits for the device"
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, refused)
    runs, lengths = [], set()
    for number in range(3):
        mode.seen.clear()
        reports: list[StepOutput] = []
        with mode:
            shard.execute(
                step_input(100 + number, [Rows(slot=slot, k=k) for slot in range(3)]), reports.append
            )
        runs.append(list(mode.seen))
        lengths.add(tuple(reports[0].length.tolist()))
    assert len(lengths) == 3
    return runs


@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_decode_step_reads_nothing_back_and_has_the_same_shapes_each_time(k, monkeypatch) -> None:
    first, *others = _decode_steps(k, _Recording(), monkeypatch)
    assert len(first) > 50
    assert others == [first, first]
