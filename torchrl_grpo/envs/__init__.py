"""TorchRL environments of problems and rewards, the order of problems, and episodes of several turns.

This package itself imports nothing, because the processes of episodes start from it.
"""
