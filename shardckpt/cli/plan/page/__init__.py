"""The plan of a reshard as one page of HTML that needs nothing else: no network, no other file.

`page` puts it together, `figures` draws, `markup` escapes. Names come from other people's checkpoints: every text goes
through `markup`, and a content security policy lets no other script run than ours, by its digest.
"""
