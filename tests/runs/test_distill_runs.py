"""Whole runs with a teacher: its word on each token, resumed, with adapters, in a process of its own."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest
import torch
from local_pool import LocalPool, collect_locally
from run_files import inflated, payload
from tensordict import TensorDictBase
from tiny_model import build_tiny_model
from tiny_runs import Runner, config, train, without_eval  # noqa: F401  fixtures
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import AdvantageEstimator
from torchrl_grpo.errors import DataError, ModelError
from torchrl_grpo.rollout import build
from torchrl_grpo.rollout.buffer import GroupBuffer
from torchrl_grpo.tools.verify_resume import read
from torchrl_grpo.training.job import run_async

pytestmark = [pytest.mark.slow, pytest.mark.float32]


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the policy's tokenizer."""
    return build_tiny_model(tmp_path_factory.mktemp("teacher"), seed=5)


@pytest.fixture(autouse=True)
def distill(config: Config, teacher: Path) -> None:
    config.policy.distill_coef = 1.0
    config.policy.advantage_estimator = AdvantageEstimator.none
    config.teacher_model.name = str(teacher)
    config.eval.num_problems = config.eval.frequency = 0


# The sampled token alone, or a sum over the teacher's most probable tokens.
both_estimates = pytest.mark.parametrize("top_k", [0, 8])


@both_estimates
def test_the_policy_comes_nearer_to_its_teacher(train: Runner, top_k: int) -> None:
    settings = {"train__total_dialog_turns": 160, "optimizer__lr": 3e-2, "optimizer__eps": 1e-8}
    lines = train("run", policy__distill_top_k=top_k, **settings)
    divergences = [line["distill/reverse_kl"] for line in lines]
    assert divergences[-1] < 0.7 * divergences[0]
    assert {line["advantage/abs_mean"] for line in lines} == {0.0}
    assert any(line["reward/mean"] > 0 for line in lines), "rewards are still measured"


