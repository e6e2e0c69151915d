"""Selection and naming of the tensors that an export or import writes, and of the tensors that it makes them from.

Begin with `choose`: it has all options, and turns them into one `Naming`, which consists of rules. `apply` applies the rules to the
structure of a checkpoint, without reading a tensor. There are two kinds of rules. Rules that change names are substitutions and tables
(`substitution`, `renaming`). Rules that join and split tensors are `MappingRule`s over `NamePattern`s; a `TensorMapping` is a sequence of
them (`mapping`, `mapping_rule`, `name_pattern`), and `mapping_file` reads it. Each of these rules lists the boxes that parts and a whole
share (`part_layout`), so it works in both directions. `ties` chooses among the names of one tensor, and `renamed_state` builds the
containers of an imported state.
"""
