"""Directories of torch.distributed.checkpoint. Begin with `metadata`."""
