"""Several training ranks: how they start, talk to each other and hold the model."""
