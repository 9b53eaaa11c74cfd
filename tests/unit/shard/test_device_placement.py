"""A shard of fixed shapes keeps all that it computes on its device, and never waits for it before the report.

Tensors on torch's meta device have shapes and no values: what needs a value fails, and so does most of what
mixes them with the host's, on a machine without an accelerator too.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.messages import StepOutput
from actors.shard.boundary import Boundary
from actors.shard.device_shard import DeviceShard
from kernels_integration.collectives import SoloCollectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.reference.backend import TorchBackend
from kernels_integration.spans import Spans
from tests.support.groups import group_config
from tests.support.steps import Rows, admission, step_input

HIDDEN, VOCAB = 16, 40
DEVICE = torch.device("meta")


class _Model:
    """The shapes and places of a model's answers; its own operations are the backend's affair."""

    def __init__(self, num_modules: int) -> None:
        self.backend = TorchBackend(torch.float32, DEVICE)
        self.config = SimpleNamespace(hidden_size=HIDDEN, vocab_size=VOCAB, index_topk=8, has_indexer=True)
        self.mtp_layers = [None] * num_modules
        self.dtype, self.vocab_start = torch.float32, 0

    def forward(self, token_ids: Tensor, rows: Any, cache: Any) -> Tensor:
        self._check(rows, token_ids)
        return torch.zeros(len(token_ids), HIDDEN, device=DEVICE)

    def mtp_forward(
        self, token_ids: Tensor, previous: Tensor, rows: Any, cache: Any, *, module: int
    ) -> Tensor:
        self._check(rows, token_ids, previous)
        return torch.zeros(len(token_ids), HIDDEN, device=DEVICE)

    def logits(self, h: Tensor) -> Tensor:
        self._check(None, h)
        return torch.zeros(len(h), VOCAB, device=DEVICE)

    def _check(self, rows: Any, *tensors: Tensor) -> None:
        if rows is not None:
            names = ("positions", "visible_from", "visible_to", "slots", "request", "block_tables")
            tensors += tuple(getattr(rows, name) for name in names)
            assert all(len(t) == rows.num_rows for t in tensors[:-1])
        assert {t.device for t in tensors} == {DEVICE}


@pytest.mark.slow
@pytest.mark.parametrize(("k", "num_modules"), [(0, 0), (1, 1), (3, 1), (5, 3)])
def test_nothing_leaves_the_device_before_the_report(k, num_modules, monkeypatch) -> None:
    read: list[str] = []

    def down(self: Boundary, tensor: Tensor) -> np.ndarray:
        assert tensor.device == DEVICE
        read.append("read")
        return np.zeros(tuple(tensor.shape), np.int64)

    def up(self: Boundary, array: np.ndarray) -> Tensor:
        return torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=DEVICE)

    monkeypatch.setattr(Boundary, "down", down)
    monkeypatch.setattr(Boundary, "up", up)
    config = group_config(
        max_model_len=64, max_num_seqs=4, num_speculative_tokens=k, num_mtp_modules=max(num_modules, 1)
    )
    solo = SoloCollectives()
    shard = DeviceShard(
        config,
        _Model(num_modules),  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        tp=solo,
        dcp=DcpGroup(1, solo),
        spans=Spans(is_on=False),
    )

    def run(number: int, rows: list[Rows], **kwargs: Any) -> None:
        read.clear()

        def report(output: StepOutput) -> None:
            assert len(read) == 1  # the report itself
            read.clear()

        shard.execute(step_input(number, rows, **kwargs), report)
        assert not read

    chunk = Rows(slot=0, ids=range(3, 9), start=0, is_final=False, new_blocks=(1, 2))
    run(1, [chunk], admit=[admission(0, temperature=0.7, top_p=0.9)])
    run(2, [Rows(slot=0, ids=range(3), start=6)])
    other = Rows(slot=1, ids=range(3, 8), start=4, readonly=1, new_blocks=(1, 4))
    run(3, [Rows(slot=0, k=k), other], admit=[admission(1)])
    run(4, [Rows(slot=0, k=k), Rows(slot=1, k=max(k - 1, 0))])
    run(5, [Rows(slot=1, k=k)])
