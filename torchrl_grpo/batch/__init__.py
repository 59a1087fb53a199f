"""The TensorDict that goes from the collector to the loss, and its division into micro-batches."""
