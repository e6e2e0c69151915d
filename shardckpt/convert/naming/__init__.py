"""Selection and naming of the tensors to write: their names, sources and dtypes. Begin with `choose`."""
