"""Fields of config.json that are known: used, or known to change nothing here.

Any other may change the mathematics without a trace in the tensors. One whose name speaks of attention,
rotary embeddings, experts, the indexer, scaling or quantisation is refused; the rest is for
`latentray inspect` to show.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from kernels_integration.errors import shown


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


USED = _names(
    """
    model_type vocab_size hidden_size num_hidden_layers max_position_embeddings rms_norm_eps
    hidden_act tie_word_embeddings torch_dtype dtype quantization_config compression_config
    eos_token_id num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim
    v_head_dim attention_bias rope_theta rope_scaling rope_parameters rope_interleave
    partial_rotary_factor original_max_position_embeddings layer_types index_n_heads index_head_dim
    index_topk indexer_rope_interleave indexer_types index_topk_pattern index_topk_freq
    index_skip_topk_offset first_k_dense_replace mlp_layer_types intermediate_size
    moe_intermediate_size n_routed_experts num_experts_per_tok n_shared_experts n_group topk_group
    norm_topk_prob routed_scaling_factor scoring_func topk_method moe_layer_freq mlp_bias
    num_nextn_predict_layers num_mtp_layers
    """
)
HARMLESS = _names(
    """
    architectures auto_map transformers_version bos_token_id pad_token_id unk_token_id sep_token_id
    decoder_start_token_id name_or_path _name_or_path use_cache initializer_range attention_dropout
    hidden_dropout embd_pdrop resid_pdrop pretraining_tp ep_size seq_aux aux_loss_alpha
    router_aux_loss_coef output_router_logits output_attentions output_hidden_states return_dict
    torchscript use_bfloat16 chunk_size_feed_forward is_decoder is_encoder_decoder
    add_cross_attention cross_attention_hidden_size tie_encoder_decoder pruned_heads id2label
    label2id num_labels problem_type finetuning_specific_params task_specific_params prefix
    tokenizer_class language model_max_length _attn_implementation _attn_implementation_autoset
    attn_implementation _experts_implementation use_flash_attention num_key_value_heads head_dim
    qk_head_dim max_window_layers index_share_for_mtp_iteration
    use_index_cache do_sample temperature top_k top_p min_p typical_p repetition_penalty max_length
    min_length max_new_tokens num_beams num_beam_groups num_return_sequences diversity_penalty
    length_penalty early_stopping no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens remove_invalid_values output_scores return_dict_in_generate tf_legacy_loss
    """
)
"""Of training, of transformers itself, of generation (generation_config.json is read for that), or derived
from other fields. index_share_for_mtp_iteration changes drafts alone."""

ROPE_FIELDS = _names(
    """
    type rope_type rope_theta partial_rotary_factor factor original_max_position_embeddings
    beta_fast beta_slow mscale mscale_all_dim attention_factor truncate
    """
)
ROPE_NEUTRAL: Mapping[str, float] = {"attn_factor": 1, "extrapolation_factor": 1}
"""Known to vLLM's YaRN, and the values under which they change nothing."""
QUANTIZATION_FIELDS = _names(
    """
    quant_method fmt activation_scheme weight_block_size scale_fmt modules_to_not_convert
    ignored_layers ignore modules_to_save dequantize is_checkpoint_fp8_serialized
    """
)
"""Of FP8 checkpoints. Which tensors are quantised is told by their scales."""

_GROUPS = {
    "rotary embeddings": "rope rotary yarn ntk",
    "scaling": "scaling scale multiplier factor mscale softcap softcapping clamp clip cap limit",
    "attention": "attn attention sliding window sink sinks softmax qk kv mla head heads nope sparse linear",
    "the indexer": "index indexer dsa",
    "quantisation": "quant quantization quantized compress compression fp8 fp4 int8 int4",
    "experts": "moe expert experts router routing routed route gate gating topk shared",
}
_WORD = re.compile(r"[A-Z]?[a-z]+\d*|[A-Z]+|\d+")


def group_of(name: str) -> str | None:
    """The part of the mathematics that a field's name speaks of."""
    words = {word.lower() for word in _WORD.findall(name)}
    return next((group for group, theirs in _GROUPS.items() if words & set(theirs.split())), None)


def unknown_fields(raw: Mapping[str, Any]) -> list[str]:
    """Fields of config.json that nothing here knows, in their order."""
    return [name for name in raw if name not in USED and name not in HARMLESS]


def refuse_unknown(raw: Mapping[str, Any], problems: list[str]) -> None:
    """Add a problem for each unknown field of a mathematical group that asks for anything: null, false and
    what is empty do not."""
    for name in unknown_fields(raw):
        group = group_of(name)
        if group is not None and _asks(raw[name]):
            problems.append(
                f"{shown(name)} is {shown(raw[name])}; this field is not known and by its name changes "
                f"{group}: remove it if the model does not need it, or use a version that knows it"
            )


def refuse_unknown_within(
    name: str, fields: Mapping[str, Any], known: Iterable[str], problems: list[str]
) -> None:
    """The same for an object of config.json: all that it holds is of its group."""
    for field in fields:
        if field not in known and _asks(fields[field]):
            problems.append(
                f"{name}.{field} is {shown(fields[field])}; this field is not known and may change {name}; "
                f"known: {', '.join(sorted(known))}"
            )


def _asks(value: Any) -> bool:
    return not (value is None or value is False or (isinstance(value, list | dict | str) and not value))
