"""What a group's KV cache is, in numbers and for people."""

from actors.config import GroupConfig
from actors.model.config import ModelConfig


def group_kv_bytes_per_token(config: GroupConfig) -> int:
    """On the shard that keeps the token, all layers together. Reads config.json.

    Errors: CheckpointError.
    """
    model = ModelConfig.from_pretrained(config.model_path)
    return model.kv_bytes_per_token(
        config.num_speculative_tokens, config.kv_cache_dtype, config.indexer_kv_dtype
    )


def describe_kv_cache(config: GroupConfig) -> str:
    """Formats, bytes of a token, and how many tokens fit, on all shards together.

    Errors: CheckpointError.
    """
    return (
        f"KV cache {_formats(config)}, {group_kv_bytes_per_token(config)} bytes per token, "
        f"{config.num_kv_blocks * config.tokens_per_block} tokens"
    )


def _formats(config: GroupConfig) -> str:
    """The format, or both where indexer keys have their own."""
    keys = config.indexer_kv_dtype
    if keys is None or keys == config.kv_cache_dtype:
        return config.kv_cache_dtype
    has_indexer = ModelConfig.from_pretrained(config.model_path).has_indexer
    return f"{config.kv_cache_dtype} + {keys}" if has_indexer else config.kv_cache_dtype
