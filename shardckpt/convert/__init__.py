"""Other people's formats: a checkpoint written as one of them, and one of them read as a checkpoint.

The way in: `foreign` is what any format must say of itself, `from_…` is one format each, `detect` tells which one lies somewhere.
What is read goes into a reshard (`shardckpt.reshard`), which lays it out by rules, within a memory limit, and commits it.

Both ways: `naming` says which tensors there will be, under which names (`renaming`, `ties`), made of what (`mapping`), in which dtype.

The way out: `outputs` says which elements of which tensors make each output, `streaming` reads them block by block, and `to_…` is
one format each.

May import what a reshard is made of; below `cli` nobody imports it.
"""
