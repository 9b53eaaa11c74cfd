"""A place in a grammar is a pure function of the tokens, whatever drafts were tried in between."""

import json
import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("xgrammar")

from actors.grammar.compiler import GrammarCompiler
from actors.grammar.matcher import SequenceMatcher
from actors.structured_outputs import StructuredOutputs
from actors.token_text import bytes_of, decoder_kinds
from tests.support.groups import EOS, TINY_DSA, load_tokenizer

VOCAB = 6144
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", 3]}, "maxItems": 3},
    },
    "required": ["name", "tags"],
}
CONSTRAINTS = [
    StructuredOutputs.of(json=SCHEMA),
    StructuredOutputs.of(json_object=True),
    StructuredOutputs.of(regex=r"[a-f]{2,4}(-\d+)?"),
    StructuredOutputs.of(choice=["yes", "no", "not sure"]),
    StructuredOutputs.of(grammar='root ::= "(" root ")" | "x"'),
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TINY_DSA, VOCAB)


@pytest.fixture(scope="module")
def texts() -> list[bytes]:
    """What each token adds to the text; nothing for special ones."""
    tokenizer = load_tokenizer()
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    kinds = decoder_kinds(tokenizer)
    return [b"" if i in special else bytes_of(tokenizer, kinds, i) for i in range(VOCAB)]


def legal(matcher: SequenceMatcher, drafts: list[int]) -> list[int] | None:
    bits = matcher.legal(drafts)
    return None if bits is None else np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda c: c.kind)
def test_drafts_leave_nothing_behind(compiler: GrammarCompiler, constraint: StructuredOutputs) -> None:
    """Steps as a shard makes them: drafts one by one, the rows of a verify, what was accepted."""
    rng = random.Random(constraint.text)
    for _ in range(6):
        matcher = compiler.matcher(constraint, (EOS,))
        committed: list[int] = []
        while len(committed) < 40 and EOS not in committed:
            drafts: list[int] = []
            for _ in range(3):
                expected = legal(matcher, drafts)
                if expected is not None and EOS not in drafts:
                    fresh = compiler.matcher(constraint, (EOS,))
                    fresh.advance([*committed, *drafts])
                    assert legal(fresh, []) == expected
                if expected is None or rng.random() < 0.15:
                    drafts.append(rng.randrange(VOCAB))  # mostly not legal, as where none could be drawn
                else:
                    drafts.append(rng.choice(expected))
            for i in rng.sample(range(4), 4):  # the rows of a verify, in any order
                fresh = compiler.matcher(constraint, (EOS,))
                fresh.advance(committed)
                assert legal(matcher, drafts[:i]) == legal(fresh, drafts[:i])
            emitted: list[int] = []
            for draft in [*drafts, -1]:
                choices = legal(matcher, emitted)
                assert choices
                emitted.append(draft if draft in choices and rng.random() < 0.6 else rng.choice(choices))
                if emitted[-1] != draft:
                    break
            matcher.advance(emitted)
            committed += emitted


def test_a_choice_is_legal_exactly_where_its_text_goes_on(
    compiler: GrammarCompiler, texts: list[bytes]
) -> None:
    """By comparing bytes: nothing of xgrammar. Also ends, special tokens and ids without text."""
    choices = [b"yes", b"no", b"not sure", "é or è".encode()]
    constraint = StructuredOutputs.of(choice=[choice.decode() for choice in choices])
    pending: list[tuple[list[int], bytes]] = [([], b"")]
    num_ends = 0
    while pending:
        tokens, so_far = pending.pop()
        matcher = compiler.matcher(constraint, (EOS,))
        matcher.advance(tokens)
        expected = [
            i for i, text in enumerate(texts) if text and any(c.startswith(so_far + text) for c in choices)
        ]
        if so_far in choices:
            expected, num_ends = sorted([*expected, EOS]), num_ends + 1
        assert legal(matcher, []) == expected
        pending += [([*tokens, token], so_far + texts[token]) for token in expected if token != EOS]
    assert num_ends >= len(choices)


def test_behind_an_end_of_text_nothing_else_is_legal(compiler: GrammarCompiler) -> None:
    ends = (EOS, 5)
    matcher = compiler.matcher(StructuredOutputs.of(regex="a*"), ends)
    assert set(ends) < set(legal(matcher, []) or ())
    for drafts in ([5], [5, 5], [EOS, 7, 9]):
        assert legal(matcher, drafts) == sorted(ends)
    assert len(legal(matcher, []) or ()) > 2
    matcher.advance([5, 7])
    assert legal(matcher, []) == sorted(ends)
    matcher.advance([EOS])


def test_a_committed_token_that_is_not_legal_is_an_error(compiler: GrammarCompiler) -> None:
    [x] = load_tokenizer().encode("x", add_special_tokens=False).ids
    matcher = compiler.matcher(StructuredOutputs.of(regex="ab"), (EOS,))
    with pytest.raises(ValueError, match=f"does not allow token {x} here"):
        matcher.advance([x])


def test_special_tokens_and_ids_without_text_are_never_legal(
    compiler: GrammarCompiler, texts: list[bytes]
) -> None:
    matcher = compiler.matcher(StructuredOutputs.of(regex=r"[\s\S]*"), (EOS,))
    special = {i for i, token in load_tokenizer().get_added_tokens_decoder().items() if token.special}
    assert {i for i, text in enumerate(texts) if not text} >= special
    assert not set(legal(matcher, []) or ()) & (special - {EOS})


