"""Reading: from a committed checkpoint to elements.

`checkpoint` has the public `open`, `restore` the public `restore`. `locate` finds the chunks that
some boxes need and, with a `lookup`, their places; `runs` groups chunks that are read and moved
together; `reader` and `fetch` read them; and `cooperative` shares the reads among processes.
`verification`, `compare` and `catalog` work on complete checkpoints. `writing` and the packages
above it may import this package; it imports `commit` and the packages below. Begin with `restore`.
"""
