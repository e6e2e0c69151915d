"""Writing: from a state to durable chunks and a host record.

`save` has the public `save`, `background` the public `save_async`. `attempt` is one process's part
in one save. `state_share` takes that process's share of the state, `save_plan` selects the chunks,
`staging` moves them into host buffers, and `host`, `packed` and `plain` write them into storage.
`training`, `reshard` and the packages above them may import this package; it imports `reading` and
the packages below. Begin with `save`.
"""
