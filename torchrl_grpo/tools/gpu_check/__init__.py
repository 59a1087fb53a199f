"""``python -m torchrl_grpo.tools.gpu_check``: whether this machine trains correctly, stage by stage."""
