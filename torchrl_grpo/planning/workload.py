"""How many tokens a run works on at a time, from its configuration alone. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import optim_batch_size, token_budget

# Responses that the transformers engine generates at a time.
MAX_ROWS = 256


@dataclass(frozen=True)
class Workload:
    """The largest pieces of work that a configuration allows.

    Attributes:
        prompt: tokens of the longest prompt.
        response: tokens of the longest response.
        tokens: in a micro-batch.
        attended: keys that its tokens have before them: each response its prompt's and its own.
        several: an optimizer step has more than one micro-batch.
        rows: responses that an engine generates at a time.
    """

    prompt: int
    response: int
    tokens: int
    attended: float
    several: bool
    rows: int


def workload_of(cfg: Config, ranks: int = 1, engines: int = 1) -> Workload:
    """The workload of a configuration.

    Args:
        cfg: ``env``, ``train``, ``eval`` and the lengths are read.
        ranks: trainers that divide an optimizer batch.
        engines: that divide a round's groups, and the problems of an evaluation.
    """
    length, response = cfg.inference_model.max_model_len, cfg.inference_model.max_new_tokens
    prompt, samples = length - response, cfg.env.repeats
    batch = optim_batch_size(cfg)
    groups = max(1, batch // samples // ranks)
    pieces = cfg.train.gradient_accumulation_steps
    # As equal_pieces() cuts: along groups while they last, then within them.
    whole = max(1, groups // pieces)
    responses = whole * samples if pieces <= groups else max(1, samples * groups // pieces)
    prompts = whole if cfg.train_model.shared_prefix else responses
    wanted = prompts * prompt + responses * response
    tokens = min(wanted, token_budget(cfg))
    share = tokens / wanted
    attended = share * (responses * length + (prompts * prompt if cfg.train_model.shared_prefix else 0))
    rows = max(
        -(-cfg.env.num_envs // engines) * samples, -(-cfg.eval.num_problems // engines) * cfg.eval.pass_at_k
    )
    return Workload(prompt, response, tokens, attended, pieces > 1 or tokens < wanted, rows)
