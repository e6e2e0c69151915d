"""Export of checkpoints to other formats, and import from them.

`export` and `importing` are the public functions. `formats` has a folder for each format: its
`source` reads the format, its `target` writes it. `naming` chooses the tensors, their names, dtypes
and mappings, `shardckpt.streaming` reads them block by block, `files` publishes the written files.
`foreign` is the interface of every source; an import passes a source to `shardckpt.reshard`, which
lays it out by rules, within a memory limit, and commits it. `cli` may import this package; this
package imports `training`, `reshard` and the packages below them. Begin with `export`.
"""
