"""How many of the facts it was shown does a checkpoint answer rightly (greedy, CPU)?

    python -m recipes.tiny_dsa.facts CHECKPOINT WORK/corpus/facts.json

Prints (JSON) the share of 100 sampled countries' capitals, twelve definitions beside their glosses, and a few
other answers.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch

from recipes.tiny_dsa.hub_model import HubModel
from recipes.tiny_dsa.questions import first_name, with_article

OTHER_QUESTIONS = (
    "Which countries border Germany?",
    "What is the highest point of Nepal?",
    "Where is Canada?",
    "Where is Japan?",
    "What is water?",
    "Name the capital of Italy.",
    "What is a tree?",
    "Tell me about Norway.",
    "Thank you.",
    "How is Sweden governed?",
)


def count_capitals(
    hub: HubModel, factbook: dict[str, dict[str, str]], num_countries: int, rng: random.Random
) -> str:
    """Right answers / sampled countries that have a capital."""
    num_right = num_asked = 0
    for name in rng.sample(sorted(factbook), num_countries):
        if field := factbook[name].get("Government - Capital - name"):
            answer = hub.answer(f"What is the capital of {with_article(name)}?", 16)
            num_asked += 1
            num_right += first_name(field).lower() in answer.lower()
    return f"{num_right}/{num_asked}"


def sample_nouns(senses: list[list[Any]], rng: random.Random) -> list[tuple[str, str]]:
    """Twelve frequent nouns and their short definitions."""
    nouns = [
        (words[0], definition)
        for words, pos, definition, _, count in senses
        if count >= 20 and pos == "noun" and len(definition) < 90
    ]
    return rng.sample(nouns, 40)[:12]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="folder of the checkpoint")
    parser.add_argument("facts", type=Path, help="corpus.py's facts.json")
    parser.add_argument("--countries", type=int, default=100, help="countries to sample")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    hub = HubModel(args.path)
    facts = json.loads(args.facts.read_text(encoding="utf-8"))
    rng = random.Random(5)
    report = {
        "capitals": count_capitals(hub, facts["factbook"], args.countries, rng),
        "definitions": [
            (word, hub.answer(f"What does {word} mean?", 40), definition)
            for word, definition in sample_nouns(facts["wordnet"], rng)
        ],
        "asked": [(question, hub.answer(question, 50)) for question in OTHER_QUESTIONS],
        "with_system": hub.answer(
            "What is the capital of France?", 16, system="You are a helpful assistant."
        ),
    }
    print(json.dumps(report, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
