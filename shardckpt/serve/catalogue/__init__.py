"""The catalogue of runs and checkpoints that scans have found, and queries of it."""
