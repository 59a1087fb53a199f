"""The reference model of grpo-async.py in processes of its own: threads here, Ray in test_async_ray.py."""

from __future__ import annotations

import json
import math
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import local_pool
import pytest
import torch
from local_pool import LocalPool, LocalReference, collect_locally
from ray.exceptions import RayActorError
from tensordict import TensorDictBase
from tiny_runs import config  # noqa: F401  fixture
from torch import Tensor
from transformers import AutoModelForCausalLM

from torchrl_grpo.batch.micro_batches import TokenBudget
from torchrl_grpo.batch.schema import collate
from torchrl_grpo.checkpoints import checkpoint
from torchrl_grpo.config import Config
from torchrl_grpo.errors import WorkersLost
from torchrl_grpo.models.reference import load_reference
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.planning.placement import plan
from torchrl_grpo.planning.request import build_request
from torchrl_grpo.rollout import build
from torchrl_grpo.rollout.collector import Collector
from torchrl_grpo.rollout.groups import Group
from torchrl_grpo.rollout.log_prob_transform import LogProbScorer
from torchrl_grpo.rollout.round import Round
from torchrl_grpo.rollout.workers import reference_actors
from torchrl_grpo.rollout.workers.reference_actors import ReferenceActors, ReferenceScorer, ReferenceSpec
from torchrl_grpo.tools.verify_resume import read
from torchrl_grpo.training.job import run_async
from torchrl_grpo.training.session import Session


@pytest.fixture
def pools(config: Config, monkeypatch: pytest.MonkeyPatch) -> list[LocalPool]:
    """Workers and reference are threads; what was started."""
    config.policy.kl_coef = 0.1
    config.ref_model.num_devices = 1
    config.collector.max_policy_age = 2
    config.eval.num_problems = config.eval.frequency = 0
    created: list[LocalPool] = []
    monkeypatch.setattr(build, "collector_with_ray_workers", collect_locally(created))
    return created


@pytest.mark.parametrize("budget", [None, 12])
def test_a_group_is_scored_as_by_the_formula(config: Config, budget: int | None) -> None:
    config.inference_model.temperature = 0.7
    config.train.max_tokens_per_microbatch = budget
    scorer = ReferenceScorer(ReferenceSpec(config, config.model.name, 0, 1, False, None, True))
    prompt, responses = [5, 6, 7, 8], [[9, 10, 11, 12], [13], [14, 15, 16]]
    log_probs = scorer.log_probs(prompt, responses)
    model = AutoModelForCausalLM.from_pretrained(config.model.name).double()
    for response, values in zip(responses, log_probs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1)[range(len(response)), response]
        assert values == pytest.approx(expected.tolist(), abs=1e-5)


