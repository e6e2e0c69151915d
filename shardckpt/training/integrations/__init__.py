"""Integrations: each module connects shardckpt to a library through that library's interfaces.

Only the requested module is imported: `shardckpt.training.integrations.dcp`, `.lightning`,
`.ray_train`, …. They use the public interface of shardckpt, and no other module imports them.
"""
