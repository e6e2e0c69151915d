"""Looking at checkpoints of any format: tree outline, element statistics, one complete read.

Command line, notebooks and web pages show what is computed here, each in its own form.
"""
