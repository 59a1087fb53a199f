"""Log-probabilities of given tokens: the output head, the attention and the shared prompt."""
