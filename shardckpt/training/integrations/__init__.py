"""Integrations: each module connects shardckpt to a library through that library's interfaces.

Only the requested module is imported: `shardckpt.training.integrations.dcp`, `.lightning`,
`.ray_train`, …. No other module imports them. They use the public interface of shardckpt, and
private members of `CheckpointManager` for what only an integration asks of it.
"""
