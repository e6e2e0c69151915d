"""Very large jobs, simulated on one machine.

The modules tell what planning, metadata, commits and requests cost as devices and hosts grow.

`python -m tools.scale` runs it; each module answers one question. What is measured is the product's
own planner and record code, given the layouts and shapes of jobs that nobody runs here.
"""
