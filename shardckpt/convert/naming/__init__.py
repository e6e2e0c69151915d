"""Names: which tensors are written, what they are called, made of what, in which dtype. Begin with `choose`."""
