"""Planning: which chunks a tensor is stored in, and which of them a set of boxes needs.

Pure code: shapes and layouts in, arrays of integers out. No I/O and no framework; `io`, `frameworks` and what
is above them may import it, it imports only the pure core below.
"""
