"""Where completions end: each way, at each accepted index, through real verifies."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from actors.coordinator.stopping import StopStringFinder
from tests.support import fake_shard
from tests.support.fake_group import Group, group_config, request
from tests.support.fake_shard import oracle, stream

TINY_DSA = Path(__file__).parents[3] / "cluster/assets/tiny-dsa/tokenizer.json"
K = 4


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY_DSA))


class Scripted:
    """A target that emits a script of tokens after the prompt, and drafts that are always right."""

    def __init__(self, monkeypatch, prompt: list[int], script: list[int]) -> None:
        state = 0
        for token in prompt:
            state = fake_shard.advance(state, token)
        self.next: dict[int, int] = {}
        for token in script:
            self.next[state] = token
            state = fake_shard.advance(state, token)
        monkeypatch.setattr(fake_shard, "target_token", self)

    def __call__(self, state: int, seed: int) -> int:
        return self.next.get(state, 0)


def run_script(monkeypatch, script, tokenizer=None, *, eos=(), draft_policy=None, prompt=(1, 2, 3), **params):
    """The updates of a request whose completion would be `script` if nothing ended it."""
    target = Scripted(monkeypatch, list(prompt), script)
    group = Group(
        group_config(num_speculative_tokens=K), draft=target, tokenizer=tokenizer, draft_policy=draft_policy
    )
    group.coordinator.submit(request(prompt=prompt, eos=eos, **params))
    group.run()
    group.check_blocks()
    assert group.coordinator.stats().num_generated_tokens == len(group.tokens())
    return group


@pytest.mark.parametrize("way", ["eos", "stop id", "stop string"])
def test_an_end_within_min_tokens_does_not_count_and_the_next_token_does(monkeypatch, tokenizer, way) -> None:
    """Of ends at the tokens with the numbers 3 and 4, the first that comes after min_tokens = 3."""
    script = [20, 21, 15, 15, *range(22, 32)]
    ends = {"eos": {"eos": (15,)}, "stop id": {"stop_token_ids": (15,)}, "stop string": {}}
    stop = {"stop": (tokenizer.decode([15]),)} if way == "stop string" else {}
    for min_tokens, num_kept in ((2, 3), (3, 4)):
        group = run_script(
            monkeypatch, script, tokenizer, min_tokens=min_tokens, max_tokens=12, **ends[way], **stop
        )
        assert group.tokens() == script[:num_kept]
        assert group.updates[-1].finish_reason == "stop"


# A completion's first token comes from the prompt's final chunk, the next K + 1 from one verify: index
# 1..K+1 are the accepted indices of that verify, K + 2.. those of the next.
@pytest.mark.parametrize("index", range(2 * K + 4))
@pytest.mark.parametrize("way", ["eos", "stop id", "stop string", "length"])
def test_every_end_at_every_accepted_index(monkeypatch, tokenizer, way, index) -> None:
    script = [20 + i for i in range(20)]
    script[index] = 15
    text = tokenizer.decode([15])
    assert text not in tokenizer.decode([t for t in script if t != 15])
    ends = {
        "eos": ({"eos": (15,), "max_tokens": 18}, "stop", None),
        "stop id": ({"stop_token_ids": (15,), "max_tokens": 18}, "stop", 15),
        "stop string": ({"stop": (text,), "max_tokens": 18}, "stop", text),
        "length": ({"max_tokens": index + 1}, "length", None),
    }
    params, reason, matched = ends[way]
    group = run_script(monkeypatch, script, tokenizer, **params)
    last = group.updates[-1]
    assert group.tokens() == script[: index + 1]
    assert (last.finish_reason, last.matched_stop) == (reason, matched)
    assert last.num_completion_tokens == index + 1
    # Counted before the stop cut the run: the verify that held it accepted all its drafts.
    assert last.num_accepted_tokens == last.num_draft_tokens


def test_the_first_end_by_position_wins(monkeypatch, tokenizer) -> None:
    script = [30, 31, 40, 41, 42, 43]
    string = tokenizer.decode([41])
    params = {"max_tokens": 6, "stop_token_ids": (42,), "stop": (string,)}
    assert run_script(monkeypatch, script, tokenizer, eos=(40,), **params).tokens() == script[:3]
    group = run_script(monkeypatch, script, tokenizer, eos=(43,), **params)
    assert (group.tokens(), group.updates[-1].matched_stop) == (script[:4], string)
    group = run_script(monkeypatch, script, eos=(43,), max_tokens=6, stop_token_ids=(42,))
    assert (group.tokens(), group.updates[-1].matched_stop) == (script[:5], 42)


def test_a_stop_on_the_last_allowed_token_is_a_stop(monkeypatch) -> None:
    """EOS inside, at the end of and just after the length limit."""
    script = [30, 31, 32, 33, 34, 35]
    for max_tokens, reason in [(5, "stop"), (4, "stop"), (3, "length")]:
        group = run_script(monkeypatch, script, eos=(33,), max_tokens=max_tokens)
        assert group.updates[-1].finish_reason == reason
        assert group.tokens() == script[: min(4, max_tokens)]


def test_ignore_eos_ignores_eos_but_not_stop_ids(monkeypatch) -> None:
    script = [30, 31, 32, 33]
    group = run_script(monkeypatch, script, eos=(31,), max_tokens=4, ignore_eos=True)
    assert group.tokens() == script
    group = run_script(monkeypatch, script, eos=(31,), max_tokens=4, ignore_eos=True, stop_token_ids=(31,))
    assert (group.tokens(), group.updates[-1].matched_stop) == (script[:2], 31)


@pytest.mark.parametrize("k", range(K + 1))
@pytest.mark.parametrize(
    ("text", "stop", "kept_text"),
    [
        ("One sentence. Another one", ". An", "One sentence. An"),  # spans tokens
        ("The capital of France", "pit", "The capital"),  # inside a token
        (
            "The capital of France",
            "ital of Fra",
            "The capital of France",
        ),  # from inside one to inside another
        ("你好, 世界 and more", "世", "你好, 世"),  # a character of several tokens
    ],
)
def test_stop_strings_across_accepted_tokens(monkeypatch, tokenizer, text, stop, kept_text, k) -> None:
    """The token that completes the stop string is the last one, however many were accepted with it."""
    script = tokenizer.encode(text, add_special_tokens=False).ids
    group = run_script(
        monkeypatch, script, tokenizer, draft_policy=lambda _: k, stop=(stop,), max_tokens=len(script)
    )
    kept = next(n for n in range(len(script) + 1) if stop in tokenizer.decode(script[:n]))
    assert group.tokens() == script[:kept]
    assert tokenizer.decode(group.tokens()).startswith(kept_text)
    assert (group.updates[-1].finish_reason, group.updates[-1].matched_stop) == ("stop", stop)


def test_a_stop_string_across_the_prompt_boundary_does_not_match(monkeypatch, tokenizer) -> None:
    prompt = tokenizer.encode("Hello wor", add_special_tokens=False).ids
    script = tokenizer.encode("ld, world", add_special_tokens=False).ids
    group = run_script(
        monkeypatch, script, tokenizer, prompt=tuple(prompt), stop=("world",), max_tokens=len(script)
    )
    assert group.tokens() == script
    assert group.updates[-1].matched_stop == "world"  # only the second one, all of it in the completion


def test_stop_strings_survive_preemption(tokenizer) -> None:
    """The finder has read half the stop string when its request is pushed out; it is not read again."""
    completion = stream([2] * 3, 5, 25)
    stop = tokenizer.decode(completion[:20])[-12:]
    group = Group(group_config(block_size=1, num_kv_blocks=30), draft=oracle, tokenizer=tokenizer)
    group.coordinator.submit(request("old", [1] * 3, max_tokens=25))
    group.coordinator.submit(request("r", [2] * 3, max_tokens=25, stop=(stop,)))
    group.run()
    assert group.coordinator.stats().num_preemptions > 0
    end = next(n for n in range(25) if stop in tokenizer.decode(completion[:n]))
    assert group.tokens() == completion[:end]


def test_of_several_stop_strings_the_one_that_ends_first_wins(tokenizer) -> None:
    def find(text: str, *stop: str) -> str | None:
        finder = StopStringFinder(stop, tokenizer, skip_special_tokens=True)
        found = [finder.push(i) for i in tokenizer.encode(text, add_special_tokens=False).ids]
        return next((f for f in found if f), None)

    assert find(" capital", "capital", "pit") == "pit"
    assert find(" capital", "apit", "pit") == "apit"
    assert find(" capital", "pit", "apit") == "pit"
    assert find(" capital", "x") is None


def test_special_tokens_are_part_of_the_text_only_if_not_skipped(monkeypatch, tokenizer) -> None:
    script = [30, tokenizer.token_to_id("<|user|>"), 31]
    stop = {"stop": ("<|user|>",), "max_tokens": 3}
    assert run_script(monkeypatch, script, tokenizer, **stop).tokens() == script
    assert (
        run_script(monkeypatch, script, tokenizer, skip_special_tokens=False, **stop).tokens() == script[:2]
    )
