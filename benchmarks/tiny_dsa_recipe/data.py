"""Tokenizer, chat examples and token streams from the text that corpus.py wrote.

    python data.py --work DIR --out OUT [--vocab 6144]

OUT/tokenizer/ (tokenizer.json, tokenizer_config.json), OUT/train.bin, OUT/val.bin (uint16),
OUT/val_prompts.json (held-out text starts and chat questions), OUT/data.json (counts).
"""

import argparse
import glob
import hashlib
import json
import os
import random
import re

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = [
    "<|bos|>",
    "<|eos|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|reserved_0|>",
    "<|reserved_1|>",
]
BOS, EOS, PAD, SYSTEM, USER, ASSISTANT = range(6)
SEP = "\n\x1e\n"
CHAT_TEMPLATE = (
    "{{- '<|bos|>' -}}{%- for m in messages -%}"
    "{%- if m['role'] == 'system' -%}{{- '<|system|>' + m['content'] -}}"
    "{%- elif m['role'] == 'user' -%}{{- '<|user|>' + m['content'] -}}"
    "{%- elif m['role'] == 'assistant' -%}{{- '<|assistant|>' + m['content'] + '<|eos|>' -}}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def held_out(key):
    """About 1 % of the documents, by a hash of their text."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big") % 100 == 0


def the(name):
    the_names = (
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
    return "the " + name if name.startswith(the_names) else name


def cap(s):
    return s[:1].upper() + s[1:]


def sentence(s, limit=300):
    s = re.sub(r"\s*\n\s*", "; ", s).strip()
    s = re.sub(r"\s*\((?:20|19)\d\d est\.\)", "", s)
    s = s.split("; note")[0].split("note:")[0].strip().rstrip(";,")
    if len(s) > limit:
        s = s[:limit].rsplit(";", 1)[0] if ";" in s[:limit] else s[:limit].rsplit(",", 1)[0]
    return s.rstrip(".;, ") + "."


def country_chat(name, f, rnd):
    t = the(name)
    out = []

    def add(qs, a):
        out.append((qs, a))

    g = f.get
    capital = g("Government - Capital - name")
    if capital:
        c = re.split(r"[;(\n,]", capital)[0].strip()
        add(
            [
                f"What is the capital of {t}?",
                f"Which city is the capital of {t}?",
                f"Name the capital of {t}.",
                f"What's the capital city of {t}?",
                f"Tell me the capital of {t}.",
            ],
            f"The capital of {t} is {c}.",
        )
        add(
            [f"{c} is the capital of which country?", f"Which country has {c} as its capital?"],
            f"{c} is the capital of {t}.",
        )
    if g("Geography - Location"):
        add(
            [f"Where is {t}?", f"Where is {t} located?", f"Where can I find {t}?"],
            f"{cap(t)} is located in "
            + sentence(re.sub(r"^[a-z ]*[A-Z][\w ]*: ", "", g("Geography - Location")), 160),
        )
    if g("Geography - Climate"):
        add(
            [
                f"What is the climate of {t}?",
                f"What is the climate like in {t}?",
                f"Describe the climate of {t}.",
            ],
            f"The climate of {t} is " + sentence(g("Geography - Climate"), 160),
        )
    if g("Geography - Terrain"):
        add(
            [f"Describe the terrain of {t}.", f"What is the landscape of {t} like?"],
            f"The terrain of {t} is " + sentence(g("Geography - Terrain"), 160),
        )
    lang = g("People and Society - Languages - Languages")
    if lang:
        ls = re.sub(r"\s*\d[\d.]*%", "", sentence(lang, 140))
        add(
            [
                f"What languages are spoken in {t}?",
                f"Which languages do people speak in {t}?",
                f"What language is spoken in {t}?",
            ],
            f"The languages spoken in {t} are {ls}",
        )
    if g("Economy - Exchange rates - Currency"):
        cur = g("Economy - Exchange rates - Currency").split(" per ")[0].strip()
        if len(cur) < 60:
            add(
                [
                    f"What is the currency of {t}?",
                    f"What money is used in {t}?",
                    f"Which currency does {t} use?",
                ],
                f"The currency of {t} is {cur}.",
            )
    if g("Economy - Agricultural products"):
        add(
            [f"What does {t} grow?", f"What are the main agricultural products of {t}?"],
            f"The main agricultural products of {t} are "
            + sentence(g("Economy - Agricultural products"), 140),
        )
    if g("Economy - Industries"):
        add(
            [f"What are the main industries of {t}?", f"Which industries matter in {t}?"],
            f"The main industries of {t} are " + sentence(g("Economy - Industries"), 140),
        )
    if g("Geography - Land boundaries - border countries"):
        b = re.sub(
            r"\s[\d,.]+\s*km", "", sentence(g("Geography - Land boundaries - border countries"), 200)
        ).replace(";", ",")
        add([f"Which countries border {t}?", f"What are the neighbours of {t}?"], f"{cap(t)} borders {b}")
    if g("Geography - Elevation - highest point"):
        h = re.sub(
            r"\s[\d,.]+\s*m?$", "", re.split(r"[;\n]", g("Geography - Elevation - highest point"))[0]
        ).strip()
        add(
            [f"What is the highest point of {t}?", f"What is the highest mountain in {t}?"],
            f"The highest point of {t} is {h}.",
        )
    if g("Government - Government type"):
        add(
            [f"What kind of government does {t} have?", f"How is {t} governed?"],
            f"{cap(t)} is a " + sentence(g("Government - Government type"), 120),
        )
    bg = g("Introduction - Background")
    if bg:
        s = re.split(r"(?<=[a-z0-9)]\.)\s+(?=[A-Z])", bg.replace("\n", " "))
        add(
            [f"Tell me about {t}.", f"What do you know about {t}?", f"Give me a short history of {t}."],
            " ".join(s[:2]).strip(),
        )
    return out


HELLO = [
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
            "I am a tiny language model. I was trained on public domain books, a dictionary and free documentation.",
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


def chat_examples(facts, rnd):
    """[(question, answer, held_out)]: definitions, countries, small talk."""
    out = []
    seen = set()
    for words, pos, d, ex, n in facts["wordnet"]:
        w = words[0]
        if (
            (n == 0 and (w[0].isupper() or " " in w))
            or w in seen
            or len(w) < 3
            or w.count(" ") > 1
            or not re.fullmatch(r"[A-Za-z' -]+", w)
            or len(d) > 160
            or len(d) < 8
        ):
            continue
        seen.add(w)
        d = d.split(";")[0].strip()
        if pos == "noun":
            art = (
                ""
                if w[0].isupper() or re.match(r"(an?|the|one|any|something|someone) ", d) is None
                else ("an " if w[0] in "aeiou" else "a ")
            )
            qs = [
                f"What is {art}{w}?",
                f"What does the word {w} mean?",
                f"Define {w}.",
                f"What does {w} mean?",
            ]
            a = f"{cap(art + w)} is {d}." if art else f"{cap(w)} means {d}."
        elif pos == "verb":
            qs = [
                f"What does it mean to {w}?",
                f"What does {w} mean?",
                f"Define {w}.",
                f"What does the verb {w} mean?",
            ]
            a = f"To {w} is to {d}."
        else:
            qs = [
                f"What does {w} mean?",
                f"Define {w}.",
                f"What does the word {w} mean?",
                f"Explain the word {w}.",
            ]
            a = f"{cap(w)} is an {pos} that means {d}."
        if ex and " " in ex[0] and rnd.random() < 0.6:
            e = ex[0].strip().rstrip(";,")
            a += f" For example: {e}" + ("" if e[-1] in ".?!" else ".")
        # words that WordNet's tagged texts hold get every phrasing, so that the model can learn them
        for q in qs if n >= 2 else qs[:2] if n else [rnd.choice(qs)]:
            out.append((q, a, held_out(w)))
    base = []
    for name, f in facts["factbook"].items():
        for qs, a in country_chat(name, f, rnd):
            h = held_out(qs[0])
            # one phrasing is held out for every question, the fact itself is always seen
            for i, q in enumerate(qs):
                for _ in range(2 if len(a) < 80 else 1):
                    base.append((q, a, h and i == len(qs) - 1 and len(qs) > 1))
    for _ in range(60):
        for qs, an in HELLO:
            base.append((rnd.choice(qs), rnd.choice(an), False))
    return out + base


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--work", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--vocab", type=int, default=6144)
    a = ap.parse_args()
    rnd = random.Random(1234)
    docs = {}
    for p in sorted(glob.glob(a.work + "/corpus/*.txt")):
        k = os.path.basename(p)[:-4]
        t = open(p, encoding="utf-8").read()
        if k == "factbook":
            t = "\n".join(
                x
                for x in t.split("\n")
                if not re.match(
                    r"(chief of mission|chancery|telephone|FAX|email|embassy|mailing|consulate|head of|cabinet|election)",
                    x,
                )
            )
        docs[k] = t.split(SEP)
    facts = json.load(open(a.work + "/corpus/facts.json", encoding="utf-8"))
    chats = chat_examples(facts, rnd)

    os.makedirs(a.out + "/tokenizer", exist_ok=True)
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.decoder = decoders.ByteLevel()
    tr = trainers.BpeTrainer(
        vocab_size=a.vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = []
    for k, ds in docs.items():
        ds = [d for d in ds if not held_out(d)]
        rnd.shuffle(ds)
        n = 0
        for d in ds:
            sample.append(d)
            n += len(d)
            if n > 2_000_000:
                break
    sample += [q + " " + x for q, x, _ in rnd.sample(chats, 20000)]
    tok.train_from_iterator(sample, tr)
    tok.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    tok.save(a.out + "/tokenizer/tokenizer.json")
    json.dump(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|bos|>",
            "eos_token": "<|eos|>",
            "pad_token": "<|pad|>",
            "add_bos_token": True,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 2048,
            "chat_template": CHAT_TEMPLATE,
        },
        open(a.out + "/tokenizer/tokenizer_config.json", "w"),
        indent=2,
    )

    train, val, prompts = [], [], {"text": [], "chat": []}
    info = {"vocab_size": tok.get_vocab_size(), "sources": json.load(open(a.work + "/corpus/sources.json"))}
    for k, ds in docs.items():
        # runs of 16 documents stay in order, so that books keep their thread over long windows
        n_t = 0
        enc = []
        for i in range(0, len(ds), 512):
            enc += tok.encode_batch(ds[i : i + 512], add_special_tokens=False)
        run = []
        for d, e in zip(ds, enc):
            ids = np.array([BOS] + e.ids + [EOS], dtype=np.uint16)
            n_t += len(ids)
            if held_out(d):
                val.append(ids)
                prompts["text"].append((k, d[:1500]))
            else:
                run.append(ids)
                if len(run) == 16:
                    train.append(np.concatenate(run))
                    run = []
        if run:
            train.append(np.concatenate(run))
        info["sources"][k]["tokens"] = n_t
    n_t = 0
    run = []
    rnd.shuffle(chats)
    for q, x, h in chats:
        ids = np.array(
            [BOS, USER]
            + tok.encode(q, add_special_tokens=False).ids
            + [ASSISTANT]
            + tok.encode(x, add_special_tokens=False).ids
            + [EOS],
            dtype=np.uint16,
        )
        n_t += len(ids)
        if h:
            val.append(ids)
            prompts["chat"].append((q, x))
        else:
            run.append(ids)
            if len(run) == 64:
                train.append(np.concatenate(run))
                run = []
    info["chat"] = {"examples": len(chats), "tokens": n_t}
    rnd.shuffle(train)
    train, val = np.concatenate(train), np.concatenate(val)
    train.tofile(a.out + "/train.bin")
    val.tofile(a.out + "/val.bin")
    rnd.shuffle(prompts["text"])
    rnd.shuffle(prompts["chat"])
    prompts = {k: v[:256] for k, v in prompts.items()}
    json.dump(prompts, open(a.out + "/val_prompts.json", "w"))
    info["train_tokens"], info["val_tokens"] = len(train), len(val)
    info["bytes_per_token"] = sum(s["bytes"] for s in info["sources"].values()) / sum(
        s["tokens"] for s in info["sources"].values()
    )
    json.dump(info, open(a.out + "/data.json", "w"), indent=1)
    print(json.dumps({k: v for k, v in info.items() if k != "sources"}, indent=1))
    for q, x, _ in chats[:25]:
        print("Q:", q, "| A:", x)


if __name__ == "__main__":
    main()
