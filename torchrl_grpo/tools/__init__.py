"""Commands for users besides the training scripts."""
