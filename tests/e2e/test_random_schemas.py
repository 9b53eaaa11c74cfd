"""Answers to random schemas, drawn at temperature 1, hold to them. `jsonschema` judges."""

import json
from collections.abc import Iterator

import jsonschema
import pytest

from actors.inline_group import InlineGroup
from actors.structured_outputs import StructuredOutputs
from cluster.frontend.grammar_check import GrammarCheck
from tests.support.groups import TINY_DSA, group_config, load_tokenizer, request, run, text_prompts
from tests.support.random_schemas import random_schema

pytest.importorskip("xgrammar")

NUM_CHUNKS = 20
CHUNK = 25


@pytest.fixture(scope="module")
def check() -> Iterator[GrammarCheck]:
    found = GrammarCheck(TINY_DSA, 6144)
    yield found
    found.close()


@pytest.mark.product(1)
@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_every_finished_answer_is_valid(check: GrammarCheck, chunk: int) -> None:
    schemas = {str(seed): random_schema(seed) for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK)}
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
        check.require_enforceable(StructuredOutputs.of(json=schema))
    config = group_config(
        dtype="float32",
        kv_cache_dtype="float32",
        max_num_seqs=CHUNK,
        num_kv_blocks=40 * CHUNK,
        num_speculative_tokens=3,
    )
    group = InlineGroup(config)
    prompt = text_prompts([12])[0]
    common = {"temperature": 1.0, "ignore_eos": False, "max_tokens": 400}
    asked = [
        request(name, prompt, seed=int(name), structured_outputs={"json": schema}, **common)
        for name, schema in schemas.items()
    ]
    collected = run(group, asked)
    stats = group.stats()
    group.close()
    assert sum(stats.accepted) > 0.4 * sum(stats.proposed)
    num_finished = 0
    for name, schema in schemas.items():
        assert collected[name].failed is None
        if collected[name].last.finish_reason == "stop":  # one that was cut is incomplete, and not valid
            num_finished += 1
            value = json.loads(load_tokenizer().decode(collected[name].token_ids))
            jsonschema.Draft202012Validator(schema).validate(value)
    assert num_finished >= 0.7 * CHUNK
