"""`shardckpt plan`: the command, its lines in a terminal, and its page. Begin with `command`."""
