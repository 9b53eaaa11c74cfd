"""Groups of ranks as threads, each with its model part, cache and slots."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from actors.model.config import ModelConfig
from actors.model.model import load_model
from kernels_integration.backend import Backend
from kernels_integration.collectives import Collectives, SoloCollectives
from kernels_integration.collectives.in_process import InProcessCollectives
from kernels_integration.dcp import DcpGroup, Exchange
from kernels_integration.kv_cache import KVCache
from kernels_integration.reference.backend import TorchBackend
from kernels_integration.rows import Rows
from kernels_integration.topology import Topology
from tests.support.model_rows import Chunk, SlotMap

T = TypeVar("T")


class Rank:
    """One rank's model, cache and slots; requests are numbered, positions are theirs."""

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype = torch.float32,
        *,
        num_requests: int = 1,
        capacity: int = 400,
        tp: Collectives | None = None,
        dcp: DcpGroup | None = None,
        num_mtp_layers: int = 0,
        expert_parallel: bool = False,
        kv_cache_dtype: str | None = None,
        device: torch.device | str | None = None,
        backend: Callable[[torch.dtype, torch.device], Backend] = TorchBackend,
    ) -> None:
        """device: its rows are in the form of devices; None: in the host's, on the CPU."""
        self.device = device
        self.config = ModelConfig.from_pretrained(path)
        self.dcp = dcp or DcpGroup(1, SoloCollectives())
        self.model = load_model(
            self.config,
            path,
            dtype=dtype,
            backend=backend(dtype, torch.device(device or "cpu")),
            tp=tp or SoloCollectives(),
            dcp=self.dcp,
            num_mtp_layers=num_mtp_layers,
            expert_parallel=expert_parallel,
        )
        self.slots = SlotMap(num_requests, capacity, self.dcp)
        num_layers = self.config.num_hidden_layers + num_mtp_layers
        self.cache = KVCache.allocate(
            self.config.kv_layout(kv_cache_dtype or str(dtype).removeprefix("torch.")),
            num_layers,
            self.slots.num_slots,
            device or "cpu",
            index_layers=self.config.index_layers(num_layers),
        )
        # A read of a slot that was never written must show.
        for vectors in (*self.cache.latents, *self.cache.keys):
            slots = torch.arange(vectors.num_slots, device=device)
            vectors.write(slots, torch.full((vectors.num_slots, vectors.dim), 1e3, device=device))

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence[int]) -> Tensor:
        return self.model.forward(
            torch.tensor(list(token_ids), device=self.device), self._rows(chunks, 0), self.cache
        )

    @torch.inference_mode()
    def mtp_forward(
        self, chunks: Sequence[Chunk], token_ids: Sequence[int], prev_hidden: Tensor, module: int = 0
    ) -> Tensor:
        rows = self._rows(chunks, 1 + module)
        ids = torch.tensor(list(token_ids), device=self.device)
        return self.model.mtp_forward(ids, prev_hidden, rows, self.cache, module=module)

    def _rows(self, chunks: Sequence[Chunk], visible_from: int) -> Rows:
        if self.device is None:
            return self.slots.rows(chunks, visible_from)
        return self.slots.device_rows(chunks, visible_from, self.device)

    def logits(self, chunks: Sequence[Chunk], token_ids: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            return self.model.logits(self.forward(chunks, token_ids))


def run_ranks(
    tp: int,
    dcp: int,
    interleave: int,
    work: Callable[[Collectives, DcpGroup], T],
    exchange: Exchange = "a2a",
) -> list[T]:
    """work(tp, dcp) of every rank in a thread of its own; the results in rank order."""
    members = InProcessCollectives.create(tp, timeout_s=30.0)
    groups = Topology(tp=tp, dcp=dcp).dcp_groups
    dcp_members = [m for ranks in groups for m in InProcessCollectives.create(len(ranks), timeout_s=30.0)]
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(members[rank], DcpGroup(interleave, dcp_members[rank], exchange))
        except BaseException as error:
            failures.append(error)
            members[rank].close()  # its peers would wait for it
            dcp_members[rank].close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(tp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(tp)]
