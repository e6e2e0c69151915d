"""The format on disk: bytes ↔ objects, without I/O. See docs/format.md.

`documents` is what all metadata files have in common, `record` the commit record, the records of hosts and what these say,
`structure` what a checkpoint holds, `table` the chunk table, `zarr_arrays` chunks, their keys and the documents that other zarr
readers see, `zarr_dtypes` the dtypes that zarr does not know by itself. `io`, `frameworks` and what is above them may
import this package; it imports `layout`, `plan` and `state`. Begin with `record`.
"""
