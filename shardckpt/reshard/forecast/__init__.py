"""Forecasts: the cost of a reshard, and of a restore onto another layout, before either is done.

Nothing here reads or writes a tensor, but for `rates`, which measures a storage by reading and writing a little. Pure beyond
that: records, chunk tables and layouts in, numbers out. `forecast` puts everything together, and `document` makes of it what
the command line shows, draws and prints.
"""
