"""`shardckpt serve`: the service for the checkpoints below some roots.

People and programs see, check and fetch these checkpoints through it.

The storage is the truth. The catalogue can be deleted at any time, and training does not depend on
the service. No logic of checkpoints lives here: everything is read by `reading`, `views` and
`reshard`. Only `cli` may import this package; begin with `app`. `pages` needs no web server:
`shardckpt plan --html` uses it, too.
"""
