"""Train the tiny DSA + MTP checkpoint on one GPU within a wall-clock budget.

    python train.py --data DIR --out DIR --seconds 480

Phases by elapsed fraction: (1) dense attention, window 512; (2) the same with the indexers learning from the
attention probabilities (KL, detached), window 1024; (3) sparse top-k attention, KL on the chosen set, MTP
recursive to depth 3 with the main model's distribution as its target, window 1024; (4) the same, window 2048.
"""

import argparse
import json
import math
import os
import time

import numpy as np
import torch
import torch.nn.functional as F

import model as M

PHASES = [  # until fraction, window, mode, MTP steps, soft MTP targets
    (0.46, 512, "flash", 1, False),
    (0.58, 1024, "dense", 1, False),
    (0.86, 1024, "sparse", 3, True),
    (1.00, 2048, "sparse", 3, True),
]
MTP_W = (0.3, 0.2, 0.15)


def log(*a):
    print(*a, flush=True)


# ------------------------------------------------------------------ losses


def ce(h, W, y):
    return F.cross_entropy((h.flatten(0, 1) @ W.to(M.BF).t()).float(), y.flatten())


def ce_logits(h, W, y):
    z = h.flatten(0, 1) @ W.to(M.BF).t()
    return F.cross_entropy(z.float(), y.flatten()), z


def soft_ce(h, W, teacher, keep):
    """Cross entropy against the teacher's softmax; keep [N] weights rows."""
    z = (h.flatten(0, 1) @ W.to(M.BF).t()).float()
    p = torch.softmax(teacher.float(), -1)
    loss = torch.logsumexp(z, -1) - (p * z).sum(-1)
    return (loss * keep).sum() / keep.sum()


# ------------------------------------------------------------------ optimiser


def orthogonalise(G):
    """Five quintic Newton-Schulz steps towards the nearest semi-orthogonal matrix, batched."""
    X = G.to(torch.bfloat16)
    flip = X.shape[-2] > X.shape[-1]
    if flip:
        X = X.transpose(-1, -2)
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        A = X @ X.transpose(-1, -2)
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * (A @ A)) @ X
    return X.transpose(-1, -2) if flip else X


