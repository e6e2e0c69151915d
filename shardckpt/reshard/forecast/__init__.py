"""Forecasts: the cost of a reshard, and of a restore onto another layout, before either is done.

Nothing here reads or writes a tensor, except `rates`, which measures a storage by reading and
writing a little. The rest is pure: records, chunk tables and layouts in, numbers out. `forecast`
combines the parts, and `document` turns the result into the document that the command line shows,
draws and prints. Begin with `forecast`.
"""
