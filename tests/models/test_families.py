"""Each family is either right, gradients included, or refused in one clear line."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from families import FAMILIES, PLAIN, RECOMPUTED, SHARED, VOCAB, build
from rounding import EXACT
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_grpo.config.schema import TrainModelConfig
from torchrl_grpo.errors import ModelError
from torchrl_grpo.models.prepare import prepare_for_training, shares_prefix
from torchrl_grpo.models.scoring.padding import pad_left, pad_right
from torchrl_grpo.models.scoring.token_scorer import TokenScorer

pytestmark = pytest.mark.slow

TEMPERATURE = 0.7

CASES = [(name, False) for name in FAMILIES] + [(name, True) for name in RECOMPUTED]


def ragged() -> tuple[list[list[int]], list[list[list[int]]]]:
    """Prompts, one of them twice, and three responses to each: none, one token, and longer than windows."""
    generator = torch.Generator().manual_seed(0)

    def words(count: int) -> list[int]:
        return torch.randint(3, VOCAB, (count,), generator=generator).tolist()

    prompts = [words(n) for n in (19, 3, 11)]
    lengths = [[17, 1, 4], [2, 17, 9], [1, 1, 1], [0, 5, 17]]
    return [*prompts, prompts[1]], [[words(n) for n in row] for row in lengths]


def one_by_one(model: PreTrainedModel, slopes: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probabilities, entropies and gradients, one sequence at a time through the model's own forward."""
    model = copy.deepcopy(model)
    chosen, entropies = [], []
    prompts, responses = ragged()
    for prompt, response in ((p, r) for p, row in zip(prompts, responses, strict=True) for r in row if r):
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0]
        log_probs = (logits[len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
        chosen.append(log_probs.gather(1, torch.tensor(response)[:, None])[:, 0])
        entropies.append(-(log_probs.exp() * log_probs).sum(-1))
    scores, entropy = torch.cat(chosen), torch.cat(entropies)
    (scores * slopes + 0.3 * entropy).sum().backward()
    return scores.detach(), entropy.detach(), dict(gradients(model))


def gradients(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    return [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", "recompute"), CASES, ids=[f"{n}{' again' * r}" for n, r in CASES])
@pytest.mark.filterwarnings("ignore:.*prompts are run once per response")
def test_log_probabilities_and_gradients_are_exact_or_the_model_is_refused(
    name: str, recompute: bool
) -> None:
    kind, settings, outcome = (RECOMPUTED if recompute else FAMILIES)[name]
    model = build(kind, settings)
    prompts, responses = ragged()
    slopes = torch.randn(75, generator=torch.Generator().manual_seed(5))
    expected, entropy, right = one_by_one(model, slopes)
    try:
        prepare_for_training(model, TrainModelConfig(gradient_checkpointing=recompute))
        shared = shares_prefix(model)
    except ModelError as error:
        assert outcome in str(error) and "\n" not in str(error) and outcome not in (SHARED, PLAIN)
        return
    assert outcome == (SHARED if shared else PLAIN)
    prompt, prompt_mask = pad_left(prompts, 0)
    response, mask = (
        x.view(4, 3, -1) for x in pad_right([r for row in responses for r in row], 0, torch.int64)
    )
    scorer = TokenScorer(model, TEMPERATURE, None, shared, block_elements=1000, entropy_gradient=True)
    scores = scorer(prompt, prompt_mask, response, mask)
    log_probs, its_entropy = scores.log_probs[mask], scores.entropy[mask]
    (log_probs * slopes + 0.3 * its_entropy).sum().backward()
    log_probs, its_entropy = log_probs.detach(), its_entropy.detach()
    torch.testing.assert_close(log_probs, expected, **EXACT)
    torch.testing.assert_close(its_entropy, entropy, **EXACT)
    # By size, over all parameters; one that no token reaches has none.
    nothing, ours = torch.zeros(()), dict(gradients(model))
    names = {*ours, *right}
    off = sum(float((ours.get(n, nothing) - right.get(n, nothing)).square().sum()) for n in names)
    size = sum(float(gradient.square().sum()) for gradient in right.values())
    assert (off / size) ** 0.5 < EXACT["rtol"]


def test_there_are_many() -> None:
    assert len(FAMILIES) + len(RECOMPUTED) >= 40
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shares_prefix(build(*FAMILIES["llama"][:2]))
