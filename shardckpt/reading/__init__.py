"""Reading: from a committed checkpoint to elements.

`checkpoint` is the public `open`, `restore` the public `restore`. `locate` says which chunks some boxes need and, by a
`lookup`, where they lie; `runs` which of them are read and moved together; `reader` and `fetch` read them; and `cooperative` shares
the work among processes. `verification`, `compare` and `catalog` look at whole checkpoints. `writing` and what is above
it may import this package; it imports `commit` and what is below. Begin with `restore`.
"""
