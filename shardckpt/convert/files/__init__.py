"""Files that appear complete or not at all, on a local disk or in a bucket.

Begin with `destination`.
"""
