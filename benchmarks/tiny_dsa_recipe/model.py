"""Training model of the tiny DSA + MTP checkpoint: plain torch functions over a flat dict of parameters.

Parameter names are those of the Hugging Face checkpoint (DeepseekV32ForCausalLM), except that a layer's
routed experts are held stacked (`mlp.experts.gate_w/up_w/down_w`) until export.  Attention is computed
in full with a mask; the sparsity of DSA is real in its arithmetic, not in its cost.
"""

import math

import torch
import torch.nn.functional as F

CFG = dict(
    vocab_size=6144,
    hidden_size=256,
    intermediate_size=1024,
    moe_intermediate_size=192,
    num_hidden_layers=6,
    num_nextn_predict_layers=1,
    num_attention_heads=8,
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=32,
    first_k_dense_replace=1,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.5,
    index_n_heads=4,
    index_head_dim=64,
    index_topk=64,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=2048,
)
BF = torch.bfloat16


def init_params(c, device, seed=0):
    g = torch.Generator(device="cpu").manual_seed(seed)
    P = {}

    def w(name, *shape, std=None):
        std = std if std is not None else 1.0 / math.sqrt(shape[-1])
        P[name] = torch.randn(*shape, generator=g) * std

    H, A, E, I = c["hidden_size"], c["num_attention_heads"], c["n_routed_experts"], c["moe_intermediate_size"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    n = c["num_hidden_layers"]
    w("model.embed_tokens.weight", c["vocab_size"], H, std=0.02)
    w("lm_head.weight", c["vocab_size"], H, std=0.02)
    P["model.norm.weight"] = torch.ones(H)
    for i in range(n + c["num_nextn_predict_layers"]):
        p = f"model.layers.{i}."
        a = p + "self_attn."
        P[p + "input_layernorm.weight"] = torch.ones(H)
        P[p + "post_attention_layernorm.weight"] = torch.ones(H)
        w(a + "q_a_proj.weight", c["q_lora_rank"], H)
        P[a + "q_a_layernorm.weight"] = torch.ones(c["q_lora_rank"])
        w(a + "q_b_proj.weight", A * (nope + rope), c["q_lora_rank"])
        w(a + "kv_a_proj_with_mqa.weight", c["kv_lora_rank"] + rope, H)
        P[a + "kv_a_layernorm.weight"] = torch.ones(c["kv_lora_rank"])
        w(a + "kv_b_proj.weight", A * (nope + v), c["kv_lora_rank"])
        w(a + "o_proj.weight", H, A * v, std=0.5 / math.sqrt(A * v * n))
        w(a + "indexer.wq_b.weight", c["index_n_heads"] * c["index_head_dim"], c["q_lora_rank"])
        w(a + "indexer.wk.weight", c["index_head_dim"], H)
        P[a + "indexer.k_norm.weight"] = torch.ones(c["index_head_dim"])
        P[a + "indexer.k_norm.bias"] = torch.zeros(c["index_head_dim"])
        w(a + "indexer.weights_proj.weight", c["index_n_heads"], H)
        m = p + "mlp."
        if i < c["first_k_dense_replace"]:
            D = c["intermediate_size"]
            w(m + "gate_proj.weight", D, H)
            w(m + "up_proj.weight", D, H)
            w(m + "down_proj.weight", H, D, std=0.5 / math.sqrt(D * n))
        else:
            w(m + "gate.weight", E, H)
            P[m + "gate.e_score_correction_bias"] = torch.zeros(E)
            w(m + "experts.gate_w", E, I, H)
            w(m + "experts.up_w", E, I, H)
            w(m + "experts.down_w", E, H, I, std=0.5 / math.sqrt(I * n))
            S = I * c["n_shared_experts"]
            w(m + "shared_experts.gate_proj.weight", S, H)
            w(m + "shared_experts.up_proj.weight", S, H)
            w(m + "shared_experts.down_proj.weight", H, S, std=0.5 / math.sqrt(S * n))
        if i >= n:
            P[p + "enorm.weight"] = torch.ones(H)
            P[p + "hnorm.weight"] = torch.ones(H)
            w(p + "eh_proj.weight", H, 2 * H)
            P[p + "shared_head.norm.weight"] = torch.ones(H)
    out = {}
    for k, t in P.items():
        t = t.to(device)
        out[k] = t if k.endswith("correction_bias") else torch.nn.Parameter(t)
    return out


def layer_params(P, c):
    """[(attention dict, mlp dict, extra dict)] with short names, one entry a layer (the last is MTP)."""
    L = []
    for i in range(c["num_hidden_layers"] + c["num_nextn_predict_layers"]):
        p = f"model.layers.{i}."
        d = {k[len(p) :]: v for k, v in P.items() if k.startswith(p)}
        at = {
            k.removeprefix("self_attn.").removesuffix(".weight"): v
            for k, v in d.items()
            if k.startswith("self_attn.")
        }
        at["ln"] = d["input_layernorm.weight"]
        ml = {k.removeprefix("mlp.").removesuffix(".weight"): v for k, v in d.items() if k.startswith("mlp.")}
        ml["ln"] = d["post_attention_layernorm.weight"]
        ex = {
            k.removesuffix(".weight"): v
            for k, v in d.items()
            if k.split(".")[0] in ("enorm", "hnorm", "eh_proj", "shared_head")
        }
        L.append((at, ml, ex))
    return L


def rms(x, w, eps=1e-6):
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w).to(BF)


