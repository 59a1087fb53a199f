"""Other libraries' objectives on given numbers: their own code, with tables where models and engines stand.

TRL's trainers come out of their own constructors, so their settings mean what they mean there; only
generating and scoring are replaced. Their advantages and their losses run as they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

# An end token of tests/helpers/tiny_model.py, as of tests/helpers/batches.py, and one that is none.
END, OTHER = 2, 7
# Bound of a response's length, which no batch needs to reach.
LONGEST = 10


class Outcome(NamedTuple):
    """A loss, and its gradients by token, ``[B, T]``."""

    value: Tensor
    gradient: Tensor
    entropy_gradient: Tensor


class Numbers:
    """What the model, the engine and the rewards say about a batch: responses in rows, ``[B, T]``.

    Args:
        batch: groups as of :func:`batches.make_batch`. The trainer's log-probabilities of the sampled tokens
            are ``("log_probs", "proximal")`` where the batch has them, the engine's otherwise.
        log_probs: ``[P, G, T]``, the policy's, which the loss is differentiated by.
        entropy: ``[P, G, T]``, likewise.
    """

    def __init__(self, batch: TensorDict, log_probs: Tensor, entropy: Tensor) -> None:
        def rows(values: Tensor) -> Tensor:
            return values.detach().flatten(0, 1).clone()

        group = batch["masks", "response"].shape[1]
        prompts = zip(batch["tokens", "prompt"], batch["masks", "prompt"], strict=True)
        self.prompts = [prompt[mask].tolist() for prompt, mask in prompts for _ in range(group)]
        self.mask = rows(batch["masks", "response"])
        self.engine = rows(batch["log_probs", "response"])
        self.trainer = rows(batch["log_probs"].get("proximal", batch["log_probs", "response"]))
        self.reference = rows(batch["log_probs", "reference"])
        self.rewards = rows(batch["next", "reward_parts"])
        self.log_probs, self.entropy = (rows(x).requires_grad_() for x in (log_probs, entropy))
        self.responses = self.ragged(rows(batch["tokens", "response"]))
        for tokens, truncated in zip(self.responses, rows(batch["truncated"]), strict=True):
            tokens[-1] = OTHER if truncated else END

    def ragged(self, values: Tensor) -> list[list[Any]]:
        """``[B, T]`` without its padding."""
        return [row[mask].tolist() for row, mask in zip(values, self.mask, strict=True)]


class _Table(torch.distributions.Distribution):
    """What TorchRL asks of a policy's distribution, from tables."""

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012  # a name of torch's
    has_rsample = False

    def __init__(self, log_probs: Tensor, entropy: Tensor, mask: Tensor) -> None:
        super().__init__(log_probs.shape, validate_args=False)
        self._log_probs, self._entropy, self.mask = log_probs, entropy, mask

    def log_prob(self, value: Tensor) -> Tensor:
        return self._log_probs

    def entropy(self) -> Tensor:
        return self._entropy


class _Actor(torch.nn.Module):
    def __init__(self, numbers: Numbers, rows: slice) -> None:
        super().__init__()
        self.table = (numbers.log_probs[rows], numbers.entropy[rows], numbers.mask[rows])

    def get_dist(self, tensordict: TensorDict, **_: Any) -> _Table:
        return _Table(*self.table)


def torchrl_terms(
    numbers: Numbers, advantage: Tensor, kind: str, rows: slice = slice(None), **settings: Any
) -> Any:
    """The terms of one of TorchRL's losses over some of the rows; ``advantage`` is ``[P, G, 1]``."""
    from torchrl.objectives import llm  # which imports vLLM

    mask = numbers.mask[rows]
    data = TensorDict(
        {
            "advantage": advantage.flatten()[rows, None, None].expand(*mask.shape, 1),
            "tokens": TensorDict({"full": mask.long()}),
            "log_probs": TensorDict({"full": numbers.trainer[rows]}),
            "next": TensorDict({"ref_log_probs": TensorDict({"full": numbers.reference[rows]})}),
        },
        batch_size=[len(mask)],
    )
    return vars(llm)[kind](_Actor(numbers, rows), **settings)(data)


def gradients_of(value: Tensor, log_probs: Tensor, entropy: Tensor) -> Outcome:
    """The outcome after ``backward``; an unused leaf has gradient zero."""
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in (log_probs, entropy)]
    return Outcome(value.detach(), *(grad.reshape(-1, grad.shape[-1]) for grad in grads))
