"""Storage: urls, stores, the packed and the plain layout, the chunk table and its reader.

TensorStore and zarr live here and nowhere else in the package. What is here knows keys, bytes and byte ranges;
it knows nothing of tensors' meaning, of frameworks or of who decides what to save. Modules above may import it;
it imports `record`, `planning.plan` and the pure modules below.
"""