class MomentumOrtho:
    """Momentum, then an orthogonalised step; matrices of one shape are stepped as one batch."""

    def __init__(self, params, momentum=0.95, wd=0.1):
        self.groups = {}
        for p in params:
            self.groups.setdefault(p.shape[-2:], []).append(p)
        self.momentum, self.wd = momentum, wd
        self.orth = orthogonalise
        self.buf = {p: torch.zeros_like(p) for g in self.groups.values() for p in g}

    @torch.no_grad()
    def step(self, lr):
        for shape, ps in self.groups.items():
            gs = [p.grad for p in ps]
            bs = [self.buf[p] for p in ps]
            torch._foreach_lerp_(bs, gs, 1 - self.momentum)
            up = torch._foreach_lerp(gs, bs, self.momentum)
            O = self.orth(torch.cat([u.reshape(-1, *shape) for u in up]))
            scale = 0.2 * math.sqrt(max(shape))
            parts = O.split([u.numel() // (shape[0] * shape[1]) for u in up])
            torch._foreach_mul_(ps, 1 - lr * self.wd)
            torch._foreach_add_(
                ps, [o.reshape(p.shape).to(p.dtype) for o, p in zip(parts, ps)], alpha=-lr * scale
            )


# ------------------------------------------------------------------ evaluation


@torch.no_grad()
def evaluate(net, val, S, mode, topk, batches=4, B=32, steps=1):
    W = net.P["lm_head.weight"]
    tot, mtp, n = 0.0, [0.0] * steps, 0
    starts = np.linspace(0, len(val) - S - 5, B * batches).astype(np.int64)
    for b in range(batches):
        t = torch.stack([val[s : s + S + 4] for s in starts[b::batches]]).long()
        h, _, _ = net.main(t[:, :S], mode, topk)
        tot += float(F.cross_entropy((h.flatten(0, 1) @ W.to(M.BF).t()).float(), t[:, 1 : S + 1].flatten()))
        outs, _, _ = net.mtp(h, t, steps, mode, topk)
        for j, o in enumerate(outs, 1):
            mtp[j - 1] += float(
                F.cross_entropy((o.flatten(0, 1) @ W.to(M.BF).t()).float(), t[:, j + 1 : j + 1 + S].flatten())
            )
        n += 1
    return tot / n, [m / n for m in mtp]


@torch.no_grad()
def greedy(net, prompts, new, topk, eos=1, mode="sparse_eval"):
    """Greedy continuation without a cache, right-padded.  Returns token rows and lengths."""
    W = net.P["lm_head.weight"].to(M.BF)
    lens = torch.tensor([len(p) for p in prompts], device=net.device)
    L = int(lens.max()) + new
    seq = torch.full((len(prompts), L + 4), 2, dtype=torch.long, device=net.device)
    for i, p in enumerate(prompts):
        seq[i, : len(p)] = torch.tensor(p, device=net.device)
    start, done = lens.clone(), torch.zeros_like(lens, dtype=torch.bool)
    ar = torch.arange(len(prompts), device=net.device)
    for _ in range(new):
        T = int(lens.max())
        h, _, _ = net.main(seq[:, :T], mode, topk)
        nxt = (h[ar, lens - 1] @ W.t()).argmax(-1)
        nxt = torch.where(done, 2, nxt)
        seq[ar, lens] = nxt
        lens = lens + (~done).long()
        done |= nxt == eos
        if bool(done.all()):
            break
    return seq, start, lens


@torch.no_grad()
def acceptance(net, seq, start, lens, topk, k=3, post_norm=True, mode="sparse_eval"):
    """Replay of greedy speculative decoding with k drafts over the finished greedy sequences."""
    W = net.P["lm_head.weight"].to(M.BF)
    T = int(lens.max())
    h, _, _ = net.main(seq[:, :T], mode, topk)
    outs, _, _ = net.mtp(h, seq, k, mode, topk, post_norm=post_norm)
    ok = [((o @ W.t()).argmax(-1) == seq[:, j + 1 : j + 1 + T]).cpu().numpy() for j, o in enumerate(outs, 1)]
    hit, rounds, tokens = [0] * k, 0, 0
    for b in range(seq.shape[0]):
        m, end = int(start[b]), int(lens[b])  # seq[m] was just sampled from the state at m - 1
        while m + k < end:
            a = 0
            while a < k and ok[a][b, m - 1]:
                a += 1
            for j in range(a):
                hit[j] += 1
            rounds += 1
            tokens += a + 1
            m += a + 1
    return {
        "accept_at_least": [round(x / max(rounds, 1), 4) for x in hit],
        "tokens_per_step": round(tokens / max(rounds, 1), 4),
        "rounds": rounds,
    }


@torch.no_grad()
def agreement(net, val, S, topk, k=3, batches=8, B=16):
    """On real held-out text (no greedy loops): how often draft j and all before it equal the main model's
    greedy choice, and the mean overlap sum(min(p, q)), the acceptance probability when sampling at T = 1."""
    W = net.P["lm_head.weight"].to(M.BF)
    hit, ov, n = [0.0] * k, [0.0] * k, 0
    starts = np.linspace(0, len(val) - S - 5, B * batches).astype(np.int64)
    for b in range(batches):
        t = torch.stack([val[s : s + S + 4] for s in starts[b::batches]]).long()
        h, _, _ = net.main(t[:, :S], "sparse_eval", topk)
        z = (h @ W.t()).float()
        outs, _, _ = net.mtp(h, t, k, "sparse_eval", topk)
        p, g = torch.softmax(z, -1), z.argmax(-1)
        ok = torch.ones_like(g[:, : S - k], dtype=torch.bool)
        for j, o in enumerate(outs, 1):
            y = (o @ W.t()).float()[:, : S - k]
            ok = ok & (y.argmax(-1) == g[:, j : S - k + j])
            hit[j - 1] += float(ok.float().mean())
            ov[j - 1] += float(torch.minimum(torch.softmax(y, -1), p[:, j : S - k + j]).sum(-1).mean())
        n += 1
    return {
        "greedy_accept_at_least": [round(x / n, 4) for x in hit],
        "sampling_overlap": [round(x / n, 4) for x in ov],
    }


# ------------------------------------------------------------------ main


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--seconds", type=float, default=480)
    ap.add_argument("--tokens", type=int, default=65536, help="tokens a step")
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--adam-only", action="store_true")
    ap.add_argument(
        "--only-phase", type=int, default=-1, help="spend the whole budget on one phase (for trials)"
    )
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--no-compile", action="store_true")
    ap.add_argument("--no-final", action="store_true")
    ap.add_argument("--override", default="{}", help="JSON over the model's configuration")
    a = ap.parse_args()
    dev = a.device
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    c = {**M.CFG, **json.loads(a.override)}
    train = torch.from_numpy(np.fromfile(a.data + "/train.bin", dtype=np.uint16).astype(np.int32)).to(dev)
    val = torch.from_numpy(np.fromfile(a.data + "/val.bin", dtype=np.uint16).astype(np.int32)).to(dev)
    net = M.Net(c, dev, compile=not a.no_compile)
    ev = M.Net.__new__(M.Net)  # uncompiled twin over the same parameters, for odd shapes
    ev.__dict__.update(net.__dict__)
    ev.f_attn, ev.f_mlp, ev.f_moe, ev.tables = M.attn, M.dense_mlp, M.moe, {}
    comp = (lambda f: f) if a.no_compile else (lambda f: torch.compile(f, dynamic=False))
    if not a.no_compile:
        torch._dynamo.config.recompile_limit = 64
    f_ce, f_ce_logits, f_soft = comp(ce), comp(ce_logits), comp(soft_ce)
    P = net.P
    W = P["lm_head.weight"]
    ortho, adam = [], []
    for k, p in P.items():
        if not isinstance(p, torch.nn.Parameter):
            continue
        flat = (
            p.dim() == 1 or "embed_tokens" in k or "lm_head" in k or "mlp.gate.weight" in k or "indexer" in k
        )
        (adam if flat or a.adam_only else ortho).append((k, p))
    mo = MomentumOrtho([p for _, p in ortho]) if ortho else None
    if mo is not None:
        mo.orth = comp(orthogonalise)
    groups = [
        {"params": [p for _, p in adam if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in adam if p.dim() == 1], "weight_decay": 0.0},
    ]
    opt = torch.optim.AdamW(groups, lr=a.lr, betas=(0.9, 0.95), eps=1e-10, fused=dev == "cuda")
    biases = {int(k.split(".")[2]): v for k, v in P.items() if k.endswith("correction_bias")}
    params = [p for p in P.values() if isinstance(p, torch.nn.Parameter)]
    log("parameters", sum(v.numel() for v in P.values()), "train tokens", len(train))
    gen = torch.Generator(device=dev).manual_seed(1)
    topk = c["index_topk"]

    def losses(S, mode, steps, soft):
        B = a.tokens // S
        off = torch.randint(0, len(train) - S - 5, (B,), device=dev, generator=gen)
        t = train[off[:, None] + torch.arange(S + 4, device=dev)].long()
        h, kls, loads = net.main(t[:, :S], mode, topk)
        outs, kl2, load2 = net.mtp(h, t, steps, mode, topk)
        y = t[:, 1 : S + 1]
        if soft:
            lm, z = f_ce_logits(h, W, y)
            z = z.detach().view(B, S, -1)
            ml = []
            for j, o in enumerate(outs, 1):
                keep = (torch.arange(S, device=dev) < S - j).float().repeat(B)
                ml.append(f_soft(o, W.detach(), torch.roll(z, -j, 1).flatten(0, 1), keep))
        else:
            lm = f_ce(h, W, y)
            ml = [f_ce(o, W, t[:, j + 1 : j + 1 + S]) for j, o in enumerate(outs, 1)]
        kl = [x for x in kls + kl2 if x is not None]
        loss = lm + sum(w * x for w, x in zip(MTP_W, ml)) + (sum(kl) if kl else 0.0)
        return loss, lm, ml, kl, loads, load2, B

    # compile every phase before the clock starts
    for i, (_, S, mode, steps, soft) in enumerate(PHASES):
        if a.only_phase in (-1, i) and not a.no_compile:
            tw = time.time()
            losses(S, mode, steps, soft)[0].backward()
            for p in params:
                p.grad = None
            torch.cuda.synchronize()
            log(f"compiled phase {i} in {time.time() - tw:.1f}s")
    t0 = time.time()
    step, seen, phase, hist = 0, 0, -1, []
    while True:
        el = time.time() - t0
        pr = el / a.seconds
        if pr >= 1:
            break
        ph = a.only_phase if a.only_phase >= 0 else next(i for i, x in enumerate(PHASES) if pr < x[0])
        _, S, mode, steps, soft = PHASES[ph]
        if ph != phase:
            if phase >= 0:
                v = evaluate(ev, val, 512, "flash", topk)
                log(
                    f"-- end of phase {phase}: step {step} seen {seen / 1e6:.1f}M val(dense,512) {v[0]:.4f} mtp {v[1][0]:.4f} at {time.time() - t0:.0f}s"
                )
            phase = ph
        lr = a.lr * min(1, (step + 1) / 100) * (1.0 if pr < 0.40 else max(0.02, (1 - pr) / 0.60))
        loss, lm, ml, kl, loads, load2, B = losses(S, mode, steps, soft)
        loss.backward()
        if mo is None:
            torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        for g in opt.param_groups:
            g["lr"] = lr
        if mo is not None:
            mo.step(lr)
        opt.step()
        for p in params:
            p.grad = None
        with torch.no_grad():
            for i, ld in {**loads, **load2}.items():
                biases[i] += (2e-3 * lr / a.lr) * torch.sign(ld.mean() - ld)
        step += 1
        seen += B * S
        if step % 100 == 0 or step in (1, 5, 20, 50):
            d = {
                "step": step,
                "s": round(time.time() - t0, 1),
                "M": round(seen / 1e6, 1),
                "phase": ph,
                "lr": round(lr, 6),
                "lm": round(lm.item(), 4),
                "mtp": [round(x.item(), 4) for x in ml],
                "kl": round(sum(kl).item() / len(kl), 4) if kl else None,
            }
            if loads:
                ld = next(iter(loads.values()))
                d["load"] = round((ld.max() / ld.mean()).item(), 2)
            hist.append(d)
            log(json.dumps(d))
    log(
        f"trained {step} steps, {seen / 1e6:.1f}M tokens in {time.time() - t0:.0f}s, {seen / (time.time() - t0) / 1e3:.0f}k tok/s; peak GB {torch.cuda.max_memory_allocated() / 1e9 if dev == 'cuda' else 0:.1f}"
    )
    os.makedirs(a.out, exist_ok=True)
    from safetensors.torch import save_file

    state = M.export_state(P, c)
    names, shards, cur, size = list(state), [], {}, 0
    for k in names:
        b = state[k].numel() * state[k].element_size()
        if size + b > 14.5e6:
            shards.append(cur)
            cur, size = {}, 0
        cur[k] = state[k]
        size += b
    shards.append(cur)
    index = {
        "metadata": {"total_size": sum(v.numel() * v.element_size() for v in state.values())},
        "weight_map": {},
    }
    for i, s in enumerate(shards):
        fn = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(s, f"{a.out}/{fn}", metadata={"format": "pt"})
        index["weight_map"].update({k: fn for k in s})
    json.dump(index, open(a.out + "/model.safetensors.index.json", "w"), indent=1)
    json.dump(M.hf_config(c), open(a.out + "/config.json", "w"), indent=2)
    res = {
        "steps": step,
        "tokens": seen,
        "seconds": round(time.time() - t0, 1),
        "parameters": sum(v.numel() for v in P.values()),
        "history": hist,
    }
    json.dump(res, open(a.out + "/result.json", "w"))
    if a.no_final:
        return
    # measured on the rounded (bf16) weights
    with torch.no_grad():
        for k, p in P.items():
            if isinstance(p, torch.nn.Parameter):
                p.copy_(p.to(torch.bfloat16).float())
    T1 = time.time()
    res["val"] = {}
    for S in (512, 1024, 2048):
        B = 16384 // S
        res["val"][f"{S}/dense"] = evaluate(ev, val, S, "flash", 64, 4, B)[0]
        for k in (32, 64, 128, 256):
            v = evaluate(ev, val, S, "sparse_eval", k, 4, B, steps=3 if k == 64 else 1)
            res["val"][f"{S}/top{k}"] = v[0]
            if k == 64:
                res["val"][f"{S}/top64/mtp"] = v[1]
    res["mtp_on_held_out_text"] = agreement(ev, val, 512, c["index_topk"])
    log(json.dumps(res["val"], indent=1), json.dumps(res["mtp_on_held_out_text"]))
    json.dump(res, open(a.out + "/result.json", "w"))
    from tokenizers import Tokenizer

    tok = Tokenizer.from_file(a.data + "/tokenizer/tokenizer.json")
    pj = json.load(open(a.data + "/val_prompts.json"))
    text = [[0] + tok.encode(d, add_special_tokens=False).ids[:96] for _, d in pj["text"]]
    text = [p for p in text if len(p) == 97][:128]
    chat = [[0, 4] + tok.encode(q, add_special_tokens=False).ids + [5] for q, _ in pj["chat"]][:128]
    demo = [
        [0] + tok.encode(x, add_special_tokens=False).ids
        for x in (
            "The history of",
            "Once upon a time",
            "Python is a programming language that",
            "It is a truth universally acknowledged, that",
            "The function returns",
            "In the beginning",
        )
    ]
    demoq = [
        [0, 4] + tok.encode(q, add_special_tokens=False).ids + [5]
        for q in (
            "Hello!",
            "What is the capital of France?",
            "What is a dog?",
            "Where is Japan?",
            "What does happy mean?",
            "What languages are spoken in Brazil?",
            "Who are you?",
            "Tell me about Egypt.",
            "What is the currency of India?",
            "What is a database?",
        )
    ]
    res["accept"], res["samples"] = {}, {}
    for name, pr, new in (
        ("text", text, 128),
        ("chat", chat, 48),
        ("demo", demo, 100),
        ("demo_chat", demoq, 60),
    ):
        seq, start, lens = greedy(ev, pr, new, c["index_topk"])
        for k in (1, 2, 3):
            res["accept"][f"{name}/k{k}"] = acceptance(ev, seq, start, lens, c["index_topk"], k)
        res["accept"][f"{name}/k3/pre_norm_chain"] = acceptance(
            ev, seq, start, lens, c["index_topk"], 3, post_norm=False
        )
        res["samples"][name] = [
            (
                tok.decode(pr[i], skip_special_tokens=False),
                tok.decode(seq[i, int(start[i]) : int(lens[i])].tolist(), skip_special_tokens=False),
            )
            for i in range(min(12, len(pr)))
        ]
        log(name, json.dumps({k: v for k, v in res["accept"].items() if k.startswith(name + "/")}))
        for x in res["samples"][name][:10]:
            log("  >", x[0][-200:], "|||", x[1])
    log(f"final evaluation {time.time() - T1:.0f}s")
    json.dump(res, open(a.out + "/result.json", "w"), ensure_ascii=False)


if __name__ == "__main__":
    main()
