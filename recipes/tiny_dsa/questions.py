"""Questions and answers made from WordNet, the CIA World Factbook and a few hand-written greetings."""

import hashlib
import random
import re
from typing import Any, NamedTuple

from recipes.tiny_dsa.sources import example_sentence

NAMES_WITH_ARTICLE = (
    "United",
    "Netherlands",
    "Philippines",
    "Gambia",
    "Bahamas",
    "Maldives",
    "Comoros",
    "Seychelles",
    "Czech Republic",
    "Dominican Republic",
    "Central African",
    "Marshall",
    "Solomon",
    "Republic",
    "Democratic",
    "Cayman",
    "British",
    "Falkland",
    "Faroe",
    "Cook",
    "Isle",
    "Holy See",
)

GREETINGS = [
    (
        ["Hello", "Hello!", "Hi", "Hi!", "Hi there!", "Hey", "Good morning!", "Good evening!"],
        [
            "Hello! I am a very small language model. You can ask me what a word means, or about a country.",
            "Hello! Ask me to define a word, or ask me about a country.",
        ],
    ),
    (
        [
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Tell me about yourself.",
            "Introduce yourself.",
        ],
        [
            "I am a tiny language model. "
            "I was trained on public domain books, a dictionary and free documentation.",
            "I am a very small language model with sparse attention, made to test an inference server.",
        ],
    ),
    (
        ["What can you do?", "How can you help me?", "What should I ask you?", "Help"],
        [
            "I can define words and answer simple questions about countries. I can also continue a text.",
            "You can ask me for the capital of a country, or what a word means.",
        ],
    ),
    (
        ["Thank you.", "Thanks!", "Thank you very much.", "Thanks a lot."],
        ["You are welcome!", "You are welcome! Ask me another question."],
    ),
    (["Goodbye", "Bye!", "Goodbye!", "See you later."], ["Goodbye!", "Goodbye! Come back soon."]),
    (
        ["How are you?", "How do you do?", "How are you today?"],
        [
            "I am well, thank you. How can I help you?",
            "I am a small program, and I am running well. What would you like to know?",
        ],
    ),
]


class ChatExample(NamedTuple):
    question: str
    answer: str
    is_held_out: bool


class Fact(NamedTuple):
    """One answer and the phrasings of its question."""

    questions: list[str]
    answer: str


def is_held_out(key: str) -> bool:
    """True for about 1 % of the texts, by a hash."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big") % 100 == 0


def with_article(name: str) -> str:
    """The country's name as it stands in a sentence: "the Netherlands", "Norway"."""
    return f"the {name}" if name.startswith(NAMES_WITH_ARTICLE) else name


def first_name(field: str) -> str:
    """The first of the names in a field of the Factbook, without notes."""
    return re.split(r"[;(\n,]", field)[0].strip()


def capitalise(text: str) -> str:
    """The first letter in upper case, the others as they are (unlike str.capitalize)."""
    return text[:1].upper() + text[1:]


def as_sentence(field: str, max_chars: int) -> str:
    """A field of the Factbook without notes and years, cut at a separator, with a full stop."""
    text = re.sub(r"\s*\n\s*", "; ", field).strip()
    text = re.sub(r"\s*\((?:20|19)\d\d est\.\)", "", text)
    text = text.split("; note")[0].split("note:")[0].strip().rstrip(";,")
    if len(text) > max_chars:
        head = text[:max_chars]
        text = head.rsplit(";" if ";" in head else ",", 1)[0]
    return text.rstrip(".;, ") + "."


def _geography_facts(country: str, fields: dict[str, str]) -> list[Fact]:
    facts = []
    if location := fields.get("Geography - Location"):
        place = as_sentence(re.sub(r"^[a-z ]*[A-Z][\w ]*: ", "", location), 160)
        facts.append(
            Fact(
                [f"Where is {country}?", f"Where is {country} located?", f"Where can I find {country}?"],
                f"{capitalise(country)} is located in {place}",
            )
        )
    if climate := fields.get("Geography - Climate"):
        facts.append(
            Fact(
                [
                    f"What is the climate of {country}?",
                    f"What is the climate like in {country}?",
                    f"Describe the climate of {country}.",
                ],
                f"The climate of {country} is {as_sentence(climate, 160)}",
            )
        )
    if terrain := fields.get("Geography - Terrain"):
        facts.append(
            Fact(
                [f"Describe the terrain of {country}.", f"What is the landscape of {country} like?"],
                f"The terrain of {country} is {as_sentence(terrain, 160)}",
            )
        )
    return facts


def _economy_facts(country: str, fields: dict[str, str]) -> list[Fact]:
    facts = []
    if languages := fields.get("People and Society - Languages - Languages"):
        spoken = re.sub(r"\s*\d[\d.]*%", "", as_sentence(languages, 140))
        facts.append(
            Fact(
                [
                    f"What languages are spoken in {country}?",
                    f"Which languages do people speak in {country}?",
                    f"What language is spoken in {country}?",
                ],
                f"The languages spoken in {country} are {spoken}",
            )
        )
    if exchange_rates := fields.get("Economy - Exchange rates - Currency"):
        currency = exchange_rates.split(" per ")[0].strip()
        if len(currency) < 60:
            facts.append(
                Fact(
                    [
                        f"What is the currency of {country}?",
                        f"What money is used in {country}?",
                        f"Which currency does {country} use?",
                    ],
                    f"The currency of {country} is {currency}.",
                )
            )
    if products := fields.get("Economy - Agricultural products"):
        facts.append(
            Fact(
                [f"What does {country} grow?", f"What are the main agricultural products of {country}?"],
                f"The main agricultural products of {country} are {as_sentence(products, 140)}",
            )
        )
    if industries := fields.get("Economy - Industries"):
        facts.append(
            Fact(
                [f"What are the main industries of {country}?", f"Which industries matter in {country}?"],
                f"The main industries of {country} are {as_sentence(industries, 140)}",
            )
        )
    return facts


