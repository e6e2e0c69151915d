"""Other formats: a checkpoint written as one of them, and one of them read as a checkpoint.

`export` and `importing` are the public functions. `formats` has a folder for each format: its `source` reads it, its `target`
writes it. `naming` chooses the tensors, their names, dtypes and mappings, `streaming` reads them block by block, and `files`
publishes what is written. `foreign` is what any source says of itself; an import hands it to `shardckpt.reshard`, which lays it
out by rules, within a memory limit, and commits it. `cli` may import this package; it imports `training`, `reshard` and what is
below. Begin with `export`.
"""
