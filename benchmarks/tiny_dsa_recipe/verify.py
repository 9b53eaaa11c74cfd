"""Check the shipped checkpoint against transformers on a CPU, with a speculative loop written for this purpose.

    python verify.py CHECKPOINT [--val val.bin --prompts val_prompts.json] [--n 6] [--new 64]

Prints (JSON): perplexity on held-out windows with the shipped top-k and with dense attention, generated samples,
and a real greedy speculative decoding run (drafts of the MTP layer, verified by the main model) for k = 1, 2, 3,
compared token by token with plain greedy decoding.
"""

import argparse
import copy
import json
import time

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as V


class Mtp(torch.nn.Module):
    """The extra layer after the main model's: enorm, hnorm, eh_proj, one decoder block, shared_head.norm."""

    def __init__(self, path, cfg, dtype):
        super().__init__()
        n = cfg.num_hidden_layers
        self.cfg = copy.deepcopy(cfg)
        self.cfg.num_hidden_layers = n + 1
        self.cfg.mlp_layer_types = list(cfg.mlp_layer_types) + ["sparse"]
        self.cfg._attn_implementation = "eager"
        self.block = V.DeepseekV32DecoderLayer(self.cfg, n)
        H, eps = cfg.hidden_size, cfg.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (V.DeepseekV32RMSNorm(H, eps) for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * H, H, bias=False)
        self.rotary = V.DeepseekV32RotaryEmbedding(self.cfg)
        p, t = f"model.layers.{n}.", {}
        index = json.load(open(path + "/model.safetensors.index.json"))["weight_map"]
        for k, f in index.items():
            if k.startswith(p):
                with safe_open(f"{path}/{f}", "pt") as s:
                    t[k[len(p) :]] = s.get_tensor(k)
        E = cfg.n_routed_experts
        t["mlp.experts.gate_up_proj"] = torch.stack(
            [
                torch.cat(
                    [t.pop(f"mlp.experts.{e}.gate_proj.weight"), t.pop(f"mlp.experts.{e}.up_proj.weight")]
                )
                for e in range(E)
            ]
        )
        t["mlp.experts.down_proj"] = torch.stack(
            [t.pop(f"mlp.experts.{e}.down_proj.weight") for e in range(E)]
        )
        own = {
            "enorm.weight": "enorm.weight",
            "hnorm.weight": "hnorm.weight",
            "eh_proj.weight": "eh_proj.weight",
            "shared_head.norm.weight": "norm.weight",
        }
        sd = {own.get(k, "block." + k): v for k, v in t.items()}
        missing, unexpected = self.load_state_dict(sd, strict=False)
        missing = [k for k in missing if "inv_freq" not in k]
        assert not missing and not unexpected, (missing, unexpected)
        self.to(dtype)

    def forward(self, hidden, emb):
        x = self.eh_proj(torch.cat([self.enorm(emb), self.hnorm(hidden)], -1))
        S = x.shape[1]
        pos = torch.arange(S)[None]
        mask = torch.full((S, S), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)[None, None]
        x = self.block(x, attention_mask=mask, position_ids=pos, position_embeddings=self.rotary(x, pos))
        x = x[0] if isinstance(x, tuple) else x
        return self.norm(x)


@torch.no_grad()
def speculative(model, mtp, ids, new, k, eos):
    """Greedy speculative decoding without caches.  Returns tokens and accepted-length counts."""
    seq, n0, counts = list(ids), len(ids), [0] * (k + 1)
    emb, head = model.model.embed_tokens, model.lm_head
    h = model.model(torch.tensor([seq]), use_cache=False).last_hidden_state
    seq.append(int(head(h[0, -1]).argmax()))
    while len(seq) - n0 < new and seq[-1] != eos:
        hs = h[:, : len(seq) - 1]
        draft = []
        for _ in range(k):
            o = mtp(hs, emb(torch.tensor([(seq + draft)[1:]])))
            draft.append(int(head(o[0, -1]).argmax()))
            hs = torch.cat([hs, o[:, -1:]], 1)
        h = model.model(torch.tensor([seq + draft]), use_cache=False).last_hidden_state
        true = head(h[0, len(seq) - 1 :]).argmax(-1).tolist()
        a = 0
        while a < k and draft[a] == true[a]:
            a += 1
        counts[a] += 1
        seq += true[: a + 1]
        if eos in seq[n0:]:
            seq = seq[: n0 + seq[n0:].index(eos) + 1]
    return seq[n0:][:new], counts


