"""transformers, float32 eager, as the reference; it tells where an indexer near-tie decides.

Where the last key kept and the first dropped differ by less than float32 resolves, another summation order
keeps another key, and logits then differ by 0.1 to 1. Such positions and what follows them prove nothing.
"""

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

NEAR_TIE = 3e-6


class Reference:
    """Runs whole sequences without a cache. Exact ties are patched to the lower position, as the contract
    says (torch.topk leaves them open)."""

    def __init__(self, path: Path) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.path = path
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",  # the grouped product takes no widths of odd bytes
        ).eval()
        self.config = self.model.config
        self._gaps: list[Tensor] = []
        self._watch(self.model)

    def _watch(self, module: torch.nn.Module) -> None:
        plain = torch.Tensor.topk

        def topk(scores: Tensor, k: int, dim: int) -> torch.return_types.topk:
            ordered = (scores + 0.0).sort(dim=dim, descending=True, stable=True)
            if scores.shape[-1] > k:
                gap = ordered.values[0, :, k - 1] - ordered.values[0, :, k]
                decided = (gap == 0) | (ordered.values[0, :, k] < -1e30)
                self._gaps.append(gap.masked_fill(decided, torch.inf))
            return torch.return_types.topk((ordered.values[..., :k], ordered.indices[..., :k]))

        for name, part in module.named_modules():
            if name.endswith("self_attn.indexer"):
                part.register_forward_pre_hook(lambda *_: setattr(torch.Tensor, "topk", topk))
                part.register_forward_hook(lambda *_: setattr(torch.Tensor, "topk", plain), always_call=True)

    def _take_first_near_tie(self, num_rows: int) -> int:
        gaps, self._gaps = self._gaps, []
        near = torch.stack(gaps).amin(0) < NEAR_TIE if gaps else torch.zeros(num_rows, dtype=torch.bool)
        return int(near.nonzero()[0]) if bool(near.any()) else num_rows

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int]) -> tuple[Tensor, int]:
        """[n, V] and the number of leading positions that no near-tie decides."""
        logits = self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return logits, self._take_first_near_tie(len(token_ids))

    @torch.no_grad()
    def hidden(self, token_ids: Sequence[int]) -> tuple[Tensor, int]:
        """h [n, hidden] after the final norm, and the same number."""
        h = self.model.model(torch.tensor([list(token_ids)]), use_cache=False).last_hidden_state[0]
        return h, self._take_first_near_tie(len(token_ids))

    def follow_the_config_in_latent_norms(self) -> None:
        """transformers gives q_a_layernorm and kv_a_layernorm eps 1e-6 whatever the config says.

        Released code and vLLM follow the config, and so does this project.
        """
        for layer in self.model.model.layers:
            set_latent_eps(layer, self.config.rms_norm_eps)


def set_latent_eps(layer: torch.nn.Module, eps: float) -> None:
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        norm = getattr(layer.self_attn, name)
        if norm is not None:
            norm.variance_epsilon = eps


class MtpReference:
    """The first MTP layer, put together from the decoder layer class of transformers."""

    def __init__(self, reference: Reference) -> None:
        base = reference.model.model
        layer = reference.config.num_hidden_layers
        config = copy.deepcopy(reference.config)
        config.num_hidden_layers = layer + 1
        if hasattr(config, "mlp_layer_types"):
            config.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
        if hasattr(config, "indexer_types"):
            config.indexer_types = [*config.indexer_types, "full"]
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        self.reference = reference
        self.rotary = base.rotary_emb
        self.block = type(base.layers[-1])(config, layer).eval()
        norm = type(base.norm)
        self.enorm, self.hnorm, self.head_norm = (
            norm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.eh_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        tensors = _tensors_under(reference.path, f"model.layers.{layer}.")
        for own, module in {
            "enorm": self.enorm,
            "hnorm": self.hnorm,
            "eh_proj": self.eh_proj,
            "shared_head.norm": self.head_norm,
        }.items():
            module.weight.data = tensors.pop(f"{own}.weight")
        experts = [
            {part: tensors.pop(f"mlp.experts.{e}.{part}_proj.weight") for part in ("gate", "up", "down")}
            for e in range(config.n_routed_experts)
        ]
        tensors["mlp.experts.gate_up_proj"] = torch.stack([torch.cat((e["gate"], e["up"])) for e in experts])
        tensors["mlp.experts.down_proj"] = torch.stack([e["down"] for e in experts])
        self.block.load_state_dict(tensors)
        holder = torch.nn.Module()
        holder.block = self.block
        reference._watch(holder)

    @torch.no_grad()
    def __call__(self, token_ids: Sequence[int], prev_hidden: Tensor) -> tuple[Tensor, int]:
        """z [n, hidden] of rows at positions 1..n, row i from token_ids[i] and prev_hidden[i]."""
        embedding = self.reference.model.model.embed_tokens(torch.tensor([list(token_ids)]))
        x = self.eh_proj(torch.cat((self.enorm(embedding), self.hnorm(prev_hidden[None])), dim=-1))
        n = len(token_ids)
        positions = torch.arange(1, n + 1)[None]
        mask = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)[None, None]
        z = self.block(
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.rotary(x, positions),
        )
        z = z[0] if isinstance(z, tuple) else z
        return self.head_norm(z)[0], self.reference._take_first_near_tie(n)


def _tensors_under(path: Path, prefix: str) -> dict[str, Tensor]:
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name.startswith(prefix):
                found[name[len(prefix) :]] = tensor.float()
    return found


def held_out_texts(path: Path) -> list[str]:
    return [text for _, text in json.loads((path / "heldout_prompts.json").read_text())["text"]]
