"""Commands for users beside the two training scripts."""
