"""Keys and bytes at a location, and the threads and buffers that move them.

`url` parses locations, `store` reads and writes keys there with typed errors, `buckets` has the
special parts for GCS and S3, `files` has whole files on disk, `datafile` appends to files,
`buffers` leases memory, and `threads` runs tasks. Nothing here depends on tensors, frameworks or
the decisions about what to save. `commit` and the packages above it may import this package; it
imports `format` and the packages below. TensorStore is used here, in `commit.index`
and, for zarr, in `format.zarr_dtypes`. Begin with `store`.
"""
