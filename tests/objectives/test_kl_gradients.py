"""What the KL estimators minimize in the loss and in the reward: exact expectations over a vocabulary."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import make_objective
from rounding import EXACT
from tensordict import TensorDict
from torch import Tensor, nn

from torchrl_grpo.models.scoring.token_scorer import TokenScores

PAGE = Path(__file__).resolve().parents[2] / "docs/objectives.md"
# The policy gives token v the probability COUNTS[v] / 12. A group with that many copies of each token has the
# expectations of the policy as its means.
COUNTS = (1, 2, 4, 5)
REFERENCE = (0.4, 0.3, 0.1, 0.2)
KINDS = ("k1", "k2", "k3")

pytestmark = pytest.mark.usefixtures("float64")


class Policy(nn.Module):
    """A policy with a row of logits for the first token, and one after each token before."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits.clone())
        self.entropy_gradient = False

    def forward(self, prompt: Tensor, mask: Tensor, response: Tensor, *_: Tensor) -> TokenScores:
        log_probs = scored(torch.log_softmax(self.logits, -1), response)
        return TokenScores(log_probs, torch.zeros_like(log_probs))


def scored(table: Tensor, response: Tensor) -> Tensor:
    """Log-probabilities of tokens: row 0 of the table is for the first token, row 1 + v for one after v."""
    before = torch.cat([torch.zeros_like(response[..., :1]), response[..., :-1] + 1], -1)
    return table[before, response]


def batch_of(responses: Tensor, policy: Policy, reference: Tensor) -> TensorDict:
    """A group of responses ``[G, T]`` with rewards of 0, sampled by the policy."""
    response = responses[None]
    mask = torch.ones_like(response, dtype=torch.bool)
    samples = response.shape[1]
    logs = {"response": policy(response, mask, response).log_probs.detach()}
    logs["reference"] = scored(reference.log(), response)
    nested: dict[str, Any] = {
        "tokens": {"prompt": torch.zeros(1, 1, dtype=torch.int64), "response": response},
        "masks": {"prompt": torch.ones(1, 1, dtype=torch.bool), "response": mask, "sampled": mask},
        "log_probs": logs,
        "next": {"reward": torch.zeros(1, samples, 1), "reward_parts": torch.zeros(1, samples, 1)},
        "truncated": torch.zeros(1, samples, 1, dtype=torch.bool),
    }
    return TensorDict(nested, batch_size=[1])


def measured(responses: Tensor, policy: Policy, reference: Tensor, **keys: Any) -> tuple[float, Tensor]:
    """Mean of the estimate by token, and gradient of the loss with a coefficient of 1."""
    loss, advantage = make_objective(policy, kl_coef=1.0, advantage_std="none", **keys)
    terms = loss(advantage.inv(batch_of(responses, policy, reference)))
    total = terms["loss_objective"] + terms.get("loss_kl", 0.0)
    (gradient,) = torch.autograd.grad(total, policy.logits)
    return float(terms["kl_ref"]), gradient


def named(gradient: Tensor, candidates: dict[str, Tensor]) -> str:
    """The divergence that a gradient belongs to."""
    found = [name for name, one in candidates.items() if torch.allclose(gradient, one, **EXACT)]
    assert len(found) <= 1
    return found[0] if found else "of no KL"


def test_the_page_s_table_of_values_and_gradients_is_exact() -> None:
    policy = Policy(torch.tensor([COUNTS]).log())
    reference = torch.tensor([REFERENCE])
    tokens = torch.tensor([token for token, count in enumerate(COUNTS) for _ in range(count)])[:, None]
    log_p, log_q = torch.log_softmax(policy.logits[0], -1), reference[0].log()
    forward, reverse = (log_p.exp() * (log_p - log_q)).sum(), (log_q.exp() * (log_q - log_p)).sum()
    exact = forward.item()
    of_policy, of_reference = (
        torch.autograd.grad(one, policy.logits, retain_graph=True)[0] for one in (forward, reverse)
    )
    candidates = {
        "0": torch.zeros_like(of_policy),
        "that of KL(pi, ref)": of_policy,
        "that of KL(ref, pi)": of_reference,
        "that of KL(pi, ref) minus that of KL(ref, pi)": of_policy - of_reference,
    }
    rows = []
    for kind in KINDS:
        in_loss, in_reward = (
            measured(tokens, policy, reference, kl_estimator=kind, kl_in=place)
            for place in ("loss", "reward")
        )
        assert in_loss[0] == pytest.approx(in_reward[0], rel=1e-12)
        value = "KL(pi, ref)" if in_loss[0] == pytest.approx(exact, rel=1e-12) else "no KL"
        cells = [f"`{kind}`", value, *(named(one[1], candidates) for one in (in_loss, in_reward))]
        rows.append(f"| {' | '.join(cells)} |")
    table = PAGE.read_text().partition("<!-- kl -->")[2].partition("<!-- /kl -->")[0]
    assert table.strip().splitlines()[2:] == rows


def test_k1_in_the_reward_has_the_gradient_of_whole_responses() -> None:
    """A token's share of the loss leaves out what follows it, and the sum in the reward does not."""
    counts = torch.tensor([[2, 1], [1, 2], [2, 1]])
    policy, reference = Policy(counts.log()), torch.tensor([[0.5, 0.5], [0.2, 0.8], [0.9, 0.1]])
    responses = [
        pair
        for pair in itertools.product(range(2), repeat=2)
        for _ in range(int(counts[0, pair[0]] * counts[1 + pair[0], pair[1]]))
    ]
    table = torch.log_softmax(policy.logits, -1)
    every = torch.tensor(list(itertools.product(range(2), repeat=2)))
    log_p, log_q = scored(table, every).sum(-1), scored(reference.log(), every).sum(-1)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), policy.logits)
    keys = {"ratio": "trajectory", "aggregation": "constant", "aggregation_length": 2}
    _, found = measured(torch.tensor(responses), policy, reference, kl_estimator="k1", kl_in="reward", **keys)
    torch.testing.assert_close(found, exact, **EXACT)
    _, by_token = measured(
        torch.tensor(responses),
        policy,
        reference,
        kl_estimator="k2",
        kl_in="loss",
        aggregation="constant",
        aggregation_length=1,
    )
    assert not torch.allclose(by_token, exact, rtol=0.1)
