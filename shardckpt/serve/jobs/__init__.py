"""Operations that change or check checkpoints, each as a job that survives restarts.

Begin with `operations`.
"""
