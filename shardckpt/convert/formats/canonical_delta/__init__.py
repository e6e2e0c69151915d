"""The versions of a publisher as directories of differences that other projects' receivers apply.

Begin at `target`.
"""
