"""Planning: a stored tensor's chunks, the writer of each chunk, and the chunks that boxes need.

Pure code: shapes and layouts in, arrays of integers out, without I/O and without a framework.
`format` and the packages above it may import this package; it imports `layout` alone. Begin with
`pieces` and `chunks`. `cut` divides boxes for lack of memory.
"""
