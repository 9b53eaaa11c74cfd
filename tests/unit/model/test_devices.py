"""Model code makes no tensor on another device than the backend's.

The device is "meta": tensors without values, which do not mix with the CPU's any more than a GPU's do.
"""

import pytest
import torch

from actors.model.config import ModelConfig
from actors.model.model import Model
from actors.model.slice_meter import SliceMeter
from actors.model.tensors import main_tensor_shapes, mtp_tensor_shapes, repeated_tensor_shapes
from actors.model.weights import WeightReader
from kernels_integration.collectives import SoloCollectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.kv_cache import KVCache
from kernels_integration.reference.backend import TorchBackend
from kernels_integration.rows import DeviceRows, Selection
from kernels_integration.topology import Topology
from tests.support.random_checkpoint import write_random_checkpoint

SOLO = SoloCollectives()
SOLO_DCP = DcpGroup(1, SOLO)
T = 5


class ShapesOnly(TorchBackend):
    """Where the torch backend reads values on the host, tensors of the right shape and device."""

    def experts(self, gate_up, down, *, first_expert, num_experts):
        assert gate_up.values.device == down.values.device == self.device
        return lambda x, experts, weights, out: out.add_(weights[:, :1].to(x.dtype))

    def write_latents(self, latents, norm, eps, rope, cache, rows):
        latents[:, : norm.shape[0]] = self.rms_norm(latents[:, : norm.shape[0]], norm, eps)
        self.rotate(latents[:, norm.shape[0] :], rope)

    def write_index_keys(self, keys, norm, norm_bias, eps, rope, cache, rows):
        self.rotate((keys * norm + norm_bias)[:, : 2 * rope.shape[1]], rope)

    def select_visible(self, rows, dcp):
        return self._some(rows)

    def select_topk(self, q, weights, keys, rows, topk, dcp):
        assert q.device == weights.device == keys.storage.device == self.device
        return self._some(rows)

    def _some(self, rows):
        counts = torch.ones(rows.num_rows, dtype=torch.int32, device=self.device)
        return Selection(
            kv_indptr=torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
            kv_indices=torch.zeros(rows.num_rows, dtype=torch.int64, device=self.device),
        )

    def attend(self, plan, q, kv, o, lse, *, sm_scale):
        assert plan.kv_indices.device == q.device == kv.storage.device == o.device == lse.device
        o.copy_(q[..., : o.shape[2]] * sm_scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_visible", [1, 10_000], ids=["dense", "sparse"])
def test_a_pass_stays_on_its_device(tmp_path, dtype, max_visible):
    config = ModelConfig.from_pretrained(write_random_checkpoint(tmp_path))
    shapes = main_tensor_shapes(config) | mtp_tensor_shapes(config, 1) | repeated_tensor_shapes(config)
    with torch.inference_mode():
        backend = ShapesOnly(dtype, "meta")
        reader = WeightReader(
            checkpoint=SliceMeter(shapes, {}), dtype=dtype, device=backend.device, topology=Topology(), rank=0
        )
        model = Model(config, reader, backend, SOLO, SOLO_DCP, num_mtp_layers=1)
        name = str(dtype).removeprefix("torch.")
        cache = KVCache.allocate(config.kv_layout(name), config.num_hidden_layers + 1, 8, backend.device)
        ints = torch.zeros(T, dtype=torch.int64, device="meta")
        rows = DeviceRows(
            positions=ints,
            visible_from=ints,
            visible_to=ints,
            slots=ints,
            request=ints,
            block_tables=ints.view(T, 1),
            block_size=4,
            max_visible=max_visible,
        )
        h = model.forward(ints, rows, cache)
        z = model.mtp_forward(ints, h, rows, cache)
        logits = model.logits(z)
        for tensor in (h, z, logits):
            assert tensor.device.type == "meta"
            assert tensor.shape[0] == T
        assert logits.dtype is torch.float32
