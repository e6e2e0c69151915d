"""Runs: what is known of the steps of one training, in one directory (the *root*).

This is everything besides the checkpoints themselves.

`job` says which job saves there, `ended` that none does any more. `steps` and `catalog` list what
is there, `lineage` and `rollback` which steps the training has left behind. `retention` has the
rules of what to keep, `cleaning` applies them. `committing` publishes complete saves that nobody
has published, and `leftover` names those that it must not publish. `collecting` removes what
remains. `pinning` protects checkpoints.

`writing`, `streaming` and the packages above them may import this package; it imports `reading` and
the packages below. A saved checkpoint alone is the matter of `commit`. Begin with `steps`.
"""
