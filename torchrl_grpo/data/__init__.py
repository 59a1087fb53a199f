"""Data sets: questions and their ground truth.

The package does not import torch, and imports heavy readers on first use. It imports nothing by itself, since
the processes of rewards and episodes start from it.
"""
