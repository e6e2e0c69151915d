"""The plan of a reshard as one self-contained HTML page: no network, no other file.

`page` assembles it, `figures` draws, `markup` escapes. Names come from other people's checkpoints: every text goes through
`markup`, and a content security policy allows only our own script, by its digest.
"""
