"""What waits for a reader: merged, in order, complete and bounded."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.requests import Request, RequestUpdate
from actors.sampling_params import SamplingParams
from cluster.answering import inbox as inbox_module
from cluster.answering.answering import Answering
from cluster.answering.inbox import MAX_MERGED_VALUES, Inbox
from cluster.answering.movable_sequence import MovableSequence
from kernels_integration.errors import OverloadedError, UnavailableError
from tests.support.scripted_group import ScriptedGroup, logprob_of, until, update


def request(index: int = 0, **params: Any) -> Request:
    return Request(
        request_id="r",
        index=index,
        prompt_token_ids=(10, 11),
        params=SamplingParams(**params),
        seed=1,
        eos_token_ids=(),
    )


async def taken(inbox: Inbox) -> tuple[MovableSequence, RequestUpdate]:
    sequence, told = await asyncio.wait_for(inbox.get(), 1)
    assert isinstance(told, RequestUpdate)
    return sequence, told


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1),  # whose
            st.integers(0, 5),  # tokens
            st.integers(0, 3),  # of them, and of those before, held
            st.booleans(),  # whether the reader takes one then
        ),
        max_size=40,
    )
)
def test_whatever_a_reader_takes_when_each_sequence_is_told_whole(
    steps: list[tuple[int, int, int, bool]],
) -> None:
    sequences = [MovableSequence(request(index, logprobs=1)) for index in range(2)]
    told: list[list[int]] = [[], []]
    found: list[list[int]] = [[], []]

    async def run() -> None:
        inbox = Inbox()

        async def take() -> None:
            sequence, merged = await taken(inbox)
            number = sequences.index(sequence)
            passed = sequence.take(merged)
            found[number] += passed.token_ids
            assert [entry.token_id for entry in passed.logprobs] == list(passed.token_ids)
            assert merged.num_completion_tokens <= len(told[number])
            assert len(found[number]) <= merged.num_completion_tokens - merged.num_held

        for number, (whose, num, num_held, takes) in enumerate(steps):
            ids = [number * 10 + i for i in range(num)]
            done = len(told[whose])
            told[whose] += ids
            held = min(num_held, len(told[whose]) - len(found[whose]))
            assert inbox.put(sequences[whose], update(sequences[whose].request, ids, done, num_held=held))
            if takes:
                await take()
        for whose, sequence in enumerate(sequences):
            last = update(sequence.request, [], len(told[whose]), finish_reason="stop")
            assert inbox.put(sequence, last)
        while inbox._waiting:
            await take()
        assert inbox.num_values == 0

    asyncio.run(run())
    assert found == told


async def test_a_reader_that_keeps_up_gets_what_was_told() -> None:
    inbox, sequence = Inbox(), MovableSequence(request())
    for number in range(3):
        told = update(sequence.request, [number], number)
        inbox.put(sequence, told)
        assert (await taken(inbox))[1] is told


async def test_merged_updates_are_as_large_as_a_message_may_be() -> None:
    inbox, sequence = Inbox(), MovableSequence(request())
    for number in range(100):
        inbox.put(sequence, update(sequence.request, range(1000), 1000 * number))
    sizes = [len((await taken(inbox))[1].token_ids) for _ in range(25)]
    assert sizes == [MAX_MERGED_VALUES // 1000 * 1000] * 25
    assert not inbox._waiting


async def test_an_error_stays_behind_what_was_told_before_it() -> None:
    inbox, sequence = Inbox(), MovableSequence(request())
    inbox.put(sequence, update(sequence.request, [1]))
    inbox.put(sequence, UnavailableError("lost"))
    assert (await taken(inbox))[1].token_ids == (1,)
    assert isinstance((await inbox.get())[1], UnavailableError)


async def test_log_probabilities_of_a_prompt_are_no_backlog_and_survive_a_merge() -> None:
    """However many there are: they come in one piece."""
    inbox, sequence = Inbox(), MovableSequence(request(prompt_logprobs=20))
    prompt = tuple(logprob_of(t, 20) for t in range(60_000))
    assert inbox.put(sequence, update(sequence.request, [1], prompt_logprobs=prompt))
    sequence, told = await taken(inbox)
    assert told.prompt_logprobs == prompt
    inbox.put(sequence, update(sequence.request, [1], prompt_logprobs=prompt[:9]))
    inbox.put(sequence, update(sequence.request, [2], 1))
    told = (await taken(inbox))[1]
    assert (told.token_ids, told.prompt_logprobs) == ((1, 2), prompt[:9])


async def test_a_reader_that_is_too_far_behind_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "MAX_UNREAD_VALUES", 1000)
    monkeypatch.setattr(inbox_module, "MAX_MERGED_VALUES", 100)
    group = ScriptedGroup(lambda asked: [update(asked, range(50), 50 * i) for i in range(1000)])
    answering = Answering([group])

    async def read_one_then_stop() -> None:
        async with answering.admit("r") as live, aclosing(answering.answer(live, request())) as updates:
            await anext(updates)
            await asyncio.sleep(60)

    call = asyncio.create_task(read_one_then_stop())
    with pytest.raises(OverloadedError, match="reads so slowly"):
        await asyncio.wait_for(call, 10)
    await until(lambda: not group.live)
    assert group.ended == {"r": "aborted"}
    assert len(answering.live) == 0
