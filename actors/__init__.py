"""The coordinator and the shards of a group, their messages, and thin Ray wrappers around them."""
