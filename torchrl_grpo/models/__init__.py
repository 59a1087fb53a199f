"""Load causal language models, prepare them for training, and compute token log-probabilities."""
