"""Files of `torch.save`, read without running their pickles. Begin with `file`."""
