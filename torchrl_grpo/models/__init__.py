"""Loading causal language models and reading token log-probabilities off them."""
