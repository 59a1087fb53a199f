"""GPU transfer channels: weights go from the trainer's GPU to servers' GPUs, without the host's memory."""
