"""How often a pass selects and plans: what layers share is made once, and nothing that nobody reads."""

import pytest
import torch

from kernels_integration.reference.backend import TorchBackend
from tests.support.model_ranks import Rank, run_ranks
from tests.support.model_rows import Chunk
from tests.support.tiny_models import full_layers, tiny_config, write_tiny_model

PATTERN = "FSSF"


class Counting(TorchBackend):
    """Remembers what it planned and ran."""

    def __init__(self) -> None:
        super().__init__()
        self.planned, self.attended = [], []

    def plan(self, selection, like=None):
        self.planned.append(super().plan(selection, like))
        return self.planned[-1]

    def attend(self, plan, q, kv, o, lse, *, sm_scale):
        self.attended.append(plan)
        super().attend(plan, q, kv, o, lse, sm_scale=sm_scale)


@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("is_dense", [True, False])
def test_layers_that_share_a_selection_share_its_plan(tmp_path, tp, dcp, is_dense):
    path = write_tiny_model(tmp_path, "glm_moe_dsa", index_topk_pattern=PATTERN)
    config = tiny_config("glm_moe_dsa", index_topk_pattern=PATTERN)
    length = config["index_topk"] if is_dense else config["index_topk"] + 5

    def run(tp, dcp):
        rank = Rank(path, torch.float32, tp=tp, dcp=dcp)
        backend = Counting()
        rank.model.backend = backend
        for layer in rank.model.layers:
            layer.attention.backend = backend
            if layer.attention.indexer is not None:
                layer.attention.indexer.backend = backend
        rank.forward([Chunk(0, 0, length)], [i % 50 + 3 for i in range(length)])
        return backend

    for backend in run_ranks(tp, dcp, 1, run):
        full = full_layers(config)
        assert full == [kind == "F" for kind in PATTERN]
        assert len(backend.planned) == (1 if is_dense else sum(full))
        plans = iter(backend.planned)
        current = None
        for index, is_full in enumerate(full):
            if current is None or (is_full and not is_dense):
                current = next(plans)
            assert backend.attended[index] is current
        assert all(plan.split is None for plan in backend.planned), "row by row, nothing reads a split"
