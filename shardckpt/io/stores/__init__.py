"""Kinds of storage, a file for each: subclasses of `shardckpt.io.store.Store`, which `shardckpt.io.url.SCHEMES` names."""
