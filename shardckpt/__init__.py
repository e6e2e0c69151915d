"""shardckpt."""
