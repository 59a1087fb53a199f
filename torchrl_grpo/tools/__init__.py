"""Commands for users besides the two training scripts."""
