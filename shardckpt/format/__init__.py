"""The format on disk: bytes ↔ objects, without I/O. See docs/format.md.

`documents` has the common parts of all metadata files, `record` the commit record, the host records
and the hosts' contents, `structure` the structure of a checkpoint, `table` the chunk table,
`zarr_arrays` the keys of chunks and the documents for other zarr readers, `stored_chunks` the bytes
of chunks, `zarr_dtypes` the dtypes that zarr-python does not have. `io`, `frameworks` and the
packages above them may import this package; it imports `layout`, `plan` and `state`. Begin with
`record`.
"""
