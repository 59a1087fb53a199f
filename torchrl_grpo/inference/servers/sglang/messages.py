"""Names that both ends of a call to an SGLang server know."""

from __future__ import annotations

# Function that SGLang hands the message to.
LOADER = "torchrl_grpo.inference.servers.sglang.loader.answer"
# Name of every file with an answer begins with this, so that no other file is ever written.
ANSWER_PREFIX = "torchrl-grpo-answer-"