def lin(x, w):
    return F.linear(x, w.to(BF))


def rope_tables(c, S, device, offset=0):
    d = c["qk_rope_head_dim"]
    f = c["rope_theta"] ** (-torch.arange(0, d, 2, device=device).float() / d)
    a = (torch.arange(S, device=device).float() + offset)[:, None] * f
    return a.cos(), a.sin()


def rope_pairs(x, cos, sin):
    """Interleaved pairs (main attention).  x [B, S, n, d]."""
    x = x.float().unflatten(-1, (-1, 2))
    a, b = x[..., 0], x[..., 1]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(BF)


def rope_halves(x, cos, sin):
    """Half-split pairs (indexer)."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(BF)


NEG = -1e9


def attn(x, W, cos, sin, c, mode, topk, kv1=None, extras=()):
    """One attention sub-layer.  x [B, S, H] float32.

    mode: 'flash' dense, no indexer; 'dense' dense + indexer KL; 'sparse' top-k + KL on the chosen set;
    'sparse_eval' / 'dense_eval' without KL.
    kv1, extras: for MTP step j > 1, the keys of step 1 (all positions) and of the chain's own steps
    2..j-1 (one entry a query).  Returns (x + out, (k, v, index k), KL or None).
    """
    B, S, _ = x.shape
    A, nope, rope, vd = (
        c["num_attention_heads"],
        c["qk_nope_head_dim"],
        c["qk_rope_head_dim"],
        c["v_head_dim"],
    )
    h = rms(x, W["ln"])
    qr = rms(lin(h, W["q_a_proj"]), W["q_a_layernorm"])
    q = lin(qr, W["q_b_proj"]).view(B, S, A, nope + rope)
    q = torch.cat([q[..., :nope], rope_pairs(q[..., nope:], cos, sin)], -1).transpose(1, 2)
    ckv, kr = lin(h, W["kv_a_proj_with_mqa"]).split([c["kv_lora_rank"], rope], -1)
    kv = lin(rms(ckv, W["kv_a_layernorm"]), W["kv_b_proj"]).view(B, S, A, nope + vd)
    kr = rope_pairs(kr.unsqueeze(2), cos, sin).expand(B, S, A, rope)
    k = torch.cat([kv[..., :nope], kr], -1).transpose(1, 2)
    v = kv[..., nope:].transpose(1, 2)
    scale = (nope + rope) ** -0.5
    kl = None
    if mode == "flash":
        o = F.scaled_dot_product_attention(
            q, k, F.pad(v, (0, nope + rope - vd)), is_causal=True, scale=scale
        )[..., :vd]
        ki = None
    else:
        Hn, D = c["index_n_heads"], c["index_head_dim"]
        hd, qd = h.detach(), qr.detach()
        qi = lin(qd, W["indexer.wq_b"]).view(B, S, Hn, D)
        qi = torch.cat([rope_halves(qi[..., :rope], cos, sin), qi[..., rope:]], -1).transpose(1, 2)
        ki = F.layer_norm(
            lin(hd, W["indexer.wk"]).float(), (D,), W["indexer.k_norm"], W["indexer.k_norm.bias"], 1e-6
        ).to(BF)
        ki = torch.cat([rope_halves(ki[..., :rope].unsqueeze(2), cos, sin).squeeze(2), ki[..., rope:]], -1)
        wi = lin(hd, W["indexer.weights_proj"]).float() * (Hn**-0.5 * D**-0.5)
        K, V, KI = (k, v, ki) if kv1 is None else kv1
        own = () if kv1 is None else tuple(extras) + ((k, v, ki),)
        si = torch.matmul(qi, KI.transpose(-1, -2).unsqueeze(1))
        idx = (F.relu(si).float() * wi.transpose(1, 2).unsqueeze(-1)).sum(1)  # [B, S, S]
        causal = torch.ones(S, S, dtype=torch.bool, device=x.device).tril()
        idx = torch.where(causal, idx, NEG)
        idx_own = [
            (F.relu((qi * e[2].unsqueeze(1)).float().sum(-1)) * wi.transpose(1, 2)).sum(1) for e in own
        ]  # [B, S] each
        mask, mask_own = causal, None
        if mode.startswith("sparse"):
            full = torch.cat([idx] + [e.unsqueeze(-1) for e in idx_own], -1).detach() if own else idx.detach()
            sel = torch.zeros(full.shape, dtype=torch.bool, device=x.device)
            sel = sel.scatter(-1, full.topk(min(topk, full.shape[-1]), -1, sorted=False).indices, True)
            mask = sel[..., :S] & causal
            mask_own = sel[..., S:]
            mask = mask.unsqueeze(1)
        s = torch.matmul(q, K.transpose(-1, -2)).float() * scale
        s = torch.where(mask, s, NEG)
        lse = torch.logsumexp(s, -1)
        s_own = []
        for m, e in enumerate(own):
            t = (q * e[0]).float().sum(-1) * scale
            if mask_own is not None:
                t = torch.where(mask_own[..., m].unsqueeze(1), t, NEG)
            s_own.append(t)
            lse = torch.logaddexp(lse, t)
        p = torch.exp(s - lse.unsqueeze(-1))
        o = torch.matmul(p.to(BF), V)
        for t, e in zip(s_own, own):
            o = o + (torch.exp(t - lse).unsqueeze(-1) * e[1]).to(BF)
        if mode in ("dense", "sparse") and kv1 is None:
            target = p.detach().mean(1)
            li = torch.where(mask if mode == "dense" else mask.squeeze(1), idx, NEG)
            li = li - torch.logsumexp(li, -1, keepdim=True)
            kl = (target * (torch.log(target + 1e-9) - li)).sum(-1).mean()
    o = lin(o.transpose(1, 2).reshape(B, S, A * vd), W["o_proj"])
    return x + o, (k, v, ki), kl


def dense_mlp(x, W):
    h = rms(x, W["ln"])
    return x + lin(F.silu(lin(h, W["gate_proj"])) * lin(h, W["up_proj"]), W["down_proj"])


def moe(x, W, c):
    """All experts are computed and weighted (zero where not routed): at this size that beats gathering."""
    B, S, H = x.shape
    E, G, k = c["n_routed_experts"], c["n_group"], c["num_experts_per_tok"]
    h = rms(x, W["ln"]).view(B * S, H)
    sc = torch.sigmoid(h.float() @ W["gate"].float().t())
    with torch.no_grad():
        ch = sc + W["gate.e_score_correction_bias"]
        gs = ch.view(-1, G, E // G).topk(2, -1).values.sum(-1)
        gm = torch.zeros_like(gs).scatter(1, gs.topk(c["topk_group"], -1).indices, 1.0)
        ch = torch.where(gm.repeat_interleave(E // G, 1) > 0, ch, float("-inf"))
        m = torch.zeros_like(sc).scatter(1, ch.topk(k, -1).indices, 1.0)
    w = sc * m
    w = w / (w.sum(-1, keepdim=True) + 1e-20) * c["routed_scaling_factor"]
    I = W["experts.gate_w"].shape[1]
    a = F.silu(lin(h, W["experts.gate_w"].flatten(0, 1))) * lin(h, W["experts.up_w"].flatten(0, 1))
    a = (a.view(-1, E, I) * w.unsqueeze(-1).to(BF)).view(-1, E * I)
    y = lin(a, W["experts.down_w"].transpose(0, 1).reshape(H, E * I))
    s = lin(
        F.silu(lin(h, W["shared_experts.gate_proj"])) * lin(h, W["shared_experts.up_proj"]),
        W["shared_experts.down_proj"],
    )
    return x + (y + s).view(B, S, H), m.sum(0)


def eh(h, e, W):
    """MTP input: embedding first, hidden state second, as in the released checkpoints."""
    return lin(torch.cat([rms(e, W["enorm"]), rms(h, W["hnorm"])], -1), W["eh_proj"]).float()


class Net:
    def __init__(self, c, device, compile=False, seed=0):
        self.c, self.device = c, device
        self.P = init_params(c, device, seed)
        self.L = layer_params(self.P, c)
        self.f_attn, self.f_mlp, self.f_moe = attn, dense_mlp, moe
        self.tables = {}
        if compile:
            kw = dict(dynamic=False)
            self.f_attn = torch.compile(attn, **kw)
            self.f_mlp = torch.compile(dense_mlp, **kw)
            self.f_moe = torch.compile(moe, **kw)

    def rope(self, S, off=0):
        if (S, off) not in self.tables:
            self.tables[(S, off)] = rope_tables(self.c, S, self.device, off)
        return self.tables[(S, off)]

    def block(self, i, x, rope, mode, topk, kv1=None, extras=()):
        at, ml, _ = self.L[i]
        x, kv, kl = self.f_attn(x, at, rope[0], rope[1], self.c, mode, topk, kv1, extras)
        if "gate" in ml:
            x, load = self.f_moe(x, ml, self.c)
        else:
            x, load = self.f_mlp(x, ml), None
        return x, kv, kl, load

    def main(self, ids, mode, topk):
        """Final-norm hidden states [B, S, H] (bf16), KL terms, expert loads."""
        S = ids.shape[1]
        x = F.embedding(ids, self.P["model.embed_tokens.weight"])
        kls, loads = [], {}
        for i in range(self.c["num_hidden_layers"]):
            x, _, kl, load = self.block(i, x, self.rope(S), mode, topk)
            kls.append(kl)
            if load is not None:
                loads[i] = load
        return rms(x, self.P["model.norm.weight"]), kls, loads

    def mtp(self, h, tokens, steps, mode, topk, post_norm=True):
        """The one MTP layer applied `steps` times.  tokens [B, S + steps]: the sequence itself; step j at
        index i reads token i + j and predicts token i + j + 1.  Yields head inputs (after shared_head.norm)."""
        n, S = self.c["num_hidden_layers"], h.shape[1]
        ex = self.L[n][2]
        outs, kv1, extras, kls, loads = [], None, (), [], {}
        for j in range(1, steps + 1):
            e = F.embedding(tokens[:, j : j + S], self.P["model.embed_tokens.weight"])
            x = eh(h, e, ex)
            x, kv, kl, load = self.block(n, x, self.rope(S, j - 1), mode, topk, kv1, extras)
            o = rms(x, ex["shared_head.norm"])
            outs.append(o)
            h = o if post_norm else x
            if j == 1:
                kv1 = kv
                kls.append(kl)
                loads[n] = load
            else:
                extras = extras + (kv,)
        return outs, kls, loads


def export_state(P, c):
    """Hugging Face checkpoint tensors (bf16; the router's bias float32)."""
    out = {}
    for k, v in P.items():
        v = v.detach().cpu()
        if ".experts." in k and not k.endswith(".weight"):
            base, name = k.rsplit(".", 1)
            hf = {"gate_w": "gate_proj", "up_w": "up_proj", "down_w": "down_proj"}[name]
            for e in range(v.shape[0]):
                out[f"{base}.{e}.{hf}.weight"] = v[e].to(BF).contiguous()
        elif k.endswith("correction_bias"):
            out[k] = v.float().contiguous()
        else:
            out[k] = v.to(BF).contiguous()
    return out


def hf_config(c):
    d = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
    d.update({k: v for k, v in c.items() if k != "rope_theta"})
    d.update(
        num_key_value_heads=c["num_attention_heads"],
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        moe_layer_freq=1,
        ep_size=1,
        hidden_act="silu",
        initializer_range=0.02,
        use_cache=True,
        tie_word_embeddings=False,
        rope_theta=c["rope_theta"],
        rope_scaling=None,
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        torch_dtype="bfloat16",
    )
    return d
