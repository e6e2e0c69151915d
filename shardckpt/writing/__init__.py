"""Writing: from a state to durable chunks and a host record.

`save` is the public `save`, `saver` the public `save_async`, `attempt` the share of one process in one save, `save_plan` which chunks
that is, `staging` how they get into host buffers, and `host`, `packed` and `plain` how they get into storage. `training`,
`reshard` and what is above them may import this package; it imports `reading` and what is below. Begin with `save`.
"""
