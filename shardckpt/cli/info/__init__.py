"""`shardckpt info`: the command, a checkpoint's tree, one tensor in detail, a layout's picture.

Begin with `command`.
"""