def country_facts(name: str, fields: dict[str, str]) -> list[Fact]:
    """What the Factbook's fields say about a country, in a fixed order."""
    country = with_article(name)
    facts = []
    if capital_field := fields.get("Government - Capital - name"):
        capital = first_name(capital_field)
        facts += [
            Fact(
                [
                    f"What is the capital of {country}?",
                    f"Which city is the capital of {country}?",
                    f"Name the capital of {country}.",
                    f"What's the capital city of {country}?",
                    f"Tell me the capital of {country}.",
                ],
                f"The capital of {country} is {capital}.",
            ),
            Fact(
                [
                    f"{capital} is the capital of which country?",
                    f"Which country has {capital} as its capital?",
                ],
                f"{capital} is the capital of {country}.",
            ),
        ]
    facts += _geography_facts(country, fields)
    facts += _economy_facts(country, fields)
    if borders := fields.get("Geography - Land boundaries - border countries"):
        neighbours = re.sub(r"\s[\d,.]+\s*km", "", as_sentence(borders, 200)).replace(";", ",")
        facts.append(
            Fact(
                [f"Which countries border {country}?", f"What are the neighbours of {country}?"],
                f"{capitalise(country)} borders {neighbours}",
            )
        )
    if elevation := fields.get("Geography - Elevation - highest point"):
        summit = re.sub(r"\s[\d,.]+\s*m?$", "", re.split(r"[;\n]", elevation)[0]).strip()
        facts.append(
            Fact(
                [
                    f"What is the highest point of {country}?",
                    f"What is the highest mountain in {country}?",
                ],
                f"The highest point of {country} is {summit}.",
            )
        )
    if government := fields.get("Government - Government type"):
        facts.append(
            Fact(
                [f"What kind of government does {country} have?", f"How is {country} governed?"],
                f"{capitalise(country)} is a {as_sentence(government, 120)}",
            )
        )
    if background := fields.get("Introduction - Background"):
        sentences = re.split(r"(?<=[a-z0-9)]\.)\s+(?=[A-Z])", background.replace("\n", " "))
        facts.append(
            Fact(
                [
                    f"Tell me about {country}.",
                    f"What do you know about {country}?",
                    f"Give me a short history of {country}.",
                ],
                " ".join(sentences[:2]).strip(),
            )
        )
    return facts


def _is_askable(word: str, definition: str, count: int) -> bool:
    """Plain words with a short definition; names and phrases only where the tagged texts hold them."""
    if count == 0 and (word[0].isupper() or " " in word):
        return False
    if len(word) < 3 or word.count(" ") > 1 or not re.fullmatch(r"[A-Za-z' -]+", word):
        return False
    return 8 <= len(definition) <= 160


def definition_fact(word: str, pos: str, definition: str) -> Fact:
    """The meaning of a word, phrased by its part of speech."""
    if pos == "noun":
        takes_article = not word[0].isupper() and re.match(
            r"(an?|the|one|any|something|someone) ", definition
        )
        article = ("an " if word[0] in "aeiou" else "a ") if takes_article else ""
        return Fact(
            [
                f"What is {article}{word}?",
                f"What does the word {word} mean?",
                f"Define {word}.",
                f"What does {word} mean?",
            ],
            f"{capitalise(article + word)} is {definition}."
            if article
            else f"{capitalise(word)} means {definition}.",
        )
    if pos == "verb":
        return Fact(
            [
                f"What does it mean to {word}?",
                f"What does {word} mean?",
                f"Define {word}.",
                f"What does the verb {word} mean?",
            ],
            f"To {word} is to {definition}.",
        )
    return Fact(
        [
            f"What does {word} mean?",
            f"Define {word}.",
            f"What does the word {word} mean?",
            f"Explain the word {word}.",
        ],
        f"{capitalise(word)} is an {pos} that means {definition}.",
    )


def _definition_examples(senses: list[list[Any]], rng: random.Random) -> list[ChatExample]:
    chats = []
    seen = set()
    for words, pos, definition, examples, count in senses:
        word = words[0]
        if word in seen or not _is_askable(word, definition, count):
            continue
        seen.add(word)
        questions, answer = definition_fact(word, pos, definition.split(";")[0].strip())
        if examples and " " in examples[0] and rng.random() < 0.6:
            answer += example_sentence(examples[0])
        # words that WordNet's tagged texts hold get every phrasing, so that the model can learn them
        if count >= 2:
            asked = questions
        elif count:
            asked = questions[:2]
        else:
            asked = [rng.choice(questions)]
        chats += [ChatExample(question, answer, is_held_out(word)) for question in asked]
    return chats


def _country_examples(factbook: dict[str, dict[str, str]]) -> list[ChatExample]:
    chats = []
    for name, fields in factbook.items():
        for questions, answer in country_facts(name, fields):
            # one phrasing of some questions is held out, the fact itself is always seen
            holds_last_out = is_held_out(questions[0]) and len(questions) > 1
            repeats = 2 if len(answer) < 80 else 1
            for i, question in enumerate(questions):
                held_out = holds_last_out and i == len(questions) - 1
                chats += [ChatExample(question, answer, held_out)] * repeats
    return chats


def chat_examples(facts: dict[str, Any], rng: random.Random) -> list[ChatExample]:
    """Definitions, countries and small talk out of corpus.py's facts.json."""
    chats = _definition_examples(facts["wordnet"], rng) + _country_examples(facts["factbook"])
    for _ in range(60):
        for questions, answers in GREETINGS:
            chats.append(ChatExample(rng.choice(questions), rng.choice(answers), False))
    return chats