def test_equal_rewards_are_no_warning_where_a_teacher_teaches(
    train: Runner, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    # A random model is never right.
    config.reward.weights = {"exact_match": 1.0}
    lines = train("run")
    assert {line["reward/constant_groups"] for line in lines} == {1.0}
    output = capsys.readouterr()
    assert "had the same reward" not in output.out + output.err


def test_the_report_has_the_teacher_s_word_on_each_token(train: Runner, tmp_path: Path) -> None:
    (line,) = train("run", train__total_dialog_turns=16, logging__token_details=16)
    rows = read(tmp_path / "run/rollouts.jsonl")
    trainer, teacher = (
        [number for row in rows for number in row["tokens"][name]] for name in ("trainer", "teacher")
    )
    mean = statistics.fmean(trainer) - statistics.fmean(teacher)
    assert line["distill/reverse_kl"] == pytest.approx(mean, abs=1e-4)
    texts = inflated(payload((tmp_path / "run/report.html").read_text())["runs"][0]["texts"]).decode()
    assert json.dumps(rows[0]["tokens"]["teacher"], separators=(",", ":"))[1:-1] in texts


def test_a_teacher_that_is_the_policy_says_nothing(train: Runner, config: Config) -> None:
    first = train("run", teacher_model__name=config.model.name, train__total_dialog_turns=16)[0]
    assert first["distill/reverse_kl"] == pytest.approx(0.0, abs=1e-5)
    assert first["optimizer/grad_norm"] == pytest.approx(0.0, abs=1e-5)


@both_estimates
def test_how_the_prompts_are_run_changes_nothing(train: Runner, top_k: int) -> None:
    settings = {"policy__distill_top_k": top_k, "train__total_dialog_turns": 16, "train__optim_batch_size": 8}
    whole = without_eval(train("shared", **settings))
    apart = without_eval(train("apart", train_model__shared_prefix=False))
    pieces = without_eval(
        train("pieces", train__max_tokens_per_microbatch=200, train_model__shared_prefix=True)
    )
    for others in (apart, pieces):
        for line, other in zip(whole, others, strict=True):
            assert other["distill/reverse_kl"] == pytest.approx(line["distill/reverse_kl"], abs=1e-5)
            assert other["loss/total"] == pytest.approx(line["loss/total"], abs=1e-5)


@both_estimates
def test_a_resumed_run_equals_an_uninterrupted_one(train: Runner, tmp_path: Path, top_k: int) -> None:
    settings = {"policy__distill_top_k": top_k, "train__optim_batch_size": 4, "policy__proximal": "trainer"}
    settings |= {"train__total_dialog_turns": 32, "train__checkpoint_frequency": 3, "checkpoint__keep": 9}
    whole = train("run", **settings)
    # The third step is inside of the first round.
    assert train("run", resume=str(tmp_path / "run/checkpoints/3"), train__checkpoint_frequency=0) == whole


def test_adapters_learn_from_a_teacher_beside_them(train: Runner, config: Config) -> None:
    config.train_model.lora.rank = 4
    lines = train("run", train__total_dialog_turns=160, optimizer__lr=1e-2, optimizer__eps=1e-8)
    assert lines[-1]["distill/reverse_kl"] < 0.9 * lines[0]["distill/reverse_kl"]


@both_estimates
def test_a_teacher_in_a_process_of_its_own_says_the_same(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top_k: int
) -> None:
    config.policy.distill_top_k, config.train.total_dialog_turns = top_k, 16
    pools: list[LocalPool] = []
    monkeypatch.setattr(build, "collector_with_ray_workers", collect_locally(pools))
    config.collector.max_policy_age = 1
    first = {}
    for devices in ("auto", 1):
        config.teacher_model.num_devices = devices
        run_async(config, tmp_path / str(devices))
        (first[devices],) = read(tmp_path / f"{devices}/metrics.jsonl")
    for name, least in (("distill/reverse_kl", 0.01), ("optimizer/grad_norm", 1e-3)):
        assert first[1][name] == pytest.approx(first["auto"][name], rel=1e-3)
        assert first[1][name] > least


def test_a_sum_over_all_tokens_is_what_the_sampled_ones_estimate(train: Runner) -> None:
    settings = {"train__total_dialog_turns": 256, "env__repeats": 64, "inference_model__max_new_tokens": 4}
    (sampled,) = train("sampled", **settings)
    # The tiny model has fewer tokens than this.
    (summed,) = train("summed", policy__distill_top_k=300)
    assert summed["distill/reverse_kl"] == pytest.approx(sampled["distill/reverse_kl"], rel=0.1)


@pytest.mark.parametrize("devices", ["auto", 1])
def test_a_teacher_reads_the_solution_that_the_policy_does_not_see(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int | str
) -> None:
    """Self-distillation: against the model's own forward pass on the prompt with the hint."""
    rounds: list[TensorDictBase] = []
    replace_contents = GroupBuffer.replace_contents

    def kept(self: GroupBuffer, groups: TensorDictBase) -> None:
        replace_contents(self, groups)
        rounds.append(self.contents())

    monkeypatch.setattr(GroupBuffer, "replace_contents", kept)
    pools: list[LocalPool] = []
    monkeypatch.setattr(build, "collector_with_ray_workers", collect_locally(pools))
    config.teacher_model.name, config.teacher_model.num_devices = config.model.name, devices
    config.teacher_model.hint = "It is {solution}."
    config.train.total_dialog_turns, config.collector.max_policy_age = 16, 1
    run_async(config, tmp_path / "run")
    (groups,) = rounds
    tokenizer = AutoTokenizer.from_pretrained(config.model.name)
    model = AutoModelForCausalLM.from_pretrained(config.model.name).double()
    for group in groups:
        (numbers,) = re.findall(r"(\d) plus (\d)", tokenizer.decode(group["tokens", "prompt"]))
        a, b = map(int, numbers)
        content = f"{a} plus {b}\n\nIt is {a + b}."
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
        )
        for g in range(4):
            response = group["tokens", "response"][g][group["masks", "response"][g]].tolist()
            with torch.no_grad():
                logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1)[range(len(response)), response]
            log_probs = group["log_probs", "reference"][g, : len(response)]
            assert log_probs.tolist() == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_hint_without_a_solution_is_refused(train: Runner, config: Config, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"question": f"Say {n}."}) + "\n" for n in range(40)))
    config.env.data_path, config.reward.weights = str(data), {"bare_number": 1.0}
    with pytest.raises(DataError, match=r"teacher_model.hint: jsonl/.* has no solution; name the column"):
        train("run", teacher_model__hint="It is {solution}.")


def test_a_hint_that_takes_the_room_of_the_response_is_refused(train: Runner, config: Config) -> None:
    with pytest.raises(DataError, match=r"teacher_model.hint: with it the prompt of .* raise inference_mo"):
        train("run", teacher_model__hint="long " * 200 + "{solution}")


def test_a_teacher_with_other_tokens_is_refused(train: Runner, config: Config, smollm2_dir: Path) -> None:
    config.teacher_model.name = str(smollm2_dir)
    message = "teacher_model.name=.*: its tokenizer is another one than that of model.name=.*, and a teacher"
    with pytest.raises(ModelError, match=message):
        train("run")


def test_a_teacher_with_a_short_context_is_refused(train: Runner, config: Config, teacher: Path) -> None:
    config.inference_model.max_model_len = 1025
    config.model.name = str(teacher)
    with pytest.raises(ModelError, match=r"inference_model.max_model_len=1025: .* supports at most 1024"):
        train("run")
