"""Parts that few restores need: values of each process, numbers, refusals, no `like`.

`reading.restore` and `reading.landing` have what every restore does.
"""
