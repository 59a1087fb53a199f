"""The loss as a user of TorchRL meets it: parameters, dispatch, keys, TorchRL's own modules as the actor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import gradients, inputs, make_batch, make_model, make_objective
from rounding import EQUAL, EXACT
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from tiny_model import build_tiny_model
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from torchrl_grpo.config.schema import PolicyConfig
from torchrl_grpo.config.values import Aggregation
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.objectives.loss import GroupPolicyLoss

READ = [("tokens", "prompt"), ("masks", "prompt"), ("tokens", "response"), ("masks", "response")]


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model()


@pytest.fixture
def batch(model: PreTrainedModel) -> TensorDict:
    """Log-probabilities are near the model's own, so that ratios are on both sides of the clip."""
    data = make_batch(P=3, G=3, seed=2)
    with torch.no_grad():
        own = TokenScorer(model)(*inputs(data)).log_probs
    g = torch.Generator().manual_seed(1)
    for key in ("response", "reference"):
        data["log_probs", key] = (own + 0.3 * torch.randn(own.shape, generator=g)) * data["masks", "response"]
    return data


def total(terms: TensorDict) -> Tensor:
    return torch.stack([value for name, value in terms.items() if name.startswith("loss_")]).sum()


def backward(model: PreTrainedModel, loss: Callable[[], Tensor]) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    value = loss()
    value.backward()
    return float(value.detach()), gradients(model)


def assert_same(first: tuple[float, dict[str, Tensor]], other: tuple[float, dict[str, Tensor]]) -> None:
    assert first[0] == pytest.approx(other[0], **EQUAL)
    assert max(float(g.abs().max()) for g in other[1].values()) > 1e-3, "nothing was compared"
    for name, gradient in other[1].items():
        torch.testing.assert_close(
            first[1][name],
            gradient,
            **EXACT,
            msg=lambda m, n=name: f"{n}: {m}",  # type: ignore[misc]
        )


def module_around(scorer: nn.Module, entropy: bool = True, log_prob: Any = ("log_probs", "response")) -> Any:
    return TensorDictModule(scorer, in_keys=READ, out_keys=[log_prob, "entropy" if entropy else "_"])


# --- parameters ------------------------------------------------------------------------------------


def test_an_optimizer_over_the_parameters_of_the_loss_trains_the_model(
    model: PreTrainedModel, batch: TensorDict
) -> None:
    loss = GroupPolicyLoss(TokenScorer(model))
    assert {id(p) for p in loss.parameters()} == {id(p) for p in model.parameters()}
    assert len(list(loss.parameters())) == len(list(model.parameters())), "found twice"
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(loss.parameters(), lr=1e-4)
    first = total(loss(batch))
    first.backward()
    optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert float(total(loss(batch)).detach()) < float(first.detach())


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_a_batch_without_a_token_to_learn_from_has_no_loss(
    model: PreTrainedModel, batch: TensorDict, aggregation: Aggregation
) -> None:
    loss = GroupPolicyLoss(TokenScorer(model), PolicyConfig(aggregation=aggregation), constant_length=8)
    mask = loss.tensor_keys.loss_mask
    batch[mask] = torch.zeros_like(batch[mask])
    terms = loss(batch)
    assert {name: float(value.detach()) for name, value in terms.items()} == dict.fromkeys(terms.keys(), 0.0)
    total(terms).backward()
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_the_state_of_the_loss_is_the_state_of_the_model(batch: TensorDict) -> None:
    loss, other = (GroupPolicyLoss(TokenScorer(make_model(seed=seed))) for seed in (0, 1))
    assert float(loss(batch)["loss_objective"].detach()) != float(other(batch)["loss_objective"].detach())
    other.load_state_dict(loss.state_dict())
    assert float(loss(batch)["loss_objective"].detach()) == float(other(batch)["loss_objective"].detach())


def test_casts_of_the_loss_reach_the_model(model: PreTrainedModel, batch: TensorDict) -> None:
    loss = GroupPolicyLoss(TokenScorer(model))
    expected = float(loss(batch)["loss_objective"].detach())
    assert loss.double() is loss
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert float(loss(batch)["loss_objective"].detach()) == pytest.approx(expected, abs=1e-5)
    loss.float()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert float(loss(batch)["loss_objective"].detach()) == pytest.approx(expected, abs=1e-6)
    assert {p.device.type for p in loss.to("meta").actor_network.model.parameters()} == {"meta"}


