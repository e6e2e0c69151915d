"""Planning: which chunks a tensor is stored in, who writes each, and which of them a set of boxes needs.

Pure code: shapes and layouts in, arrays of integers out, without I/O and without a framework. `format` and what is above it
may import this package; it imports `layout` alone. Begin with `chunks` and `plan`.
"""
