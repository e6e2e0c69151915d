"""Looking at checkpoints of any format: outline of the tree, statistics of elements, and reading everything once.

Command line, notebooks and web pages show what is computed here, each in its own form.
"""
