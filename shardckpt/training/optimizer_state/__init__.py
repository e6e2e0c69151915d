"""The state of optimizers by the names of parameters.

`forms` has its stored forms, and `moments` makes it follow the parameters in a restore.
"""
