"""The debug mode: sound passes go through it unchanged, and each kind of wrong one is named."""

from dataclasses import replace

import pytest
import torch

from kernels_integration.checked import checked
from kernels_integration.collectives import SoloCollectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.errors import PlanError
from kernels_integration.kv_formats import StoredVectors
from kernels_integration.reference.backend import TorchBackend
from kernels_integration.rows import DeviceRows, Selection

SOLO = DcpGroup(1, SoloCollectives())
TOPK = 3


def rows() -> DeviceRows:
    """Two requests, rows at positions 1 and 5; the last row has no KV."""
    return DeviceRows(
        positions=torch.tensor([1, 5, 0]),
        visible_from=torch.zeros(3, dtype=torch.int64),
        visible_to=torch.tensor([2, 6, 0]),
        slots=torch.tensor([9, 21, -1]),
        request=torch.tensor([0, 1, 1]),
        block_tables=torch.tensor([[2, -1], [3, 5]]),
        block_size=4,
        max_visible=6,
    )


class Faulty(TorchBackend):
    """Does what it should, then what `spoil` makes of it."""

    def __init__(self, **spoil) -> None:
        super().__init__()
        self.spoil = spoil

    def select_visible(self, rows, dcp):
        return self.spoil.get("select", lambda s: s)(super().select_visible(rows, dcp))

    def select_topk(self, *arguments):
        return self.spoil.get("select", lambda s: s)(super().select_topk(*arguments))

    def plan(self, selection, like=None):
        return self.spoil.get("plan", lambda p: p)(super().plan(selection, like))

    def attend(self, plan, q, kv, o, lse, *, sm_scale):
        super().attend(plan, q, kv, o, lse, sm_scale=sm_scale)
        self.spoil.get("attend", lambda *_: None)(plan, o, lse)


def run_pass(backend, *, topk: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    batch = rows()
    if topk:
        keys = StoredVectors.plain(torch.randn(24, 4))
        selection = backend.select_topk(torch.randn(3, 2, 4), torch.randn(3, 2), keys, batch, TOPK, SOLO)
    else:
        selection = backend.select_visible(batch, SOLO)
    plan = backend.plan(selection)
    kv, q = StoredVectors.plain(torch.randn(24, 6)), torch.randn(3, 2, 6)
    o, lse = torch.full((3, 2, 4), torch.nan), torch.full((3, 2), torch.nan)
    backend.attend(plan, q, kv, o, lse, sm_scale=0.5)
    return o, lse


@pytest.mark.parametrize("topk", [False, True])
def test_a_sound_pass_is_the_same_pass(topk):
    plain, watched = run_pass(TorchBackend(), topk=topk), run_pass(checked(TorchBackend()), topk=topk)
    assert all(map(torch.equal, plain, watched))


def other_slots(*changes: tuple[int, int]):
    def spoil(selection: Selection) -> Selection:
        indices = selection.kv_indices.clone()
        for place, slot in changes:
            indices[place] = slot
        return replace(selection, kv_indices=indices)

    return spoil


def other_lengths(*kv_indptr: int):
    def spoil(plan):
        return replace(plan, kv_indptr=torch.tensor(kv_indptr, dtype=torch.int32))

    return spoil


def drop_one(selection: Selection) -> Selection:
    """The newest token of row 1, as a verify loses it that counts back from the request's length."""
    indptr = selection.kv_indptr.clone()
    indptr[2:] -= 1
    return Selection(kv_indptr=indptr, kv_indices=selection.kv_indices[:-1])


def write(name: str, row: int, value: float):
    def spoil(plan, o, lse):
        tensor = {"o": o, "lse": lse}[name]
        # Past its end, as a kernel does that counts on more rows.
        torch.as_strided(tensor, (tensor.shape[0] + 2, *tensor.shape[1:]), tensor.stride())[row] = value

    return spoil


SENTINEL = -1.5 * 2**15


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"select": other_slots((0, 12))}, "invariant 8 .*may not see, at row 0"),
        ({"select": other_slots((3, 12))}, "invariant 8 .*a slot twice, near row 1"),
        ({"select": other_slots((2, 22))}, "invariant 8 .*may not see, at row 1"),
        ({"select": drop_one}, "invariant 7 .*5 tokens instead of 6 in row 1"),
        ({"plan": other_lengths(0, 3, 8, 8)}, "other lengths than its selection, first in row 0"),
        ({"plan": other_lengths(0, 9, 8, 8)}, "invariant 4 .*kv_indptr falls"),
        ({"attend": write("o", 1, SENTINEL)}, "attention wrote no o of row 1"),
        ({"attend": write("lse", 0, SENTINEL)}, "attention wrote no lse of row 0"),
        ({"attend": write("o", 4, 0.0)}, "attention wrote o past the plan's 3 rows, at row 4"),
        ({"attend": write("lse", 3, 0.0)}, "attention wrote lse past the plan's 3 rows, at row 3"),
        ({"attend": write("o", 2, 1.0)}, "to the empty row 2"),
        ({"attend": write("lse", 2, 0.0)}, "to the empty row 2"),
    ],
)
def test_a_fault_is_named(spoil, message):
    with pytest.raises(PlanError, match=message):
        run_pass(checked(Faulty(**spoil)))


def test_a_selection_beyond_top_k_is_named():
    with pytest.raises(PlanError, match=r"invariant 7 .*2 tokens instead of 3 in row 1"):
        run_pass(checked(Faulty(select=drop_one)), topk=True)


def test_a_slot_past_the_cache_is_named():
    backend = checked(TorchBackend())
    plan = backend.plan(backend.select_visible(rows(), SOLO))
    q, o, lse = torch.zeros(3, 2, 6), torch.zeros(3, 2, 4), torch.zeros(3, 2)
    with pytest.raises(PlanError, match=r"invariant 4 .*past the cache's 20"):
        backend.attend(plan, q, StoredVectors.plain(torch.zeros(20, 6)), o, lse, sm_scale=1.0)
