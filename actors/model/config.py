"""What config.json says about a model, checked once; the rest of the package trusts it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.model.config_fields import MAX_LENGTH, FieldReader
from actors.model.known_fields import refuse_unknown
from actors.model.model_folder import ModelFolder
from actors.model.quantization import read_block_size
from actors.model.rope_config import YarnScaling, read_rope
from kernels_integration.errors import CheckpointError, shown
from kernels_integration.kv_layout import KVLayout, default_indexer_kv_dtype

_MAX_LAYERS = 1024
"""Ten times what is released; every layer is built, without data, to know what it takes."""
_LAYER_TYPES = ("full_attention", "indexed_attention")
"""As transformers names layers without and with an indexer; which is which, `indexer_types` tells."""
_MAX_EXPERTS = 2**16
"""Of all layers: every one is named in lists, and releases have 25,000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a model_type says that config.json leaves out."""

    has_indexer: bool
    indexer_rope_interleave: bool = False
    """Unless `indexer_rope_interleave` says otherwise."""


FAMILIES: Mapping[str, Family] = {
    "deepseek_v3": Family(has_indexer=False),
    "deepseek_v32": Family(has_indexer=True),
    "glm_moe_dsa": Family(has_indexer=True, indexer_rope_interleave=True),
    "kimi_k2": Family(has_indexer=False),  # DeepSeek-V3 under another name
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a model; fields are named as in config.json, families differ only by their values."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    torch_dtype: str
    weight_block_size: tuple[int, int]
    """Rows and columns of an FP8 weight that share one scale; which tensors are FP8, their scales tell."""

    num_attention_heads: int
    q_lora_rank: int | None
    """None: queries come from the layer input by one projection."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float
    rope_scaling: YarnScaling | None
    rope_interleave: bool

    # 0, False and () without an indexer.
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_rope_interleave: bool
    indexer_types: tuple[str, ...]
    """Per main layer "full" or "shared"; see `runs_indexer`."""

    first_k_dense_replace: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mla_scale(self) -> float:
        """s in score = q . k * s."""
        scaling = self.rope_scaling
        return float(self.qk_head_dim**-0.5) * (scaling.score_factor if scaling is not None else 1.0)

    @property
    def max_model_len(self) -> int:
        """Positions that the rotary embedding was made for.

        YaRN extends the original length by its factor; max_position_embeddings may state either length.
        """
        scaling = self.rope_scaling
        if scaling is None:
            return self.max_position_embeddings
        extended = int(scaling.original_max_position_embeddings * scaling.factor)
        return max(self.max_position_embeddings, extended)

    @property
    def latent_dim(self) -> int:
        """Cached per token and layer: the normed latent c and the rotated k_rope."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def has_indexer(self) -> bool:
        return self.index_topk > 0

    @property
    def num_mtp_layers(self) -> int:
        return self.num_nextn_predict_layers

    def num_drafting_layers(self, num_speculative_tokens: int) -> int:
        """MTP layers that so many drafts use: draft i comes from layer i modulo their number."""
        return min(self.num_mtp_layers, num_speculative_tokens)

    def runs_indexer(self, layer: int) -> bool:
        """Whether a layer selects for itself; if not, it reuses the selection of the last one that did.

        MTP layers, numbered from num_hidden_layers on, always select for themselves.
        """
        return self.has_indexer and (layer >= self.num_hidden_layers or self.indexer_types[layer] == "full")

    def index_layers(self, num_layers: int) -> tuple[int, ...]:
        """Of the first `num_layers` layers of the cache, those that keep indexer keys."""
        return tuple(layer for layer in range(num_layers) if self.runs_indexer(layer))

    def kv_layout(self, kv_cache_dtype: str, indexer_kv_dtype: str | None = None) -> KVLayout:
        """What a token takes in the cache; indexer_kv_dtype None: what goes with kv_cache_dtype."""
        return KVLayout(
            kv_cache_dtype=kv_cache_dtype,
            indexer_kv_dtype=indexer_kv_dtype or default_indexer_kv_dtype(kv_cache_dtype),
            latent_rank=self.kv_lora_rank,
            rope_dim=self.qk_rope_head_dim,
            index_dim=self.index_head_dim if self.has_indexer else 0,
        )

    def kv_bytes_per_token(
        self, num_speculative_tokens: int, kv_cache_dtype: str, indexer_kv_dtype: str | None = None
    ) -> int:
        """Bytes that a token takes on the shard that keeps it, all layers together."""
        num_layers = self.num_hidden_layers + self.num_drafting_layers(num_speculative_tokens)
        layout = self.kv_layout(kv_cache_dtype, indexer_kv_dtype)
        return layout.bytes_per_token(num_layers, len(self.index_layers(num_layers)))

    def is_moe_layer(self, layer: int) -> bool:
        """MTP layers, numbered from num_hidden_layers on, always are."""
        return layer >= self.first_k_dense_replace

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "ModelConfig":
        """The config of the checkpoint directory `path`.

        Errors: CheckpointError: no such directory, no config.json, not JSON, a model_type or a feature that
        is not supported, fields that are missing, ill-typed or contradict each other (all of them at once).
        """
        directory = Path(path)
        if not directory.is_dir():
            what = "is not a directory" if directory.exists() else "does not exist"
            raise CheckpointError(
                f"model path {directory} {what}; pass a directory that holds config.json and *.safetensors"
            )
        raw = ModelFolder(directory).read_object("config.json")
        if raw is None:
            raise CheckpointError(
                f"{directory} has no config.json; pass a directory that holds config.json and *.safetensors"
            )
        return cls.from_dict(raw, source=str(directory / "config.json"))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, source: str = "config.json") -> "ModelConfig":
        """The same from the parsed JSON; `source` names it in messages."""
        model_type = raw.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            raise CheckpointError(
                f"{source}: model_type {shown(model_type)} is not supported; supported: {', '.join(FAMILIES)}"
            )
        family, read = FAMILIES[model_type], FieldReader(raw)
        _refuse_unsupported(read)
        refuse_unknown(raw, read.problems)
        num_hidden_layers = read.integer("num_hidden_layers", maximum=_MAX_LAYERS)
        max_position_embeddings = read.integer("max_position_embeddings", maximum=MAX_LENGTH)
        rope_theta, rope_scaling = read_rope(read, max_position_embeddings)
        config = cls(
            model_type=model_type,
            vocab_size=read.integer("vocab_size", maximum=2**24),
            hidden_size=read.integer("hidden_size"),
            num_hidden_layers=num_hidden_layers,
            num_nextn_predict_layers=read.num_mtp_layers(),
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=read.number("rms_norm_eps"),
            tie_word_embeddings=read.boolean("tie_word_embeddings", default=False),
            torch_dtype=read.dtype(),
            weight_block_size=read_block_size(raw, read.problems),
            num_attention_heads=read.integer("num_attention_heads", maximum=2**16),
            q_lora_rank=None if _has_no_query_latent(raw, family) else read.integer("q_lora_rank"),
            kv_lora_rank=read.integer("kv_lora_rank"),
            qk_nope_head_dim=read.integer("qk_nope_head_dim"),
            qk_rope_head_dim=read.integer("qk_rope_head_dim"),
            v_head_dim=read.integer("v_head_dim"),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            rope_interleave=read.boolean("rope_interleave", default=True),
            index_n_heads=read.integer("index_n_heads", maximum=2**16) if family.has_indexer else 0,
            index_head_dim=read.integer("index_head_dim") if family.has_indexer else 0,
            index_topk=read.integer("index_topk", maximum=MAX_LENGTH) if family.has_indexer else 0,
            indexer_rope_interleave=family.has_indexer
            and read.boolean("indexer_rope_interleave", default=family.indexer_rope_interleave),
            indexer_types=read.indexer_types(num_hidden_layers) if family.has_indexer else (),
            first_k_dense_replace=read.first_k_dense_replace(num_hidden_layers),
            intermediate_size=read.integer("intermediate_size"),
            moe_intermediate_size=read.integer("moe_intermediate_size"),
            n_routed_experts=read.integer("n_routed_experts"),
            num_experts_per_tok=read.integer("num_experts_per_tok"),
            n_shared_experts=read.n_shared_experts(),
            n_group=read.integer("n_group"),
            topk_group=read.integer("topk_group"),
            norm_topk_prob=read.boolean("norm_topk_prob"),
            routed_scaling_factor=read.number("routed_scaling_factor"),
        )
        problems = read.problems or list(config._contradictions())
        if problems:
            raise CheckpointError(f"{source} cannot be served:\n" + "\n".join(f"  {p}" for p in problems))
        return config

    def _contradictions(self) -> "list[str]":
        found = []
        for name in ("qk_rope_head_dim", "qk_nope_head_dim", "q_lora_rank", "kv_lora_rank", "index_head_dim"):
            size = getattr(self, name)
            if size is not None and size % 2:
                found.append(f"{name} {size} must be even: RoPE turns aligned pairs")
        if self.has_indexer and self.index_head_dim < self.qk_rope_head_dim:
            found.append(
                f"index_head_dim {self.index_head_dim} must be at least "
                f"qk_rope_head_dim {self.qk_rope_head_dim}"
            )
        if self.first_k_dense_replace > self.num_hidden_layers:
            found.append(
                f"first_k_dense_replace {self.first_k_dense_replace} must be at most num_hidden_layers "
                f"{self.num_hidden_layers}"
            )
        num_experts = (self.num_hidden_layers + self.num_mtp_layers) * self.n_routed_experts
        if num_experts > _MAX_EXPERTS:
            found.append(
                f"n_routed_experts {self.n_routed_experts} in so many layers are {num_experts} experts; "
                f"at most {_MAX_EXPERTS} are supported"
            )
        if self.n_routed_experts % self.n_group:
            found.append(f"n_group {self.n_group} must divide n_routed_experts {self.n_routed_experts}")
        elif self.n_group > 1 and self.n_routed_experts // self.n_group < 2:
            found.append(
                f"n_group {self.n_group} leaves {self.n_routed_experts // self.n_group} expert in a group; "
                "a group is scored by its best 2"
            )
        if self.topk_group > self.n_group:
            found.append(f"topk_group {self.topk_group} must be at most n_group {self.n_group}")
        elif self.num_experts_per_tok * self.n_group > self.n_routed_experts * self.topk_group:
            found.append(
                f"num_experts_per_tok {self.num_experts_per_tok} must be at most the experts of "
                f"topk_group {self.topk_group} groups"
            )
        return found


def _refuse_unsupported(read: FieldReader) -> None:
    """Features whose absence here would give wrong text instead of an error."""
    only: Mapping[str, object] = {
        "hidden_act": "silu",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "attention_bias": False,
        "mlp_bias": False,
    }
    for name, supported in only.items():
        value = read.raw.get(name, supported)
        if value != supported:
            read.problems.append(f"{name} {shown(value)} is not supported; supported: {supported!r}")
    kinds = read.raw.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(kind in _LAYER_TYPES for kind in kinds)):
        read.problems.append(
            f"layer_types is {shown(kinds)}; it must be a list of {', '.join(map(repr, _LAYER_TYPES))}"
        )


def _has_no_query_latent(raw: Mapping[str, Any], family: Family) -> bool:
    """`q_lora_rank` may be null, not absent; an indexer reads the latent, so with one it may be neither."""
    return not family.has_indexer and "q_lora_rank" in raw and raw["q_lora_rank"] is None
