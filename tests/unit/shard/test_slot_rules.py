"""Rules per slot, gathered for rows of mixed requests, against one row at a time in plain Python."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.messages import Admission, SamplingSpec
from actors.shard.slot_rules import Preceding, SlotRules
from actors.structured_outputs import StructuredOutputs
from tests.support.boundaries import ON_CPU
from tests.support.sampling_reference import edited_logits

VOCAB = 12
TOKENS = st.integers(0, VOCAB - 1)
WORDS = st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple)

SPECS = st.builds(
    SamplingSpec,
    presence_penalty=st.sampled_from([0.0, 0.75, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.25]),
    repetition_penalty=st.sampled_from([1.0, 1.25, 0.5]),
    logit_bias=st.none() | st.dictionaries(TOKENS, st.sampled_from([-100.0, -0.5, 2.0])),
    allowed_token_ids=st.none() | st.lists(TOKENS, min_size=1).map(tuple),
    bad_words=WORDS,
    min_tokens=st.integers(0, 6),
    end_token_ids=st.lists(TOKENS, max_size=2, unique=True).map(tuple),
)


def rules_of(spec: SamplingSpec) -> dict:
    return {
        "allowed_token_ids": spec.allowed_token_ids,
        "bad_words": spec.bad_words,
        "min_tokens": spec.min_tokens,
        "end_token_ids": spec.end_token_ids,
        "logit_bias": spec.logit_bias,
        "repetition_penalty": spec.repetition_penalty,
        "frequency_penalty": spec.frequency_penalty,
        "presence_penalty": spec.presence_penalty,
    }


def admission(slot: int, spec: SamplingSpec, history: list[int], prompt_len: int) -> Admission:
    return Admission(
        slot=slot,
        admission=1,
        limit=100,
        prompt_len=prompt_len,
        seed=0,
        sampling=spec,
        history=np.array(history if spec.needs_history else [], np.int32),
    )


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            SPECS,
            st.lists(TOKENS, min_size=1, max_size=5),  # prompt
            st.lists(TOKENS, max_size=5),  # replayed at admission
            st.lists(st.lists(TOKENS, min_size=1, max_size=3), max_size=3),  # accepted, step by step
            st.lists(TOKENS, max_size=3),  # drafts
        ),
        min_size=1,
        max_size=3,
    ),
    num_ranks=st.sampled_from([1, 2, 3]),
)
def test_every_row_is_edited_as_if_it_were_alone(requests, num_ranks):
    size = VOCAB // num_ranks
    ranks = [SlotRules(vocab_start=r * size, slice_size=size, boundary=ON_CPU) for r in range(num_ranks)]
    slots, positions, drafts, first, count, expected = [], [], [], [], [], []
    num_rows = sum(len(d) + 1 for *_, d in requests)
    logits = torch.randn(num_rows, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for slot, (spec, prompt, replayed, accepted, d) in enumerate(requests):
        completion = list(replayed)
        for rank in ranks:
            # The slot's earlier request leaves nothing behind.
            rank.admit(admission(slot, SamplingSpec(presence_penalty=2.0, bad_words=((1,),)), [3, 4, 5], 1))
            rank.admit(admission(slot, spec, prompt + replayed, len(prompt)))
            for tokens in accepted:
                rank.append(slot, np.array(tokens, np.int32))
        completion += [t for tokens in accepted for t in tokens]
        for i in range(len(d) + 1):
            slots.append(slot)
            positions.append(len(prompt) + len(completion) + i)
            first.append(len(drafts))
            count.append(i)
            expected.append(
                edited_logits(logits[len(expected)], prompt, completion + d[:i], **rules_of(spec))
            )
        drafts += d
    preceding = Preceding(
        tokens=torch.tensor(drafts, dtype=torch.int64), first=np.array(first), count=np.array(count, np.int64)
    )
    parts = []
    for rank, local in zip(ranks, logits.split(size, dim=1), strict=True):
        before = local.clone()
        rules = rank.gather(np.array(slots), np.array(positions), preceding)
        parts.append(local if rules is None else rules.apply(local))
        assert torch.equal(local, before)
    torch.testing.assert_close(torch.cat(parts, dim=1), torch.stack(expected), rtol=1e-12, atol=1e-12)


def test_requests_without_rules_cost_nothing():
    rules = SlotRules(vocab_start=0, slice_size=VOCAB, boundary=ON_CPU)
    rules.admit(admission(0, SamplingSpec(temperature=0.5, top_k=3, min_tokens=0), [1, 2], 1))
    rules.append(0, np.array([3], np.int32))
    assert rules.gather(np.array([0]), np.array([3]), None) is None
    rules.admit(admission(1, SamplingSpec(logit_bias={3: 1.0}), [], 1))
    assert rules.gather(np.array([0]), np.array([3]), None) is None
    assert rules.gather(np.array([0, 1]), np.array([3, 4]), None).biased.row.tolist() == [1]


class _Every:
    """A compiler whose grammars allow every n-th token: of another n behind each draft."""

    def prepare(self) -> None:
        pass

    def matcher(self, constraint: StructuredOutputs, end_token_ids: tuple[int, ...]) -> "_Every":
        self._num_committed = 0
        return self

    def advance(self, tokens: list[int]) -> None:
        self._num_committed += len(tokens)

    def legal(self, drafts: list[int]) -> np.ndarray:
        bits = np.zeros(32, np.uint8)
        bits[: VOCAB : 2 + self._num_committed + len(drafts)] = 1
        return np.packbits(bits, bitorder="little")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_each_rank_masks_its_own_slice(num_ranks):
    """Slices begin in the middle of a byte; the last one is padded beyond the vocabulary."""
    size = -(-(VOCAB - 1) // num_ranks) + 1
    parts = []
    logits = torch.zeros(4, VOCAB)
    preceding = Preceding(
        tokens=torch.tensor([5, 6]), first=np.zeros(4, np.int64), count=np.array([0, 1, 2, 0])
    )
    for rank in range(num_ranks):
        rules = SlotRules(vocab_start=rank * size, slice_size=size, boundary=ON_CPU, compiler=_Every())
        spec = SamplingSpec(structured_outputs=StructuredOutputs("regex", "a"), logit_bias={4: 9.0})
        rules.admit(admission(1, spec, [3, 4, 7], 2))
        local = torch.nn.functional.pad(logits[:, rank * size : (rank + 1) * size], (0, size))[:, :size]
        gathered = rules.gather(np.array([1, 1, 1, 0]), np.array([3, 4, 5, 9]), preceding)
        parts.append(gathered.apply(local))
    whole = torch.cat(parts, dim=1)
    assert (whole[:3, VOCAB:] == -torch.inf).all()
    for row, step in enumerate((3, 4, 5)):
        legal = [t for t in range(VOCAB) if whole[row, t] > -torch.inf]
        assert legal == list(range(0, VOCAB, step))
        assert 4 % step != 0 or whole[row, 4] == 9.0
    assert (whole[3, :VOCAB] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_minus_infinity_stays(dtype):
    """Padding columns and banned tokens are not raised by any rule."""
    rules = SlotRules(vocab_start=0, slice_size=4, boundary=ON_CPU)
    spec = SamplingSpec(
        presence_penalty=-2.0,
        frequency_penalty=-2.0,
        repetition_penalty=0.5,
        logit_bias={2: 100.0},
        bad_words=((2,),),
    )
    rules.admit(admission(0, spec, [0, 3, 3], 1))
    logits = torch.tensor([[1.0, 2.0, 3.0, -torch.inf]], dtype=dtype)
    edited = rules.gather(np.array([0]), np.array([3]), None).apply(logits)
    assert edited.tolist() == [[2.0, 2.0, -torch.inf, -torch.inf]]
    assert edited.dtype == dtype
