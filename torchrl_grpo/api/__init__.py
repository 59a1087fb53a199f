"""Training from Python, in a script or a notebook: :class:`~torchrl_grpo.api.trainer.GRPOTrainer`."""
