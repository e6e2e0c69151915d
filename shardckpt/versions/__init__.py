"""Versions of weights that travel while training goes on.

They are published as differences, and followed by readers on any mesh.

`Publisher` saves each version as a checkpoint at `<url>/<step>`, mostly as differences from the
version before. `follow` brings them to tensors that already have an earlier version.
docs/publish.md has both.
"""
