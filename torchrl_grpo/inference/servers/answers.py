"""What a server says that it sampled is checked before anything is computed from it."""

from __future__ import annotations

import numpy as np

from torchrl_grpo.inference.protocol import Completion

# The trainer keeps log-probabilities in float32. Rounding makes them a little larger than 0.
_SMALLEST, _LARGEST = float(np.finfo(np.float32).min), 1e-3


def fault_in(completion: Completion, max_new_tokens: int, vocabulary: int) -> str | None:
    """Return what of a completion no model can have sampled, in words; None if there is nothing.

    Args:
        completion: what the server answered.
        max_new_tokens: largest number of tokens that it was asked for.
        vocabulary: number of tokens that the model has.
    """
    tokens, reason = completion.token_ids, completion.finish_reason
    if len(tokens) != len(completion.log_probs):
        return f"{len(tokens)} tokens and {len(completion.log_probs)} log-probabilities"
    if reason not in ("stop", "length", "aborted"):
        return f"a response that ended for the reason {str(reason)[:50]!r}"
    if len(tokens) > max_new_tokens:
        return f"{len(tokens)} tokens, and {max_new_tokens} were the most"
    if not tokens:
        return None if reason == "aborted" else "a response without a token"
    smallest, largest = min(tokens), max(tokens)
    if smallest < 0 or largest >= vocabulary:
        return f"the token {smallest if smallest < 0 else largest}, and the model has {vocabulary} tokens"
    # NaN stands for a value that JSON does not have, and passes.
    log_probs = np.array(completion.log_probs)
    wrong = log_probs[(log_probs < _SMALLEST) | (log_probs > _LARGEST)]
    return f"the log-probability {wrong[0]:g}" if len(wrong) else None
