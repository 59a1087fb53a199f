"""Compute how many tokens a run processes at a time, from its configuration alone. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import held_out_problems, optim_batch_size, token_budget

# Most responses that the transformers engine generates at a time.
MAX_ROWS = 256
# Least number of responses that an engine is made for, because an evaluation may be larger than a round. A
# GPU decodes 256 responses in about the time of 64.
_MIN_SEQS, MIN_SEQS_GPU = 64, 256


@dataclass(frozen=True)
class Workload:
    """The largest pieces of work that a configuration allows.

    Attributes:
        prompt: tokens of the longest prompt.
        response: tokens of the longest response.
        tokens: tokens in a micro-batch.
        attended: keys that a micro-batch attends to; each response has the keys of its prompt and its own.
        pairs: pairs of a query of a response and a key in the masks of dense attention over shared prompts.
        several_micro_batches: whether an optimizer step has more than one micro-batch.
        rows: responses that an engine generates at a time.
        prompts: tokens of prompts in a micro-batch.
    """

    prompt: int
    response: int
    tokens: int
    attended: float
    pairs: float
    several_micro_batches: bool
    rows: int
    prompts: float = 0.0


def workload_of(cfg: Config, ranks: int = 1, engines: int = 1) -> Workload:
    """Compute the workload of a configuration.

    Args:
        cfg: configuration; ``env``, ``train``, ``eval``, ``train_model`` and the lengths are read.
        ranks: number of training ranks that divide an optimizer batch.
        engines: number of engines that divide the groups of a round and the problems of an evaluation.
    """
    length, response = cfg.inference_model.max_model_len, cfg.inference_model.max_new_tokens
    prompt, samples = length - response, cfg.env.repeats
    batch = optim_batch_size(cfg)
    groups = max(1, batch // samples // ranks)
    pieces = cfg.train.gradient_accumulation_steps
    # Like split_evenly(): split between groups, and within groups if there are more pieces than groups.
    whole = max(1, groups // pieces)
    responses = whole * samples if pieces <= groups else max(1, samples * groups // pieces)
    prompts = whole if cfg.train_model.shared_prefix else responses
    cached = prompts * prompt + responses * response
    tokens = min(cached, token_budget(cfg))
    share = tokens / cached
    attended = share * (responses * length + (prompts * prompt if cfg.train_model.shared_prefix else 0))
    pairs = share * responses * response * length if cfg.train_model.shared_prefix else 0.0
    rows = max(
        -(-cfg.env.num_envs // engines) * samples, -(-held_out_problems(cfg) // engines) * _held_out(cfg)
    )
    several = pieces > 1 or tokens < cached
    return Workload(prompt, response, tokens, attended, pairs, several, rows, share * prompts * prompt)


def max_num_seqs(cfg: Config, on_gpu: bool = False, room: int | None = None) -> int:
    """Return the largest number of responses that an engine decodes at a time.

    On a GPU this is a round, an evaluation or 256 responses, whatever is largest, as far as the memory
    allows. It is at least a round, or 64: vLLM lets responses wait if their keys and values do not fit.

    Args:
        cfg: configuration; the sizes of rounds and evaluations are read.
        on_gpu: whether the engine computes on a GPU.
        room: number of longest sequences whose keys and values fit; None if unknown, for no more than 256.
    """
    least = max(cfg.env.num_envs * cfg.env.repeats, _MIN_SEQS)
    if not on_gpu:
        return least
    sequences = max(least, held_out_problems(cfg) * _held_out(cfg), MIN_SEQS_GPU)
    return max(least, min(sequences, MIN_SEQS_GPU if room is None else room))


def _held_out(cfg: Config) -> int:
    """Return the most responses to a held-out problem at a time."""
    return max(cfg.eval.pass_at_k, cfg.eval.samples or 1)
