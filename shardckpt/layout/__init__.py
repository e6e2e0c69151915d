"""Layouts: the box of a tensor that each device holds.

Meshes, partition specs, OpShardings and DTensor placements, the boxes that follow from them, and
the dtypes of elements. Pure numpy code that every other package may import; it imports `errors` and
`shorten` alone. Begin with `box`, `mesh` and `sharding`.
"""