def test_micro_batches_have_the_size_that_the_model_itself_needs(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teacher may run a prompt once per response although the policy does not."""

    def unshared(*arguments: Any) -> TokenScorer:
        cfg, source, device, dtype, _ = arguments
        return load_reference(cfg, source, device, dtype, False)

    monkeypatch.setattr("torchrl_grpo.models.reference.load_reference", unshared)
    config.train.max_tokens_per_microbatch = 12
    sizes: list[int] = []
    score = TokenScorer.forward

    def counted(self: TokenScorer, prompt: Tensor, mask: Tensor, response: Tensor, *rest: Any) -> Any:
        sizes.append(response.shape[1])
        return score(self, prompt, mask, response, *rest)

    monkeypatch.setattr(TokenScorer, "forward", counted)
    scorer = ReferenceScorer(ReferenceSpec(config, config.model.name, 0, 1, False, None, True))
    sizes.clear()
    scorer.log_probs([5, 6, 7, 8], [[9, 10], [11, 12], [13, 14]])
    assert sizes == [2, 1]


@pytest.mark.parametrize(
    ("changes", "apart"),
    [
        ({}, 1),
        ({"ref_model__num_devices": 3}, 3),
        ({"ref_model__num_devices": "auto"}, 0),
        ({"collector__max_policy_age": 0}, 0),  # grpo.py to the last bit
        ({"ref_model__refresh_frequency": 2}, 0),
        ({"policy__kl_coef": 0.0}, 0),
        ({"train_model__lora": 4}, 0),
    ],
)
def test_when_it_has_processes(
    config: Config, pools: list[LocalPool], changes: dict[str, Any], apart: int
) -> None:
    for key, value in changes.items():
        group, _, leaf = key.partition("__")
        if leaf == "lora":
            config.train_model.lora.rank = value
        else:
            setattr(getattr(config, group), leaf, value)
    assert plan(build_request(config, asynchronous=True), 0).reference_actors == apart
    assert plan(build_request(config, asynchronous=False), 0).reference_actors == 0


@pytest.mark.slow
@pytest.mark.float32
def test_groups_come_with_what_the_trainer_would_have_found(
    config: Config, pools: list[LocalPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[Round] = []
    rollout = Collector.rollout

    def kept(self: Collector, is_refill: bool = False) -> Round:
        rounds.append(rollout(self, is_refill))
        return rounds[-1]

    monkeypatch.setattr(Collector, "rollout", kept)
    run_async(config, tmp_path / "run")
    assert len(rounds) == 4
    scorer = load_reference(config, config.model.name, torch.device("cpu"), None, shares_prefix=True)
    itself = LogProbScorer(scorer, "reference", TokenBudget(4096, True, notify=pytest.fail))
    for round_ in rounds:
        groups = collate(round_.groups.unbind(0))
        log_probs = groups["log_probs", "reference"].clone()
        expected = itself.inv(groups.clone())["log_probs", "reference"]
        torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)
        assert bool((log_probs[~groups["masks", "response"]] == 0).all())
    divergences = [line["kl/reference"] for line in read(tmp_path / "run/metrics.jsonl")]
    assert divergences[0] < 1e-6 < divergences[-1]


@pytest.mark.slow
def test_a_run_whose_trainer_scored_goes_on_with_processes_and_back(
    config: Config, pools: list[LocalPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.train.checkpoint_frequency, config.train.total_dialog_turns = 1, 96
    train_on = Session.train_on
    ends: list[int] = []

    def until_then(self: Session, batch: TensorDictBase) -> dict[str, float]:
        if self.counters.step == ends[-1]:
            raise InterruptedError
        return train_on(self, batch)

    monkeypatch.setattr(Session, "train_on", until_then)
    for devices, end in (("auto", 2), (1, 4)):
        config.ref_model.num_devices = devices
        ends.append(end)
        with pytest.raises(InterruptedError):
            run_async(config, tmp_path / "run")
        config.resume = "auto"
        state = checkpoint.load_state(tmp_path / "run/checkpoints" / str(end))
        waiting = [entry["reference"] is not None for entry in state["collector"]["accepted"]]
        assert waiting and all(waits == (devices == 1) for waits in waiting), "nothing to hand over"
    ends.append(9)
    config.ref_model.num_devices = "auto"
    run_async(config, tmp_path / "run")
    lines = read(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["kl/reference"] > 1e-6 for line in lines[1:])


@pytest.mark.slow
def test_a_reference_that_is_lost_stops_the_run_with_a_checkpoint(
    config: Config, pools: list[LocalPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(LocalReference):
        num_requests = 0

        def log_probs(self, group: Group) -> Future[list[list[float]]]:
            self.num_requests += 1
            if self.num_requests < 7:
                return super().log_probs(group)
            lost: Future[list[list[float]]] = Future()
            lost.set_exception(WorkersLost("a process of the reference model failed (killed)"))
            return lost

    with monkeypatch.context() as patch:
        patch.setattr(local_pool, "LocalReference", Broken)
        with pytest.raises(WorkersLost, match="reference model failed"):
            run_async(config, tmp_path / "run")
    config.resume = "auto"
    run_async(config, tmp_path / "run")
    books = json.loads((tmp_path / "run/summary.json").read_text())["groups"]
    assert books["trained"] == 16 and books["issued"] == 16 + books["dropped_age"] + books["left"]


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


class Remote:
    """Stands in for an actor: remembers what it is asked, and is told what to answer."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.kills = 0
        self.log_probs = SimpleNamespace(remote=lambda *arguments: self)
        self.__ray_ready__ = SimpleNamespace(remote=lambda: None)

    def options(self, **_: Any) -> Remote:
        return self

    def remote(self, spec: Any) -> Remote:
        return self


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> tuple[ReferenceActors, list[Remote], Clock]:
    actors, clock = [Remote() for _ in range(3)], Clock()
    made = iter(actors)

    def kill(actor: Remote, no_restart: bool) -> None:
        assert not no_restart
        actor.kills += 1

    fake = SimpleNamespace(remote=lambda _: next(made), get=lambda refs, timeout: None, kill=kill)
    monkeypatch.setattr(reference_actors, "ray", fake)
    monkeypatch.setattr(reference_actors, "time", clock)
    monkeypatch.setattr(reference_actors, "call_when_done", lambda actor, done: actor.calls.append(done))
    pool = SimpleNamespace(extra_actor_placement=lambda number: None)
    cfg = Config()
    spec = ReferenceSpec(cfg, "", 0, 1, False, None, True)
    return ReferenceActors(pool, spec, 3, limit_s=10.0), actors, clock  # type: ignore[arg-type]


def test_one_of_three_that_hangs_is_started_again(
    three: tuple[ReferenceActors, list[Remote], Clock],
) -> None:
    """However busy the others are, and however often it is asked meanwhile."""
    reference, actors, clock = three
    group = Group(0, [1], 0, [])
    assert reference.deadline() == math.inf
    for _ in range(9):
        reference.log_probs(group)
    assert [len(actor.calls) for actor in actors] == [3, 3, 3]
    for _ in range(3):
        clock.now += 4.0
        for actor in actors[1:]:
            actor.calls.pop(0)([[0.5]])
        reference.log_probs(group)
    assert (reference.deadline(), [actor.kills for actor in actors]) == (110.0, [0, 0, 0])
    reference.restart_timed_out()
    assert [actor.kills for actor in actors] == [1, 0, 0]
    assert reference.deadline() > clock.now, "it has time to start"


def test_groups_go_to_whoever_has_least_to_do(three: tuple[ReferenceActors, list[Remote], Clock]) -> None:
    reference, actors, _ = three
    answers = [reference.log_probs(Group(number, [1], 0, [])) for number in range(3)]
    actors[1].calls.pop()([[0.25]])
    assert answers[1].result(timeout=0) == [[0.25]] and not answers[0].done()
    reference.log_probs(Group(3, [1], 0, []))
    assert [len(actor.calls) for actor in actors] == [1, 1, 1]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("CUDA error: misaligned\nCompile with X"),
            r"\(CUDA error: misaligned\); fix the cause and .* resume=auto",
        ),
        (
            RayActorError(error_msg="The actor died.\n  File x\nMemoryError: no room"),
            r"\(MemoryError: no room\); it died more than collector\.max_restarts times; fix .* resume=auto",
        ),
    ],
)
def test_what_a_failure_says(
    three: tuple[ReferenceActors, list[Remote], Clock], error: Exception, message: str
) -> None:
    reference, actors, _ = three
    answer = reference.log_probs(Group(0, [1], 0, []))
    actors[0].calls.pop()(error)
    with pytest.raises(WorkersLost, match=message):
        answer.result(timeout=0)


