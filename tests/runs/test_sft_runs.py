"""Whole runs of supervised fine-tuning: against a plain loop, over ranks, resumed, and with adapters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_script
from tiny_runs import Runner, config, train  # noqa: F401  fixtures
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks import validate
from torchrl_grpo.config.checks.schedule import check_method
from torchrl_grpo.config.values import AdvantageEstimator, AnswerFormat, KLIn, Surrogate, TrainMethod
from torchrl_grpo.errors import ConfigError, DataError
from torchrl_grpo.tools.verify_resume import read, unmeasured

pytestmark = pytest.mark.slow


@pytest.fixture
def sft(config: Config, tmp_path: Path) -> Config:
    """Four steps on four solutions of sums each."""
    rows = [
        {"question": f"{a} plus {b}", "answer": str(a + b), "solution": f"It is {a + b}."}
        for a in range(6)
        for b in range(6)
    ]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.train.method, config.env.repeats = TrainMethod.sft, 1
    config.policy.surrogate = Surrogate.log_likelihood
    config.policy.advantage_estimator = AdvantageEstimator.reward
    config.train.total_dialog_turns = 16
    config.inference_model.max_new_tokens = 20
    config.optimizer.weight_decay = 0.0
    validate(config)
    check_method(config, TrainMethod.sft)
    return config


@pytest.mark.float32
@pytest.mark.parametrize("shared_prefix", [True, False])
def test_losses_and_weights_are_those_of_a_plain_loop(
    sft: Config, train: Runner, tmp_path: Path, shared_prefix: bool
) -> None:
    sft.train_model.shared_prefix = shared_prefix
    lines = train("run")
    tokenizer = AutoTokenizer.from_pretrained(sft.model.name)
    model = AutoModelForCausalLM.from_pretrained(sft.model.name, dtype=torch.float64)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=sft.optimizer.lr, betas=(0.9, 0.999), eps=sft.optimizer.eps, weight_decay=0.0
    )
    assert sft.optimizer.betas == [0.9, 0.999]
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in read(tmp_path / "run/rollouts.jsonl"):
        by_step.setdefault(row["step"], []).append(row)
    assert list(by_step) == [1, 2, 3, 4]
    for step, rows in by_step.items():
        losses = []
        for row in rows:
            prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
            answer = tokenizer(row["response"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            losses.append(F.cross_entropy(logits, torch.tensor(answer), reduction="none"))
        loss = torch.cat(losses).mean()
        assert lines[step]["loss/total"] == pytest.approx(loss.item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), sft.optimizer.max_grad_norm)
        assert lines[step]["optimizer/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        optimizer.step()
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/4/model")
    start = AutoModelForCausalLM.from_pretrained(sft.model.name)
    for (name, ours), plain in zip(trained.named_parameters(), model.parameters(), strict=True):
        # AdamW may turn the sign of an update whose gradient is almost 0, so single weights are not compared.
        assert (ours - plain).norm() < 1e-2 * (plain - start.get_parameter(name)).norm(), name
    assert lines[-1]["loss/total"] < lines[1]["loss/total"]


def test_metrics_are_those_of_solutions_and_the_model_is_evaluated(
    sft: Config, train: Runner, tmp_path: Path
) -> None:
    lines = train("run", eval__frequency=2, train__checkpoint_frequency=1, checkpoint__keep=9)
    names = set().union(*lines)
    of_sampling = ("reward/", "advantage/", "kl/", "mismatch/", "policy/", "throughput/generated")
    assert {name for name in names if name.startswith(of_sampling)} == {"policy/entropy"}
    assert {"loss/total", "response/length_mean", "response/truncated", "data/epoch"} <= names
    assert [line["step"] for line in lines if "eval/accuracy" in line] == [0, 2, 4]
    # The engine gets weights where it has to generate, and not for checkpoints.
    assert [line["step"] for line in lines if "publish/logprob_diff_mean" in line] == [2, 4]
    kept = str(tmp_path / "run/checkpoints/2")
    assert train("run", resume=kept, train__checkpoint_frequency=0) == lines
    lines = train("unmeasured", resume=None, eval__num_problems=0)
    assert not any(name.startswith(("publish/", "eval/")) for line in lines for name in line)


@pytest.mark.float32
def test_without_answers_the_loss_of_held_out_solutions_is_measured_also_by_a_resumed_run(
    sft: Config, train: Runner, tmp_path: Path
) -> None:
    rows = [{"question": f"{n} plus 1", "solution": f"It is {n + 1}, or {'so' * (n % 3)}"} for n in range(20)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft.reward.weights = {}
    with pytest.raises(ConfigError, match=r"train\.stop_at=20\.0: the loss .*; write train\.stop_at=-20$"):
        train("refused", train__stop_at=20.0)
    settings = {"train__checkpoint_frequency": 2, "checkpoint__keep": 9}
    whole = train("run", train__stop_at=None, **settings)
    held_out = read(tmp_path / "run/evaluations.jsonl")
    assert [row["step"] for row in held_out] == [step for step in (0, 2, 4) for _ in range(6)]
    tokenizer = AutoTokenizer.from_pretrained(sft.model.name)
    model = AutoModelForCausalLM.from_pretrained(sft.model.name, dtype=torch.float64)
    losses = []
    for row in held_out[:6]:
        prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        answer = tokenizer(row["response"] + "<|im_end|>", add_special_tokens=False)["input_ids"][:20]
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        losses.append(F.cross_entropy(logits, torch.tensor(answer), reduction="none"))
        assert row["grade"] == pytest.approx(losses[-1].mean().item(), rel=1e-5)
        assert row["tokens"] == len(answer)
    assert whole[0]["eval/loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    assert whole[-1]["eval/loss"] < whole[0]["eval/loss"] and "eval/accuracy" not in whole[-1]
    rollouts = read(tmp_path / "run/rollouts.jsonl")
    assert len({row["response"] for row in rollouts}) > 4
    assert train("run", resume=str(tmp_path / "run/checkpoints/2"), train__checkpoint_frequency=0) == whole
    assert read(tmp_path / "run/evaluations.jsonl") == held_out
    assert read(tmp_path / "run/rollouts.jsonl") == rollouts


@pytest.mark.float32
def test_two_ranks_follow_one(sft: Config, train: Runner, repo_root: Path, tmp_path: Path) -> None:
    alone = train("one")
    script = repo_root / "sota-implementations/sft/sft.py"
    words = [
        *("env=jsonl", "+method=sft", f"env.data_path={tmp_path}/sums.jsonl", "env.answer_format=plain"),
        *(f"hydra.run.dir={tmp_path}/two", f"model.name={sft.model.name}", "env.num_envs=4"),
        *("inference_model.backend=transformers", "inference_model.dtype=float32"),
        *("inference_model.max_model_len=200", "inference_model.max_new_tokens=20"),
        *('train_model.autocast="no"', "optimizer.lr=0.01", "optimizer.weight_decay=0.0"),
        "optimizer.eps=0.01",
        *("eval.num_problems=6", "eval.frequency=2", "train.total_dialog_turns=16"),
        *("train.checkpoint_frequency=0", "train_model.num_devices=2", "--config-name=grpo_gsm8k"),
    ]
    done = run_script([script, *words], ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    for line, other in zip(alone, map(unmeasured, read(tmp_path / "two/metrics.jsonl")), strict=True):
        shared = {name: value for name, value in line.items() if name in other}
        assert {"loss/total", "optimizer/grad_norm"} <= shared.keys() or line["step"] == 0
        assert {name: other[name] for name in shared} == pytest.approx(shared, rel=1e-3, abs=1e-4)


def test_adapters_and_a_reference_train(sft: Config, train: Runner) -> None:
    lines = train("run", train_model__lora=replace(sft.train_model.lora, rank=4), policy__kl_coef=0.1)
    assert lines[1]["kl/reference"] == pytest.approx(0.0, abs=1e-2) and lines[-1]["kl/reference"] > 0
    assert lines[-1]["loss/objective"] < lines[1]["loss/objective"]


def test_a_solution_that_is_too_long_is_cut(sft: Config, train: Runner, tmp_path: Path) -> None:
    lines = train("run", inference_model__max_new_tokens=3)
    assert lines[1]["response/truncated"] == 1.0 and lines[1]["response/length_max"] == 3
    masked = train("masked", policy__overlong="mask")
    assert "loss/total" not in masked[1], "nothing is left to learn"


def test_a_problem_without_a_solution_is_one_clear_message(
    sft: Config, train: Runner, tmp_path: Path
) -> None:
    (tmp_path / "sums.jsonl").write_text("".join(f'{{"question": "What is {n}?"}}\n' for n in range(30)))
    sft.env.fields = {"question": "question"}
    sft.reward.weights = {}
    sft.eval.num_problems = 0
    with pytest.raises(DataError, match=r"train\.method=sft: .* has no solution.*env\.fields"):
        train("run")


def test_a_grader_that_lacks_answers_is_refused_before_training(
    sft: Config, train: Runner, tmp_path: Path
) -> None:
    rows = [{"question": f"What is {n}?", "solution": f"It is {n}."} for n in range(30)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft.env.fields, sft.reward.weights = {}, {}
    with pytest.raises(
        ConfigError, match=r"eval.reward=exact_match: jsonl/train/\d+ has no answer.*eval\.num_problems=0"
    ):
        train("run", eval__reward="exact_match")
    sft.eval.reward = None
    assert [line["step"] for line in train("unmeasured", eval__num_problems=0)] == [1, 2, 3, 4]
    with pytest.raises(DataError, match=r"asks for an answer between <answer> .*env\.answer_format=plain"):
        train("tags", env__answer_format=AnswerFormat.tags)


@pytest.mark.parametrize(
    ("section", "key", "value", "says"),
    [
        ("env", "repeats", 4, "env.repeats=4: a problem has one solution"),
        ("policy", "surrogate", Surrogate.clip, "policy.surrogate=clip: a solution was not sampled"),
        ("policy", "kl_in", KLIn.reward, "policy.kl_in=reward: solutions have no rewards"),
        ("env", "tools", ["calculator"], "env.tools"),
        ("inference_model", "temperature", 0.7, "inference_model.temperature=0.7"),
        ("train", "method", TrainMethod.grpo, "train.method=grpo: this script learns from solutions"),
    ],
)
def test_what_solutions_cannot_have_is_refused(
    sft: Config, section: str, key: str, value: object, says: str
) -> None:
    setattr(getattr(sft, section), key, value)
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        check_method(sft, TrainMethod.sft)


def test_the_other_scripts_say_where_solutions_are_learned(sft: Config) -> None:
    with pytest.raises(
        ConfigError, match=r"train\.method=sft: this script learns from rewards.*call sft\.py"
    ):
        check_method(sft, TrainMethod.grpo)
