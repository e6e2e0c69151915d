"""Kinds of storage, a file for each: subclasses of `shardckpt.io.store.Store`.

`shardckpt.io.url.SCHEMES` names them.
"""