def test_masks_made_when_needed_are_those_made_beforehand(
    compiler: GrammarCompiler, texts: list[bytes]
) -> None:
    import xgrammar

    info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, vocab_size=VOCAB, stop_token_ids=[EOS])
    eager = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    matcher = xgrammar.GrammarMatcher(eager.compile_json_schema(json.dumps(SCHEMA), max_whitespace_cnt=2))
    mine = compiler.matcher(StructuredOutputs.of(json=SCHEMA), (EOS,))
    words = np.zeros((1, VOCAB // 32), np.int32)
    tokens = load_tokenizer().encode('{"name": "ab", "tags": [3, "bc"]}', add_special_tokens=False).ids
    for token in [*tokens, EOS]:
        matcher.fill_next_token_bitmask(words)
        assert np.array_equal(mine.legal([]), words[0].view(np.uint8))
        assert matcher.accept_token(token)
        mine.advance([token])


def test_what_nobody_uses_is_forgotten_by_its_size(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiler.compile(StructuredOutputs.of(regex="first+"))
    assert compiler.compile(StructuredOutputs.of(regex="first+")) is first
    monkeypatch.setattr("actors.grammar.compiler.CACHE_BYTES", first.memory_size_bytes + 1)
    compiler.compile(StructuredOutputs.of(regex="second+"))
    assert list(compiler._compiled) == [StructuredOutputs.of(regex="second+")]


def test_a_structural_tag_may_name_special_tokens(compiler: GrammarCompiler) -> None:
    """Checkpoints mark calls of tools by such. Others stay no text."""
    special = {token.content: i for i, token in load_tokenizer().get_added_tokens_decoder().items()}
    tag = {"type": "tag", "begin": "<|system|>", "content": {"type": "any_text"}, "end": "<|user|>"}
    constraint = StructuredOutputs.of(structural_tag={"type": "structural_tag", "format": tag})
    matcher = compiler.matcher(constraint, (EOS,))
    assert special["<|system|>"] in (legal(matcher, []) or ())
    inside = set(legal(matcher, [special["<|system|>"]]) or ())
    assert special["<|user|>"] in inside
    assert special["<|pad|>"] not in inside
    assert legal(matcher, [special["<|system|>"], special["<|user|>"]]) == [EOS]


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        ({"json": {"type": "integer"}}, "12"),
        ({"json_object": True}, '{"a": 1}'),
        ({"regex": "ab+"}, "abb"),
        ({"choice": ["x y", 'z"é']}, 'z"é'),
        ({"grammar": 'root ::= "q" r\nr ::= "s"'}, "qs"),
        (
            {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "k"}}},
            "k",
        ),
    ],
    ids=str,
)
def test_behind_thoughts_the_constraint_is_the_same(
    compiler: GrammarCompiler, constraint: dict[str, Any], text: str
) -> None:
    asked = StructuredOutputs.of(**constraint)
    for whole, is_legal in [
        (f'Hm, {{"}} <a></think>{text}', True),
        (f"</think>\n\n{text}", True),
        (f"Hm{text}", False),
        (f"Hm</think>x{text}", False),
    ]:
        matcher = compiler.matcher(asked.behind("</think>"), (EOS,))
        tokens = load_tokenizer().encode(whole, add_special_tokens=False).ids
        bits = [legal(matcher, tokens[:i]) for i in range(len(tokens) + 1)]
        followed = all(ids is not None and token in ids for ids, token in zip(bits, tokens, strict=False))
        assert (followed and EOS in (bits[-1] or ())) == is_legal
    matcher = compiler.matcher(asked, (EOS,))
    matcher.advance(load_tokenizer().encode(text, add_special_tokens=False).ids)
    assert EOS in (legal(matcher, []) or ())


@pytest.mark.parametrize("within", ["schema", "tag", "behind thoughts"])
def test_white_space_between_the_parts_of_json_is_bounded(compiler: GrammarCompiler, within: str) -> None:
    schema = {"type": "object", "properties": {"a": {"const": "x  \n  y"}}, "required": ["a"]}
    part = {"type": "json_schema", "json_schema": schema}
    constraint, before = {
        "schema": (StructuredOutputs.of(json=schema), ""),
        "tag": (StructuredOutputs.of(structural_tag={"type": "structural_tag", "format": part}), ""),
        "behind thoughts": (StructuredOutputs.of(json=schema).behind("</think>"), "</think>"),
    }[within]
    for space, is_legal in [("", True), ("\n ", True), ("\n  ", False), (" " * 8, False)]:
        text = f'{before}{{{space}"a"{space}:{space}"x  \\n  y"{space}}}'
        matcher = compiler.matcher(constraint, (EOS,))
        tokens = load_tokenizer().encode(text, add_special_tokens=False).ids
        assert (matcher.legal(tokens) is not None and EOS in (legal(matcher, tokens) or ())) == is_legal
    unbounded = part | {"max_whitespace_cnt": 8}
    asked = StructuredOutputs.of(structural_tag={"type": "structural_tag", "format": unbounded})
    tokens = load_tokenizer().encode('{        "a"', add_special_tokens=False).ids
    assert legal(compiler.matcher(asked, (EOS,)), tokens) is not None
