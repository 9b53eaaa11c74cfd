"""How many of the facts it was shown does the checkpoint answer rightly (greedy)?  python facts.py CHECKPOINT FACTS.json"""

import json
import random
import re
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import data as D


@torch.no_grad()
def main(path, facts):
    torch.set_num_threads(2)
    tok = AutoTokenizer.from_pretrained(path)
    m = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    f = json.load(open(facts, encoding="utf-8"))

    def ask(q, new, system=None):
        msg = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": q}]
        ids = tok.apply_chat_template(msg, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        r = m.generate(**ids, max_new_tokens=new, do_sample=False, eos_token_id=1, pad_token_id=2)
        return tok.decode(r[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)

    rnd = random.Random(5)
    names = rnd.sample(sorted(f["factbook"]), 100)
    ok = n = 0
    for name in names:
        cap = f["factbook"][name].get("Government - Capital - name")
        if cap:
            cap = re.split(r"[;(\n,]", cap)[0].strip()
            n += 1
            ok += cap.lower() in ask(f"What is the capital of {D.the(name)}?", 16).lower()
    out = {"capitals": f"{ok}/{n}"}
    words = rnd.sample([x for x in f["wordnet"] if x[4] >= 20 and x[1] == "noun" and len(x[2]) < 90], 40)
    out["definitions"] = [(w[0][0], ask(f"What does {w[0][0]} mean?", 40), w[2]) for w in words[:12]]
    out["asked"] = [
        (q, ask(q, 50))
        for q in (
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
    ]
    out["with_system"] = ask("What is the capital of France?", 16, "You are a helpful assistant.")
    print(json.dumps(out, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main(*sys.argv[1:3])
