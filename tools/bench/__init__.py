"""The bench: shardckpt and its peers, in turn, in one run, on the same state.

`make bench`, or `python -m tools.bench --help` in the root of the repository. `measure` says what
is measured and how, `states` what of; `on_torch`, `on_dtensor`, `on_jax` and `on_xla` hold the
subjects of one framework each, and run in a process of their own; `report` and `chart` make
`docs/performance.md` and `docs/lab/performance-tables.md`, and `baseline` compares two runs.
"""
