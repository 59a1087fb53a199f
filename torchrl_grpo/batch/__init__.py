"""The TensorDict that travels from the collector to the loss, and how it is padded and divided."""
