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

from torchrl_grpo.models.scoring.scores import CandidateScores, TokenScores

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

    def forward(
        self, prompt: Tensor, mask: Tensor, response: Tensor, *more: Tensor
    ) -> TokenScores | CandidateScores:
        table = torch.log_softmax(self.logits, -1)
        log_probs = scored(table, response)
        entropy = torch.zeros_like(log_probs)
        if len(more) < 3:
            return TokenScores(log_probs, entropy)
        return CandidateScores(log_probs, entropy, of_candidates(table, response, more[2]))


def scored(table: Tensor, response: Tensor) -> Tensor:
    """Log-probabilities of tokens: row 0 of the table is for the first token, row 1 + v for one after v."""
    return scored_after(table, response, response)


def of_candidates(table: Tensor, response: Tensor, candidates: Tensor) -> Tensor:
    """Log-probabilities of candidates ``[P, G, K, T]`` for the places of tokens."""
    return torch.stack([scored_after(table, response, column) for column in candidates.unbind(2)], 2)


def scored_after(table: Tensor, response: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of other tokens after the prefixes of a response."""
    before = torch.cat([torch.zeros_like(response[..., :1]), response[..., :-1] + 1], -1)
    return table[before, tokens]


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
    names = [name for name, candidate in candidates.items() if torch.allclose(gradient, candidate, **EXACT)]
    assert len(names) <= 1
    return names[0] if names else "of no KL"


def test_the_page_s_table_of_values_and_gradients_is_exact() -> None:
    policy = Policy(torch.tensor([COUNTS]).log())
    reference = torch.tensor([REFERENCE])
    tokens = torch.tensor([token for token, count in enumerate(COUNTS) for _ in range(count)])[:, None]
    log_p, log_q = torch.log_softmax(policy.logits[0], -1), reference[0].log()
    forward, reverse = (log_p.exp() * (log_p - log_q)).sum(), (log_q.exp() * (log_q - log_p)).sum()
    exact = forward.item()
    of_policy, of_reference = (
        torch.autograd.grad(divergence, policy.logits, retain_graph=True)[0]
        for divergence in (forward, reverse)
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
        cells = [f"`{kind}`", value, *(named(result[1], candidates) for result in (in_loss, in_reward))]
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
    _, gradient = measured(
        torch.tensor(responses), policy, reference, kl_estimator="k1", kl_in="reward", **keys
    )
    torch.testing.assert_close(gradient, exact, **EXACT)
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


def _gradients(policy: Policy, prefixes: Tensor, reference: Tensor) -> Tensor:
    """Gradient of the KL divergence of the next token, weighted by the use of each row of the table."""
    log_p = torch.log_softmax(policy.logits, -1)
    by_row = (log_p.exp() * (log_p - reference.log())).sum(-1)
    (gradient,) = torch.autograd.grad((prefixes * by_row).sum(), policy.logits)
    return gradient


def distilled(batch: TensorDict, policy: Policy, **keys: Any) -> tuple[float, Tensor]:
    """Measured reverse KL, and gradient of the loss, with a teacher."""
    settings = {"distill_coef": 1.0, "advantage_estimator": "none", "advantage_std": "none", **keys}
    loss, advantage = make_objective(policy, **settings)
    terms = loss(advantage.inv(batch))
    (gradient,) = torch.autograd.grad(sum(terms[name] for name in loss.out_keys), policy.logits)
    return float(terms["reverse_kl"]), gradient


@pytest.mark.parametrize("coef", [1.0, 0.25])
def test_distillation_minimizes_the_exact_reverse_kl(coef: float) -> None:
    policy, teacher = Policy(torch.tensor([COUNTS]).log()), torch.tensor([REFERENCE])
    tokens = torch.tensor([token for token, count in enumerate(COUNTS) for _ in range(count)])[:, None]
    value, gradient = distilled(batch_of(tokens, policy, teacher), policy, distill_coef=coef)
    log_p = torch.log_softmax(policy.logits[0], -1).detach()
    assert value == pytest.approx(float((log_p.exp() * (log_p - teacher[0].log())).sum()), rel=1e-12)
    torch.testing.assert_close(gradient, coef * _gradients(policy, torch.ones(1), teacher), **EXACT)


def test_distillation_takes_each_token_s_own_divergence() -> None:
    """A token answers for the divergence at its own place, after the prefixes that the policy samples."""
    policy, teacher, responses, prefixes = _two_tokens()
    value, gradient = distilled(batch_of(responses, policy, teacher), policy)
    # The loss is the mean over tokens, of which each response has two.
    torch.testing.assert_close(gradient, _gradients(policy, prefixes, teacher) / 2, **EXACT)
    log_p = torch.log_softmax(policy.logits, -1).detach()
    exact = (prefixes * (log_p.exp() * (log_p - teacher.log())).sum(-1)).sum() / 2
    assert value == pytest.approx(float(exact), rel=1e-12)


def test_distillation_of_older_samples_has_the_present_policy_s_gradient() -> None:
    """The ratio weighs samples of an older policy, and the advantage is that of the present one."""
    older, teacher = Policy(torch.tensor([COUNTS]).log()), torch.tensor([REFERENCE])
    tokens = torch.tensor([token for token, count in enumerate(COUNTS) for _ in range(count)])[:, None]
    policy = Policy(torch.tensor([[0.3, -0.2, 0.1, 0.4]]))
    batch = batch_of(tokens, older, teacher)
    _, gradient = distilled(batch, policy, clip_epsilon=1.0, clip_epsilon_high=100.0)
    torch.testing.assert_close(gradient, _gradients(policy, torch.ones(1), teacher), **EXACT)


def test_distillation_is_added_to_the_advantage_of_rewards() -> None:
    policy, teacher, responses, prefixes = _two_tokens()
    batch = batch_of(responses, policy, teacher)
    batch["next", "reward"] = responses.sum(-1).to(torch.get_default_dtype())[None, :, None]
    _, both = distilled(batch.clone(), policy, advantage_estimator="group_mean", distill_coef=0.5)
    loss, advantage = make_objective(policy, advantage_std="none")
    terms = loss(advantage.inv(batch.clone()))
    (rewards,) = torch.autograd.grad(terms["loss_objective"], policy.logits)
    torch.testing.assert_close(both, rewards + _gradients(policy, prefixes, teacher) / 4, **EXACT)


def test_every_group_has_a_signal_with_a_teacher() -> None:
    """Groups of equal rewards, and of one response, get a gradient too."""
    policy, teacher = Policy(torch.tensor([COUNTS]).log()), torch.tensor([REFERENCE])
    batch = batch_of(torch.tensor([[1]]), policy, teacher)
    loss, advantage = make_objective(policy, distill_coef=1.0, advantage_estimator="none")
    batch = advantage.inv(batch)
    assert not advantage.no_signal_mask(batch).any()
    assert loss.has_gradient(batch).all()
    assert float(batch["advantage"]) == 0.0


def _two_tokens() -> tuple[Policy, Tensor, Tensor, Tensor]:
    """A policy of two tokens, its teacher, a group with its expectations, and the use of each row."""
    counts = torch.tensor([[2, 1], [1, 2], [2, 1]])
    policy, teacher = Policy(counts.log()), torch.tensor([[0.5, 0.5], [0.2, 0.8], [0.9, 0.1]])
    responses = [
        pair
        for pair in itertools.product(range(2), repeat=2)
        for _ in range(int(counts[0, pair[0]] * counts[1 + pair[0], pair[1]]))
    ]
    return policy, teacher, torch.tensor(responses), torch.tensor([1.0, 2 / 3, 1 / 3])


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_sum_over_candidates_and_the_rest_is_the_divergence_of_that_partition(count: int) -> None:
    """Against a loop over the tokens; with the whole vocabulary it is the exact divergence."""
    policy, teacher = Policy(torch.tensor([COUNTS]).log()), torch.tensor([REFERENCE])
    tokens = torch.tensor([[0], [3], [3]])
    batch = with_candidates(batch_of(tokens, policy, teacher), teacher, count)
    value, gradient = distilled(batch, policy, distill_top_k=count, distill_coef=0.5)
    p, q = torch.softmax(policy.logits[0], -1), teacher[0]
    kept = sorted(range(4), key=lambda token: -REFERENCE[token])[:count]
    divergence = torch.zeros(())
    rest, others = torch.ones(()), torch.ones(())
    for token in kept:
        divergence = divergence + p[token] * torch.log(p[token] / q[token])
        rest, others = rest - p[token], others - q[token]
    if count < 4:
        divergence = divergence + rest * torch.log(rest / others)
    (expected,) = torch.autograd.grad(0.5 * divergence, policy.logits, retain_graph=True)
    assert value == pytest.approx(float(divergence), rel=1e-9)
    torch.testing.assert_close(gradient, expected, atol=1e-9, rtol=1e-9)
    exact = float((p * (p / q).log()).sum())
    assert value == pytest.approx(exact, rel=1e-9) if count == 4 else value < exact


def test_candidates_are_summed_after_each_sampled_prefix() -> None:
    policy, teacher, responses, prefixes = _two_tokens()
    batch = with_candidates(batch_of(responses, policy, teacher), teacher, 2)
    _, gradient = distilled(batch, policy, distill_top_k=2)
    # Both tokens are candidates, so the sum is exact, and each response has two tokens.
    expected = _gradients(policy, prefixes, teacher) / 2
    torch.testing.assert_close(gradient, expected, atol=1e-9, rtol=1e-9)


def with_candidates(batch: TensorDict, teacher: Tensor, count: int) -> TensorDict:
    """The batch with the teacher's most probable tokens for each place."""
    response = batch["tokens", "response"]
    before = torch.cat([torch.zeros_like(response[..., :1]), response[..., :-1] + 1], -1)
    top = teacher.log()[before].topk(count, -1)
    batch["tokens", "candidates"] = top.indices.transpose(2, 3)
    batch["log_probs", "candidates"] = top.values.transpose(2, 3)
    return batch