def test_a_network_that_several_ranks_hold_adds_no_parameters(
    model: PreTrainedModel, batch: TensorDict
) -> None:
    class Held(nn.Module):
        """As DistributedDataParallel: a module around the scorer."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module, self.calls = module, 0

        def forward(self, *arguments: Tensor) -> Any:
            self.calls += 1
            return self.module(*arguments)

    loss = GroupPolicyLoss(TokenScorer(model))
    names = [name for name, _ in loss.named_parameters()]
    held = Held(loss.actor_network)
    loss.set_network(held)
    loss(batch)
    assert held.calls == 1
    assert [name for name, _ in loss.named_parameters()] == names
    assert all(name.startswith("actor_network.model.") for name in names)


def test_the_stateful_network_of_the_loss_is_the_actor(model: PreTrainedModel) -> None:
    actor = TokenScorer(model)
    assert GroupPolicyLoss(actor).get_stateful_net("actor_network") is actor


@pytest.mark.usefixtures("float64")
def test_an_actor_is_enough_for_a_loss(model: PreTrainedModel, batch: TensorDict) -> None:
    expected = make_objective(TokenScorer(model))[0](batch)
    assert_equal_terms(GroupPolicyLoss(TokenScorer(model))(batch), expected)
    with pytest.raises(ValueError, match="constant_length"):
        GroupPolicyLoss(TokenScorer(model), PolicyConfig(aggregation=Aggregation("constant")))


def assert_equal_terms(terms: TensorDict, expected: TensorDict) -> None:
    assert terms.keys() == expected.keys()
    for name, value in expected.items():
        assert float(terms[name].detach()) == pytest.approx(float(value.detach()), **EQUAL), name


# --- calls and keys --------------------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("keys", [{}, {"kl_coef": 0.1, "entropy_coef": 0.01}, {"proximal": "trainer"}])
def test_tensors_by_position_and_by_name_give_the_terms_of_the_batch(
    model: PreTrainedModel, batch: TensorDict, keys: Any
) -> None:
    batch["log_probs", "proximal"] = batch["log_probs", "reference"]
    loss, _ = make_objective(TokenScorer(model), **keys)
    direct = backward(model, lambda: total(loss(batch)))

    def added(terms: Any) -> Tensor:
        terms = terms if isinstance(terms, tuple) else (terms,)
        assert len(terms) == len(loss.out_keys)
        return torch.stack(terms).sum()

    by_name = {"_".join(k) if isinstance(k, tuple) else k: batch[k] for k in loss.in_keys}
    assert_same(backward(model, lambda: added(loss(*(batch[key] for key in loss.in_keys)))), direct)
    assert_same(backward(model, lambda: added(loss(**by_name))), direct)


@pytest.mark.usefixtures("float64")
def test_keys_can_be_renamed(model: PreTrainedModel, batch: TensorDict) -> None:
    loss, _ = make_objective(TokenScorer(model), kl_coef=0.1)
    expected = loss(batch)
    loss.set_keys(advantage="mine", sample_log_prob=("engine", "log_probs"), prompt=("ids", "prompt"))
    renamed = batch.clone()
    renamed.rename_key_("advantage", "mine")
    renamed["engine", "log_probs"] = renamed.pop(("log_probs", "response"))
    renamed["ids", "prompt"] = renamed.pop(("tokens", "prompt"))
    assert {"mine", ("engine", "log_probs"), ("ids", "prompt")} <= set(loss.in_keys)
    assert_equal_terms(loss(renamed), expected)
    by_name = {"_".join(k) if isinstance(k, tuple) else k: renamed[k] for k in loss.in_keys}
    assert float(loss(**by_name)[0].detach()) == float(expected["loss_objective"].detach())


def test_out_keys_are_written_and_can_be_selected_and_reset(
    model: PreTrainedModel, batch: TensorDict
) -> None:
    loss, _ = make_objective(TokenScorer(model), kl_coef=0.1, entropy_coef=0.01)
    assert loss.out_keys == ["loss_objective", "loss_kl", "loss_entropy"]
    assert set(loss.out_keys) <= set(loss(batch).keys())
    expected = loss(batch)
    loss.select_out_keys("loss_objective", "loss_kl")
    assert set(loss(batch).keys()) == set(loss.out_keys) == {"loss_objective", "loss_kl"}
    assert loss.out_keys_source == ["loss_objective", "loss_kl", "loss_entropy"]
    by_position = loss(*(batch[key] for key in loss.in_keys))
    assert [float(t.detach()) for t in by_position] == [float(expected[k].detach()) for k in loss.out_keys]
    loss.reset_out_keys()
    assert loss.out_keys == ["loss_objective", "loss_kl", "loss_entropy"]
    assert loss(batch).keys() == expected.keys()


# --- TorchRL's modules as the actor ----------------------------------------------------------------


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("keys", [{}, {"kl_coef": 0.1, "aggregation": "sequence"}, {"entropy_coef": 0.01}])
def test_a_tensordict_module_is_an_actor(model: PreTrainedModel, batch: TensorDict, keys: Any) -> None:
    scorer = TokenScorer(model)
    direct, _ = make_objective(scorer, **keys)
    loss, _ = make_objective(module_around(scorer), **keys)
    sampled = batch["log_probs", "response"].clone()
    assert_same(backward(model, lambda: total(loss(batch))), backward(model, lambda: total(direct(batch))))
    assert_equal_terms(loss(batch), direct(batch))
    assert loss.in_keys == direct.in_keys and len(list(loss.parameters())) == len(list(model.parameters()))
    # The actor writes where the engine's log-probabilities are, but not into the batch.
    assert torch.equal(batch["log_probs", "response"], sampled)
    by_position = loss(*(batch[key] for key in loss.in_keys))
    first = by_position[0] if isinstance(by_position, tuple) else by_position
    assert float(first.detach()) == pytest.approx(float(direct(batch)["loss_objective"].detach()), **EQUAL)


def test_a_module_reads_what_it_asks_for_and_its_padding_does_not_matter(batch: TensorDict) -> None:
    class Free(nn.Module):
        def __init__(self, values: Tensor) -> None:
            super().__init__()
            self.values = nn.Parameter(values)

        def forward(self, features: Tensor) -> Tensor:
            return self.values * features

    mask = batch["masks", "response"]
    values = torch.where(mask, batch["log_probs", "response"] + 0.1, torch.tensor(float("nan")))
    batch["features"] = torch.ones(())[None].expand(3)[:, None, None].expand(mask.shape).clone()
    actor = TensorDictModule(Free(values), in_keys=["features"], out_keys=["mine"])
    loss = GroupPolicyLoss(actor)
    loss.set_keys(actor_log_prob="mine")
    assert loss.in_keys[0] == "features" and ("tokens", "prompt") not in loss.in_keys
    total(loss(batch)).backward()
    gradient = actor.module.values.grad
    assert not gradient[~mask].any() and gradient[mask].any() and torch.isfinite(gradient[mask]).all()


def test_an_entropy_bonus_needs_an_actor_that_gives_entropies(
    model: PreTrainedModel, batch: TensorDict
) -> None:
    scorer = TokenScorer(model)
    loss, _ = make_objective(module_around(scorer, entropy=False))
    assert "entropy" not in loss(batch)
    loss, _ = make_objective(module_around(scorer, entropy=False), entropy_coef=0.1)
    with pytest.raises(ValueError, match=r"entropy.*policy\.entropy_coef"):
        loss(batch)


def test_an_actor_that_writes_elsewhere_or_another_shape_is_told(
    model: PreTrainedModel, batch: TensorDict
) -> None:
    actor = module_around(TokenScorer(model), log_prob="mine")
    loss = GroupPolicyLoss(actor)
    with pytest.raises(ValueError, match=r"\('log_probs', 'response'\).*set_keys\(actor_log_prob"):
        loss(batch)
    flat = TensorDictModule(
        lambda ids: ids.flatten(1).float(), in_keys=[READ[2]], out_keys=[("log_probs", "response")]
    )
    with pytest.raises(ValueError, match=r"shape \[3, 18\].*\[3, 3, 6\]"):
        GroupPolicyLoss(flat)(batch)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(build_tiny_model(tmp_path_factory.mktemp("tiny")))


def wrapper(*arguments: Any, **options: Any) -> Any:
    """A ``TransformersWrapper``. Its module imports vLLM, which takes seconds."""
    from torchrl.modules.llm import TransformersWrapper

    return TransformersWrapper(*arguments, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("pad_output", [True, False])
@pytest.mark.parametrize("keys", [{}, {"kl_coef": 0.1, "ratio": "sequence"}])
def test_the_wrapper_of_torchrl_is_an_actor(
    model: PreTrainedModel, batch: TensorDict, tokenizer: Any, pad_output: bool, keys: Any
) -> None:
    actor = wrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=pad_output)
    # One response without a token, as truncated ones can be; the pad token stands inside prompts.
    batch["masks", "response"][0, 0] = batch["masks", "loss"][0, 0] = False
    direct, _ = make_objective(TokenScorer(model), **keys)
    loss, _ = make_objective(actor, **keys)
    assert_same(backward(model, lambda: total(loss(batch))), backward(model, lambda: total(direct(batch))))
    expected = direct(batch)
    assert_equal_terms(loss(batch), expected.exclude("entropy"))
    assert loss.in_keys == direct.in_keys
    assert {id(p) for p in loss.parameters()} == {id(p) for p in model.parameters()}
    by_position = loss(*(batch[key] for key in loss.in_keys))
    first = by_position[0] if isinstance(by_position, tuple) else by_position
    assert float(first.detach()) == pytest.approx(float(expected["loss_objective"].detach()), **EQUAL)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"input_mode": "text"}, {"input_mode": "history"}])
def test_a_wrapper_that_would_tokenize_again_is_refused(
    model: PreTrainedModel, tokenizer: Any, options: Any
) -> None:
    actor = wrapper(model, tokenizer=tokenizer, generate=False, **options)
    with pytest.raises(ValueError, match="input_mode='tokens'"):
        GroupPolicyLoss(actor)


@pytest.mark.slow
def test_a_wrapper_that_generates_is_refused(model: PreTrainedModel, tokenizer: Any) -> None:
    actor = wrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=True)
    with pytest.raises(ValueError, match="generate=False"):
        GroupPolicyLoss(actor)
