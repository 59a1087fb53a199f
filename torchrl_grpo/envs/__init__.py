"""The TorchRL environment of examples and rewards, and the order in which examples are drawn.

Importing this package imports TorchRL, which takes seconds.
"""

from torchrl_grpo.envs.chat import check_lengths, render
from torchrl_grpo.envs.group_text import GroupTextEnv
from torchrl_grpo.envs.stream import PromptStream

__all__ = ["GroupTextEnv", "PromptStream", "check_lengths", "render"]
