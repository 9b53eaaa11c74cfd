"""The models in float64, one formula of docs/contracts/numerics.md after the other; no code of this project.

No cache, no absorption, no batching: whole sequences, attention over masks. Slow and plain: the reference for
what transformers does not have (MTP modules of the sparse families) and where float32 leaves ties open.
Shapes: n tokens, H heads; matrices as the checkpoint stores them, [out, in].
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.tiny_models import full_layers


class NaiveModel:
    """Logits, states and MTP states of whole sequences."""

    def __init__(self, path: Path) -> None:
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        self.w: dict[str, Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            self.w.update({name: tensor.double() for name, tensor in load_file(file).items()})
        self.is_full = full_layers(self.config)

    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        """h [n, hidden], after the final norm."""
        x = self.w["model.embed_tokens.weight"][list(token_ids)]
        positions = torch.arange(len(x))
        kept: Tensor | None = None
        for i in range(self.config["num_hidden_layers"]):
            x, kept = self._layer(f"model.layers.{i}.", x, positions, kept, dense_mlp=self._is_dense(i))
        return self._rms(x, "model.norm.weight")

    def logits(self, h: Tensor) -> Tensor:
        head = "model.embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"
        return h @ self.w[head].T

    def mtp(self, module: int, token_ids: Sequence[int], previous: Tensor, first_position: int) -> Tensor:
        """z [n, hidden]: row i takes token_ids[i], at first_position + i, and state previous[i]."""
        prefix = f"model.layers.{self.config['num_hidden_layers'] + module}."
        embedding = self._rms(self.w["model.embed_tokens.weight"][list(token_ids)], f"{prefix}enorm.weight")
        entrance = torch.cat((embedding, self._rms(previous, f"{prefix}hnorm.weight")), dim=-1)
        x = entrance @ self.w[f"{prefix}eh_proj.weight"].T
        positions = first_position + torch.arange(len(x))
        x, _ = self._layer(prefix, x, positions, None, dense_mlp=False)
        return self._rms(x, f"{prefix}shared_head.norm.weight")

    def greedy_drafts(
        self, token_ids: Sequence[int], num_drafts: int, hidden: Tensor | None = None, *, mtp_from: int = 1
    ) -> list[int]:
        """What follows token_ids by the MTP modules alone: draft i from module i modulo their number.

        The row of module j at position p takes t[p] and the state at p-1: of module j-1, or of the target.
        A module that is used again keeps the rows that it had, and adds one for each module from the states
        of the module before it. `hidden` are the states of all but the last token, where they are known.
        `mtp_from` is the first position of module 0, j positions before that of module j.
        """
        ids = list(token_ids)
        num_modules = self.config["num_nextn_predict_layers"]
        state = (self.hidden(ids[:-1]) if hidden is None else hidden)[mtp_from - 1 :]
        inputs: list[Tensor] = []
        drafts: list[int] = []
        for i in range(num_drafts):
            module = i % num_modules
            if i < num_modules:
                inputs.append(state)
            else:
                inputs[module] = torch.cat((inputs[module], state[-num_modules:]))
            first = mtp_from + module
            state = self.mtp(module, ids[first:], inputs[module], first)
            drafts.append(int(self.logits(state[-1]).argmax()))
            ids.append(drafts[-1])
        return drafts

    def _is_dense(self, layer: int) -> bool:
        return bool(layer < self.config["first_k_dense_replace"])

    def _layer(
        self, prefix: str, x: Tensor, positions: Tensor, kept: Tensor | None, *, dense_mlp: bool
    ) -> tuple[Tensor, Tensor | None]:
        out, kept = self._attention(
            f"{prefix}self_attn.", self._rms(x, f"{prefix}input_layernorm.weight"), positions, kept
        )
        x = x + out
        y = self._rms(x, f"{prefix}post_attention_layernorm.weight")
        return x + (self._mlp(f"{prefix}mlp.", y) if dense_mlp else self._moe(f"{prefix}mlp.", y)), kept

    def _attention(
        self, prefix: str, x: Tensor, positions: Tensor, kept: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        c, n = self.config, len(x)
        heads, nope, rope = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        if c["q_lora_rank"] is None:
            query = x @ self.w[f"{prefix}q_proj.weight"].T
        else:
            latent_q = self._rms(x @ self.w[f"{prefix}q_a_proj.weight"].T, f"{prefix}q_a_layernorm.weight")
            query = latent_q @ self.w[f"{prefix}q_b_proj.weight"].T
        query = query.view(n, heads, nope + rope)
        down = x @ self.w[f"{prefix}kv_a_proj_with_mqa.weight"].T
        latent = self._rms(down[:, : c["kv_lora_rank"]], f"{prefix}kv_a_layernorm.weight")
        interleaved = c.get("rope_interleave", True)
        k_rope = self._rope(down[:, c["kv_lora_rank"] :], positions, interleaved)
        q_rope = self._rope(query[..., nope:], positions, interleaved)
        kv = (latent @ self.w[f"{prefix}kv_b_proj.weight"].T).view(n, heads, nope + c["v_head_dim"])
        scores = torch.einsum("qhd,khd->hqk", query[..., :nope], kv[..., :nope])
        scores = (scores + torch.einsum("qhd,kd->hqk", q_rope, k_rope)) * self._score_scale()
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        if f"{prefix}indexer.wk.weight" in self.w:
            kept = self._select(f"{prefix}indexer.", x, latent_q, positions, causal)
        mask = causal if kept is None else kept
        p = scores.masked_fill(~mask, -math.inf).softmax(-1)
        out = torch.einsum("hqk,khv->qhv", p, kv[..., nope:]).flatten(1)
        return out @ self.w[f"{prefix}o_proj.weight"].T, kept

    def _select(self, prefix: str, x: Tensor, latent_q: Tensor, positions: Tensor, causal: Tensor) -> Tensor:
        """[n, n] bool: the index_topk visible keys of the highest score, ties to the lower position."""
        c, n = self.config, len(x)
        heads, dim, rope = c["index_n_heads"], c["index_head_dim"], c["qk_rope_head_dim"]
        interleaved = c["model_type"] == "glm_moe_dsa"
        q = (latent_q @ self.w[f"{prefix}wq_b.weight"].T).view(n, heads, dim)
        k = x @ self.w[f"{prefix}wk.weight"].T
        k = torch.nn.functional.layer_norm(
            k, (dim,), self.w[f"{prefix}k_norm.weight"], self.w[f"{prefix}k_norm.bias"], 1e-6
        )
        q = torch.cat((self._rope(q[..., :rope], positions, interleaved), q[..., rope:]), dim=-1)
        k = torch.cat((self._rope(k[..., :rope], positions, interleaved), k[..., rope:]), dim=-1)
        weights = (x @ self.w[f"{prefix}weights_proj.weight"].T) * heads**-0.5
        score = torch.einsum("qh,qhk->qk", weights, (torch.einsum("qhd,kd->qhk", q, k) * dim**-0.5).relu())
        score = (score + 0.0).masked_fill(~causal, -math.inf)  # -0.0 + 0.0 is 0.0: they are equal
        order = score.sort(dim=-1, descending=True, stable=True).indices
        kept = torch.zeros_like(causal).scatter(1, order[:, : c["index_topk"]], True)
        return kept & causal

    def _mlp(self, prefix: str, x: Tensor) -> Tensor:
        gate, up, down = (self.w[f"{prefix}{part}_proj.weight"].T for part in ("gate", "up", "down"))
        g = x @ gate
        return (g * torch.sigmoid(g) * (x @ up)) @ down

    def _moe(self, prefix: str, x: Tensor) -> Tensor:
        c = self.config
        p = torch.sigmoid(x @ self.w[f"{prefix}gate.weight"].T)
        biased = p + self.w[f"{prefix}gate.e_score_correction_bias"]
        groups = biased.view(len(x), c["n_group"], -1)
        best = groups.sort(dim=-1, descending=True).values[..., :2].sum(-1).argsort(dim=-1, descending=True)
        is_kept = torch.zeros_like(groups, dtype=torch.bool)
        for t, chosen in enumerate(best[:, : c["topk_group"]].tolist()):
            is_kept[t, chosen] = True
        ranked = biased.masked_fill(~is_kept.flatten(1), -math.inf).argsort(dim=-1, descending=True)
        experts = ranked[:, : c["num_experts_per_tok"]]
        weights = p.gather(1, experts)
        if c["norm_topk_prob"]:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = torch.zeros_like(p).scatter(1, experts, weights * c["routed_scaling_factor"])
        outputs = [self._mlp(f"{prefix}experts.{e}.", x) for e in range(c["n_routed_experts"])]
        routed = torch.einsum("te,etd->td", weights, torch.stack(outputs))
        return routed + self._mlp(f"{prefix}shared_experts.", x) if c["n_shared_experts"] else routed

    def _rms(self, x: Tensor, name: str) -> Tensor:
        return self.w[name] * x / (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()

    def _rope(self, x: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
        """x [n, ..., R]: pair j turned by position * frequency j, pairs (2j, 2j+1) or (j, j + R/2)."""
        frequencies, factor = self._frequencies()
        shape = [len(x)] + [1] * (x.dim() - 2) + [len(frequencies)]
        angles = (positions[:, None] * frequencies).view(shape)
        half = x.shape[-1] // 2
        a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
        turned = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
        if interleaved:
            return torch.stack(turned, dim=-1).flatten(-2) * factor
        return torch.cat(turned, dim=-1) * factor

    def _rope_fields(self) -> dict[str, Any]:
        c = self.config
        nested = c.get("rope_scaling") or c.get("rope_parameters") or {}
        return {"rope_theta": c.get("rope_theta"), **nested}

    def _frequencies(self) -> tuple[Tensor, float]:
        fields, dim = self._rope_fields(), self.config["qk_rope_head_dim"]
        theta = fields["rope_theta"]
        plain = [theta ** (-2 * j / dim) for j in range(dim // 2)]
        if fields.get("rope_type", fields.get("type", "default")) == "default":
            return torch.tensor(plain, dtype=torch.float64), 1.0
        length, factor = fields["original_max_position_embeddings"], fields["factor"]

        def border(turns: float) -> float:
            return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = border(fields.get("beta_fast", 32)), border(fields.get("beta_slow", 1))
        if fields.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        shares = [min(max((j - low) / (high - low), 0), 1) for j in range(dim // 2)]
        mixed = [f / factor * s + f * (1 - s) for f, s in zip(plain, shares, strict=True)]
        return torch.tensor(mixed, dtype=torch.float64), self._embedding_factor(fields)

    def _embedding_factor(self, fields: dict[str, Any]) -> float:
        if fields.get("attention_factor") is not None:
            return float(fields["attention_factor"])
        m, m_all = fields.get("mscale"), fields.get("mscale_all_dim")
        if m and m_all:
            return _m(fields["factor"], m) / _m(fields["factor"], m_all)
        return _m(fields["factor"], 1)

    def _score_scale(self) -> float:
        c, fields = self.config, self._rope_fields()
        scale = float((c["qk_nope_head_dim"] + c["qk_rope_head_dim"]) ** -0.5)
        m_all = fields.get("mscale_all_dim")
        return scale * _m(fields["factor"], m_all) ** 2 if m_all else scale


def _m(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1
