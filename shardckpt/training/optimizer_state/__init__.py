"""The state of optimizers by the names of parameters.

`forms` has its stored forms, `settings` the settings of groups, and `loaded` what `load_state_dict`
made of a state. `moments` makes it follow the parameters in a restore.
"""
