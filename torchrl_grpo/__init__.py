"""GRPO for language models on TorchRL, configured with Hydra."""

__version__ = "0.1.0"
