"""Log-probabilities of given tokens: the scorer, the output head, attention and shared prompts."""
