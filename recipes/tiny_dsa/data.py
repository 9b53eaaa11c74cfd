"""Tokenizer, chat examples and token streams from the text that corpus.py wrote.

    python -m recipes.tiny_dsa.data --work WORK --out DATA [--vocab-size 6144]

Writes DATA/tokenizer/ (tokenizer.json, tokenizer_config.json), DATA/train.bin and DATA/val.bin (uint16),
DATA/val_prompts.json (held-out text beginnings and questions) and DATA/data.json (counts).
"""

import argparse
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from recipes.tiny_dsa.prose import DOCUMENT_SEPARATOR
from recipes.tiny_dsa.questions import ChatExample, chat_examples, is_held_out
from recipes.tiny_dsa.vocabulary import (
    BOS,
    EOS,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    question_ids,
)

# Lists of addresses and officials.
FACTBOOK_DROPPED_LINES = re.compile(
    r"chief of mission|chancery|telephone|FAX|email|embassy|mailing|consulate|head of|cabinet|election"
)

TOKENIZER_CHARS_PER_SOURCE = 2_000_000
TOKENIZER_CHATS = 20000
# Runs of documents stay in order, so that books keep their thread over long windows.
DOCUMENTS_PER_RUN = 16
CHATS_PER_RUN = 64
NUM_PROMPTS = 256
PROMPT_CHARS = 1500

TokenIds = npt.NDArray[np.uint16]


def read_corpus(folder: Path) -> dict[str, list[str]]:
    """Documents by source, sources in the order of their names."""
    documents = {}
    for path in sorted(folder.glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        if path.stem == "factbook":
            text = "\n".join(line for line in text.split("\n") if not FACTBOOK_DROPPED_LINES.match(line))
        documents[path.stem] = text.split(DOCUMENT_SEPARATOR)
    return documents


def train_tokenizer(
    corpus: dict[str, list[str]], chats: list[ChatExample], vocab_size: int, rng: random.Random
) -> Tokenizer:
    """Byte-level BPE, trained on an equal share of each source and on chats; never on held-out documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample: list[str] = []
    for documents in corpus.values():
        candidates = [document for document in documents if not is_held_out(document)]
        rng.shuffle(candidates)
        size = 0
        for document in candidates:
            sample.append(document)
            size += len(document)
            if size > TOKENIZER_CHARS_PER_SOURCE:
                break
    sample += [f"{chat.question} {chat.answer}" for chat in rng.sample(chats, TOKENIZER_CHATS)]
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    return tokenizer


class TokenStreams:
    """Collects token sequences into runs of the training stream, or into the held-out stream."""

    def __init__(self) -> None:
        self.train_runs: list[TokenIds] = []
        self.held_out: list[TokenIds] = []
        self._run: list[TokenIds] = []

    def add(self, ids: list[int], *, held_out: bool, run_length: int) -> None:
        sequence = np.array(ids, dtype=np.uint16)
        if held_out:
            self.held_out.append(sequence)
            return
        self._run.append(sequence)
        if len(self._run) == run_length:
            self.end_run()

    def end_run(self) -> None:
        if self._run:
            self.train_runs.append(np.concatenate(self._run))
            self._run = []


def encode_documents(
    tokenizer: Tokenizer, documents: list[str], streams: TokenStreams
) -> tuple[int, list[str]]:
    """Adds the documents of one source; returns their number of tokens and the held-out documents."""
    num_tokens = 0
    held_out_documents = []
    for start in range(0, len(documents), 512):
        batch = documents[start : start + 512]
        encodings = tokenizer.encode_batch(batch, add_special_tokens=False)
        for document, encoding in zip(batch, encodings, strict=True):
            ids = [BOS, *encoding.ids, EOS]
            num_tokens += len(ids)
            held_out = is_held_out(document)
            if held_out:
                held_out_documents.append(document)
            streams.add(ids, held_out=held_out, run_length=DOCUMENTS_PER_RUN)
    streams.end_run()
    return num_tokens, held_out_documents


def encode_chats(tokenizer: Tokenizer, chats: list[ChatExample], streams: TokenStreams) -> int:
    """Adds the chats; returns their number of tokens. An unfinished run of chats at the end is left out."""
    num_tokens = 0
    for question, answer, held_out in chats:
        answer_ids = tokenizer.encode(answer, add_special_tokens=False).ids
        ids = [*question_ids(tokenizer, question), *answer_ids, EOS]
        num_tokens += len(ids)
        streams.add(ids, held_out=held_out, run_length=CHATS_PER_RUN)
    return num_tokens


def write_json(path: Path, value: Any, **options: Any) -> None:
    path.write_text(json.dumps(value, **options), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="corpus.py's folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=6144)
    args = parser.parse_args()

    rng = random.Random(1234)
    corpus_folder: Path = args.work / "corpus"
    corpus = read_corpus(corpus_folder)
    sources = json.loads((corpus_folder / "sources.json").read_text(encoding="utf-8"))
    facts = json.loads((corpus_folder / "facts.json").read_text(encoding="utf-8"))
    chats = chat_examples(facts, rng)

    tokenizer_folder: Path = args.out / "tokenizer"
    tokenizer_folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(corpus, chats, args.vocab_size, rng)
    tokenizer.save(str(tokenizer_folder / "tokenizer.json"))
    write_json(tokenizer_folder / "tokenizer_config.json", TOKENIZER_CONFIG, indent=2)

    streams = TokenStreams()
    text_prompts: list[tuple[str, str]] = []
    for name, documents in corpus.items():
        sources[name]["tokens"], held_out = encode_documents(tokenizer, documents, streams)
        text_prompts += [(name, document[:PROMPT_CHARS]) for document in held_out]
    rng.shuffle(chats)
    num_chat_tokens = encode_chats(tokenizer, chats, streams)
    chat_prompts = [(chat.question, chat.answer) for chat in chats if chat.is_held_out]

    rng.shuffle(streams.train_runs)
    train, val = np.concatenate(streams.train_runs), np.concatenate(streams.held_out)
    train.tofile(args.out / "train.bin")
    val.tofile(args.out / "val.bin")
    rng.shuffle(text_prompts)
    rng.shuffle(chat_prompts)
    prompts = {"text": text_prompts[:NUM_PROMPTS], "chat": chat_prompts[:NUM_PROMPTS]}
    write_json(args.out / "val_prompts.json", prompts)

    num_bytes = sum(source["bytes"] for source in sources.values())
    num_tokens = sum(source["tokens"] for source in sources.values())
    counts = {
        "vocab_size": tokenizer.get_vocab_size(),
        "sources": sources,
        "chat": {"examples": len(chats), "tokens": num_chat_tokens},
        "train_tokens": len(train),
        "val_tokens": len(val),
        "bytes_per_token": num_bytes / num_tokens,
    }
    write_json(args.out / "data.json", counts, indent=1)
    print(json.dumps({key: value for key, value in counts.items() if key != "sources"}, indent=1))
    for chat in chats[:25]:
        print("Q:", chat.question, "| A:", chat.answer)


if __name__ == "__main__":
    main()
