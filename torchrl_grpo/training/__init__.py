"""The synchronous loop and its parts: one optimizer step, publication, evaluation, checkpoints."""
