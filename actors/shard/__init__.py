"""One shard: model slice, KV cache and the execution of a step."""
