"""Integrations: each module fits shardckpt into another library through that library's own interfaces.

Nothing is imported but what is asked for: `shardckpt.training.integrations.dcp`, `.lightning`, `.hf_trainer`. They use what users
use, and nothing imports them.
"""
