"""Selection and naming of the tensors that an export or import writes.

Begin with `choose`: it turns the options into one `Naming`, which consists of rules
(`reading.naming`). `apply` applies the rules to the structure of a checkpoint, without reading a
tensor. `ties` chooses among the names of one tensor, and `renamed_state` builds the containers of
an imported state.
"""
