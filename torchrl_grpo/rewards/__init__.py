"""Rewards for training and graders for evaluation. They map text to a score.

``python -m torchrl_grpo.rewards`` scores stored completions. The package does not import torch, and imports
nothing by itself, because the workers of rewards start from it.
"""