@pytest.mark.parametrize(
    ("teacher", "name"),
    [
        (None, r"ref_model\.num_devices=1: .* reference model"),
        ("t", r"teacher_model\.num_devices=1: .* teacher"),
    ],
)
def test_a_process_that_does_not_start_names_its_own_key(
    monkeypatch: pytest.MonkeyPatch, teacher: str | None, name: str
) -> None:
    def get(refs: list[Any], timeout: float) -> None:
        raise RayActorError(error_msg="no room")

    monkeypatch.setattr(reference_actors, "ray", SimpleNamespace(remote=lambda _: Remote(), get=get))
    cfg = Config()
    cfg.policy.distill_coef, cfg.teacher_model.name = float(teacher is not None), teacher
    pool = SimpleNamespace(extra_actor_placement=lambda number: None)
    spec = ReferenceSpec(cfg, "", 0, 1, False, None, True)
    with pytest.raises(WorkersLost, match=rf"{name} could not be started \(no room\)"):
        ReferenceActors(pool, spec, 1, limit_s=10.0)  # type: ignore[arg-type]


def test_a_teacher_that_fails_later_is_called_a_teacher() -> None:
    lost = reference_actors._lost("teacher", RuntimeError("killed"))
    assert str(lost).startswith("a process of the teacher failed (killed)")
