"""Streaming: a checkpoint's elements, arranged anew, chunk by chunk within a memory limit.

A `source` is the interface of what is read. `memory` divides a limit among buffers and workers.
`batches` joins small steps, and `assemble` reads batch after batch into the chunks of a target
while the caller writes the batch before: a reshard calls it with the chunks of a new checkpoint,
`stream` with the blocks of exported files. `elements` reads the bytes of such files on demand. The
boxes that are read together, and the blocks, are computed in `plan` (`cells`, `cut`, `grids`).

`reshard`, `training` and the packages above them may import this package; it imports `reading` and
the packages below it, and is independent of `writing`. Begin with `assemble`.
"""
