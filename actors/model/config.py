"""What config.json says about a model, checked once; the rest of the package trusts it."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.model.quantization import read_block_size
from kernels_integration.errors import CheckpointError, ConfigError

SUPPORTED_MODEL_TYPES = ("deepseek_v32",)

DTYPES = ("bfloat16", "float16", "float32", "float64")
"""Legal values of config.json's torch_dtype."""


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
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float

    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_rope_interleave: bool

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
        return float(self.qk_head_dim**-0.5)

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
        file = directory / "config.json"
        try:
            raw = json.loads(file.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(
                f"{directory} has no config.json; pass a directory that holds config.json and *.safetensors"
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read as JSON: {error}") from None
        if not isinstance(raw, dict):
            raise CheckpointError(f"{file} holds a {type(raw).__name__}; it must hold one JSON object")
        return cls.from_dict(raw, source=str(file))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, source: str = "config.json") -> "ModelConfig":
        """The same from the parsed JSON; `source` names it in messages."""
        model_type = raw.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise CheckpointError(
                f"{source}: model_type {model_type!r} is not supported; "
                f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        read = _FieldReader(raw)
        _refuse_unsupported(read)
        config = cls(
            model_type=model_type,
            vocab_size=read.integer("vocab_size"),
            hidden_size=read.integer("hidden_size"),
            num_hidden_layers=read.integer("num_hidden_layers"),
            num_nextn_predict_layers=read.integer(
                "num_nextn_predict_layers", default=0, minimum=0, maximum=1
            ),
            max_position_embeddings=read.integer("max_position_embeddings"),
            rms_norm_eps=read.number("rms_norm_eps"),
            tie_word_embeddings=read.boolean("tie_word_embeddings", default=False),
            torch_dtype=read.dtype(),
            weight_block_size=read_block_size(raw, read.problems),
            num_attention_heads=read.integer("num_attention_heads"),
            q_lora_rank=read.integer("q_lora_rank"),
            kv_lora_rank=read.integer("kv_lora_rank"),
            qk_nope_head_dim=read.integer("qk_nope_head_dim"),
            qk_rope_head_dim=read.integer("qk_rope_head_dim"),
            v_head_dim=read.integer("v_head_dim"),
            rope_theta=read.rope_theta(),
            index_n_heads=read.integer("index_n_heads"),
            index_head_dim=read.integer("index_head_dim"),
            index_topk=read.integer("index_topk"),
            indexer_rope_interleave=read.boolean("indexer_rope_interleave", default=False),
            first_k_dense_replace=read.first_k_dense_replace(),
            intermediate_size=read.integer("intermediate_size"),
            moe_intermediate_size=read.integer("moe_intermediate_size"),
            n_routed_experts=read.integer("n_routed_experts"),
            num_experts_per_tok=read.integer("num_experts_per_tok"),
            n_shared_experts=read.integer("n_shared_experts", minimum=0),
            n_group=read.integer("n_group"),
            topk_group=read.integer("topk_group"),
            norm_topk_prob=read.boolean("norm_topk_prob"),
            routed_scaling_factor=read.number("routed_scaling_factor"),
        )
        problems = read.problems or list(config._contradictions())
        if problems:
            raise CheckpointError(f"{source} cannot be served:\n" + "\n".join(f"  {p}" for p in problems))
        return config

    def check_parallel(self, tensor_parallel_size: int, decode_context_parallel_size: int = 1) -> None:
        """Errors: ConfigError when tp does not divide heads and widths of this model, or dcp not tp."""
        tp, dcp = tensor_parallel_size, decode_context_parallel_size
        sizes = {"num_attention_heads": self.num_attention_heads}
        if self.first_k_dense_replace > 0:
            sizes["intermediate_size"] = self.intermediate_size
        if self.is_moe_layer(self.num_hidden_layers - 1) or self.num_mtp_layers > 0:
            sizes["moe_intermediate_size"] = self.moe_intermediate_size
        legal = _divisors(math.gcd(*sizes.values()))
        if tp not in legal:
            named = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise ConfigError(
                f"tensor-parallel-size {tp} does not divide this model's {named}; use {_either(legal)}"
            )
        if dcp not in _divisors(tp):
            raise ConfigError(
                f"decode-context-parallel-size {dcp} does not divide tensor-parallel-size {tp}; "
                f"use {_either(_divisors(tp))}"
            )

    def _contradictions(self) -> "list[str]":
        found = []
        for name in ("qk_rope_head_dim", "qk_nope_head_dim", "q_lora_rank", "kv_lora_rank", "index_head_dim"):
            size = getattr(self, name)
            if size % 2:
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


class _FieldReader:
    """Typed access to the JSON object; collects what is wrong instead of stopping at the first."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.problems: list[str] = []

    def _missing(self, name: str, want: str) -> None:
        self.problems.append(f"{name} is missing; it must be {want}")

    def _ill_typed(self, name: str, value: object, want: str) -> None:
        self.problems.append(f"{name} is {value!r}; it must be {want}")

    def integer(
        self, name: str, *, default: int | None = None, minimum: int = 1, maximum: int | None = None
    ) -> int:
        want = f"an integer >= {minimum}" if maximum is None else f"an integer from {minimum} to {maximum}"
        value = self.raw.get(name)
        if value is None:
            if default is None:
                self._missing(name, want)
                return minimum
            return default
        legal = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
        if not legal or (maximum is not None and value > maximum):
            self._ill_typed(name, value, want)
            return minimum
        return int(value)

    def number(self, name: str, *, value: object = None) -> float:
        """A finite number > 0, taken from `value` where the field is nested."""
        value = self.raw.get(name) if value is None else value
        if value is None:
            self._missing(name, "a number > 0")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            self._ill_typed(name, value, "a number > 0")
        else:
            return float(value)
        return 1.0

    def boolean(self, name: str, *, default: bool | None = None) -> bool:
        value = self.raw.get(name)
        if value is None:
            if default is None:
                self._missing(name, "true or false")
            return bool(default)
        if not isinstance(value, bool):
            self._ill_typed(name, value, "true or false")
        return bool(value)

    def dtype(self) -> str:
        """`torch_dtype`, spelt `dtype` by newer writers; float32 where neither is given."""
        name = "torch_dtype" if self.raw.get("torch_dtype") is not None else "dtype"
        value = self.raw.get(name)
        if value is None:
            return "float32"
        if value not in DTYPES:
            self._ill_typed(name, value, "one of " + ", ".join(DTYPES))
        return str(value)

    def rope_theta(self) -> float:
        """From `rope_theta`, or from `rope_parameters` as newer writers nest it."""
        nested = self.raw.get("rope_parameters")
        value = nested.get("rope_theta") if isinstance(nested, Mapping) else None
        return self.number("rope_theta", value=value)

    def first_k_dense_replace(self) -> int:
        """From `first_k_dense_replace`, or from `mlp_layer_types` ("dense"..., then "sparse"...)."""
        types = self.raw.get("mlp_layer_types")
        if types is None:
            return self.integer("first_k_dense_replace", minimum=0)
        dense = types.count("dense") if isinstance(types, list) else 0
        if not isinstance(types, list) or types != ["dense"] * dense + ["sparse"] * (len(types) - dense):
            self._ill_typed("mlp_layer_types", types, 'a list of "dense" followed by "sparse"')
        given = self.raw.get("first_k_dense_replace")
        if given is not None and given != dense:
            self._ill_typed("first_k_dense_replace", given, f"{dense}, as mlp_layer_types says")
        return dense


def _refuse_unsupported(read: _FieldReader) -> None:
    """Features whose absence here would give wrong text instead of an error."""
    only: Mapping[str, object] = {
        "hidden_act": "silu",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "attention_bias": False,
    }
    for name, supported in only.items():
        value = read.raw.get(name, supported)
        if value != supported:
            read.problems.append(f"{name} {value!r} is not supported; supported: {supported!r}")
    for name in ("rope_scaling", "rope_parameters"):
        scaling = read.raw.get(name)
        if scaling is None:
            continue
        kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else scaling
        if kind != "default":
            read.problems.append(
                f"{name} of type {kind!r} is not supported; supported: null or type 'default'"
            )


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _either(values: list[int]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last