@torch.no_grad()
def ppl(model, val, S, topk, batches):
    for m in model.modules():
        if isinstance(m, V.DeepseekV32Indexer):
            m.index_topk = topk
    tot = 0.0
    for s in np.linspace(0, len(val) - S - 2, batches).astype(int):
        t = torch.from_numpy(val[s : s + S + 1].astype(np.int64))[None]
        z = model(t[:, :S], use_cache=False).logits.float()
        tot += float(F.cross_entropy(z[0], t[0, 1:]))
    return tot / batches


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("path")
    ap.add_argument("--val")
    ap.add_argument("--prompts")
    ap.add_argument("--n", type=int, default=6)
    ap.add_argument("--new", type=int, default=64)
    ap.add_argument("--windows", type=int, default=12)
    ap.add_argument("--dtype", default="float32")
    a = ap.parse_args()
    torch.set_num_threads(2)
    dt = getattr(torch, a.dtype)
    cfg = AutoConfig.from_pretrained(a.path)
    tok = AutoTokenizer.from_pretrained(a.path)
    model = AutoModelForCausalLM.from_pretrained(a.path, dtype=dt).eval()
    mtp = Mtp(a.path, cfg, dt).eval()
    out = {
        "class": type(model).__name__,
        "parameters_main": sum(p.numel() for p in model.parameters()),
        "parameters_mtp": sum(p.numel() for p in mtp.parameters()),
        "dtype": a.dtype,
    }
    if a.val:
        val = np.fromfile(a.val, dtype=np.uint16)
        for S in (512, 1024, 2048):
            for k in (cfg.index_topk, S):
                l = ppl(model, val, S, k, max(2, a.windows * 512 // S))
                out[f"loss/{S}/{'dense' if k == S else 'top' + str(k)}"] = round(l, 4)
        ppl(model, val[:66], 64, cfg.index_topk, 1)
    out["samples"] = {}
    for q in (
        "What is the capital of France?",
        "What is a computer?",
        "Where is Egypt?",
        "What does happy mean?",
        "Hello!",
    ):
        ids = tok.apply_chat_template(
            [{"role": "user", "content": q}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        r = model.generate(**ids, max_new_tokens=60, do_sample=False, eos_token_id=1, pad_token_id=2)
        out["samples"][q] = tok.decode(r[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    torch.manual_seed(0)
    for q in (
        "The history of",
        "It is a truth universally acknowledged, that",
        "The function returns",
        "Python is",
    ):
        ids = torch.tensor([[0] + tok(q, add_special_tokens=False)["input_ids"]])
        r = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=70,
            do_sample=True,
            temperature=0.7,
            top_p=0.9,
            eos_token_id=1,
            pad_token_id=2,
        )
        out["samples"][q + " (T 0.7)"] = tok.decode(r[0, ids.shape[1] :], skip_special_tokens=True)
    prompts = [
        tok.apply_chat_template(
            [{"role": "user", "content": q}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for q in (
            "What is the capital of Norway?",
            "What is a computer?",
            "Tell me about Egypt.",
            "What does it mean to run?",
        )
    ]
    if a.prompts:
        pj = json.load(open(a.prompts))
        prompts += [[0] + tok(d, add_special_tokens=False)["input_ids"][:80] for _, d in pj["text"][: a.n]]
    t0 = time.time()
    plain = []
    for p in prompts:
        ids = torch.tensor([p])
        r = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=a.new,
            do_sample=False,
            eos_token_id=1,
            pad_token_id=2,
        )
        plain.append(r[0, len(p) :].tolist())
    out["speculative"] = {}
    for k in (1, 2, 3):
        tot, same = np.zeros(k + 1, dtype=int), 0
        for p, g in zip(prompts, plain):
            r, c = speculative(model, mtp, list(p), a.new, k, 1)
            tot += np.array(c)
            same += r == g
        out["speculative"][f"k{k}"] = {
            "accept_at_least": [round(float(tot[j:].sum() / tot.sum()), 4) for j in range(1, k + 1)],
            "tokens_per_step": round(float((tot * (np.arange(k + 1) + 1)).sum() / tot.sum()), 3),
            "rounds": int(tot.sum()),
            "same_as_greedy": f"{same}/{len(prompts)}",
        }
    out["seconds"] = round(time.time() - t0, 1)
    print(json.dumps(out, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
