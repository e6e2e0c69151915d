"""Rules for other names, and for tensors that are joined, split or fitted.

Restores, exports, imports and views share these rules.

Rules that change names are substitutions and tables (`substitution`, `renaming`). Rules that join
and split tensors are `MappingRule`s over `NamePattern`s; a `TensorMapping` is a sequence of them
(`mapping`, `mapping_rule`, `name_pattern`), and `mapping_file` reads it. Each of these rules lists
the boxes that parts and a whole share (`part_layout`), so it works in both directions; its results
are `outputs`. `adapt` applies the rules to the tree that a restore reads.
"""
