"""The synchronous loop and its parts: one optimiser step, publication, evaluation, checkpoints."""
