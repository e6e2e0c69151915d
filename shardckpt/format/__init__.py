"""The format on disk: bytes to objects and back, without I/O. It mirrors docs/format.md.

`record` is the commit record and the records of hosts, `contents` and `structure` are what a checkpoint holds, `table` is the
chunk table, `codec` a stored chunk, `keys` its name, and `zarr_meta` the documents that other zarr readers see. `io`,
`frameworks` and what is above them may import this package; it imports `layout`, `state` and `plan`. Begin with `record`.
"""
