"""`latentray generate`, as a user runs it."""

import json
from pathlib import Path

import pytest

from tests.support.cli_process import SMALL, run

pytestmark = pytest.mark.e2e


def test_a_question_is_answered() -> None:
    done = run("generate", "--chat", "--temperature", "0", *SMALL, "What is the capital of France?")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of France is Paris.\n"
    assert "loading the model" in done.stderr


@pytest.mark.parametrize("executor", [("inline",), ("ray", "--address", "local")], ids=lambda e: e[0])
def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path, executor: tuple[str, ...]) -> None:
    done = run("generate", "--executor", *executor, "--max-tokens", "2", *SMALL, "x", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_seed_decides_whatever_the_topology() -> None:
    """A prompt from stdin; two shards without drafts must write the same text (float64: no near-ties)."""
    flags = ("generate", "--seed", "5", "--max-tokens", "40", "--dtype", "float64", "--json", *SMALL)
    one = run(*flags, stdin="The king")
    two = run(*flags, "-tp", "2", "-dcp", "2", "--num-speculative-tokens", "0", stdin="The king")
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    first, second = json.loads(one.stdout), json.loads(two.stdout)
    assert first["token_ids"] == second["token_ids"]
    assert (first["seed"], first["index"]) == (5, 0)
    assert first["num_draft_tokens"] > 0 == second["num_draft_tokens"]


def test_many_prompts_come_in_order() -> None:
    done = run(
        "generate",
        "--json",
        "--max-tokens",
        "5",
        "--temperature",
        "0",
        *SMALL,
        "The king",
        "A dog",
        "The king",
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(a["index"] for a in answers) == [0, 1, 2]
    texts = {a["index"]: a["text"] for a in answers}
    assert texts[0] == texts[2] != texts[1]
