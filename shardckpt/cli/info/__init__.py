"""`shardckpt info`: the command, the tree of a checkpoint, one tensor in detail, and the picture of a layout. Begin with `command`."""
