"""Keys and bytes at a place, and the threads and buffers that move them.

`url` says where a place is, `store` reads and writes keys there with typed errors, `buckets` has what GCS and S3 need besides;
`datafile` appends to files, `buffers` hands out memory, `threads` runs tasks. Nothing here knows
tensors, frameworks or who decides what to save. `commit` and what is above it may import this package; it imports `format`
and what is below. TensorStore lives here, in `commit.index`, in `writing.packed` and, for zarr, in `format.zarr_dtypes`.
Begin with `store`.
"""
