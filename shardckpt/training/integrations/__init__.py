"""Where training loops already are: each module here fits shardckpt into another library, by that library's own seams.

Nothing is imported but what is asked for: `shardckpt.training.integrations.dcp`, `.lightning`, `.hf_trainer`. They use what users
use, and nothing imports them.
"""
