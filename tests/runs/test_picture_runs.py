"""Whole runs on questions with pictures: a tiny random model and the transformers engine, in this process."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from async_runs import AsyncRunner, pools  # noqa: F401  fixtures
from async_runs import train as train_async  # noqa: F401
from forked import run_script
from picture_prompts import SHOWN, example_of, tokenizer_of
from PIL import Image
from safetensors.torch import load_file
from tiny_runs import Runner, config, train, without_eval  # noqa: F401  fixtures
from tiny_vlm import build, build_tiny_vlm, picture
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText, AutoProcessor

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import AdvantageEstimator, Parallelism, Surrogate, TrainMethod
from torchrl_grpo.envs.group_text import GroupTextEnv
from torchrl_grpo.envs.stream import PromptStream
from torchrl_grpo.errors import ConfigError, DataError, ModelError
from torchrl_grpo.planning.preflight import place
from torchrl_grpo.rewards.reward_set import RewardSet
from torchrl_grpo.rewards.text import BareNumberReward
from torchrl_grpo.rollout import saved_groups
from torchrl_grpo.rollout.collector import GroupSource
from torchrl_grpo.rollout.groups import ScoredGroup
from torchrl_grpo.tools.verify_resume import read

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny_vlm_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vlm(tmp_path_factory.mktemp("vlm"))


@pytest.fixture(autouse=True)
def pictured(config: Config, tiny_vlm_dir: Path) -> None:
    """Two rounds of four groups of four about drawn pictures."""
    config.model.name, config.model.pictures = str(tiny_vlm_dir), True
    config.env.dataset, config.env.data_path = "pictures", None
    config.env.task_args = {"kinds": ["count", "dice"], "size": 48}
    config.inference_model.max_model_len = 256
    config.train.total_dialog_turns = 32
    config.eval.num_problems = 4


def _weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"checkpoints/{step}/model/model.safetensors")


@pytest.mark.parametrize("trains_vision", [False, True])
def test_run_trains_what_it_shall_and_saves_the_processor(
    train: Runner, tmp_path: Path, tiny_vlm_dir: Path, trains_vision: bool
) -> None:
    lines = train("run", train_model__vision_tower=trains_vision)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["advantage/abs_mean"] > 0 for line in lines[1:])
    before, after = load_file(tiny_vlm_dir / "model.safetensors"), _weights(tmp_path / "run", 2)
    changed = {name for name in before if not torch.equal(before[name].float(), after[name].float())}
    assert any("text_model" in name for name in changed)
    assert any("vision_model" in name for name in changed) == trains_vision
    assert any("connector" in name for name in changed) == trains_vision
    # The next run begins with what this one has saved.
    train("next", model__name=str(tmp_path / "run/checkpoints/2/model"), train__total_dialog_turns=16)


@pytest.mark.float32
def test_engine_and_trainer_agree(train: Runner) -> None:
    """The reference is the policy at first, and the proximal log-probabilities are those of the trainer."""
    first, *_ = without_eval(train("run", policy__kl_coef=0.1, policy__proximal="trainer", train__epochs=2))
    assert first["policy/logprob_diff"] < 1e-5
    assert first["mismatch/ratio_outside"] == 0
    assert abs(first["kl/reference"]) < 1e-5


@pytest.mark.float32
def test_family_that_cannot_share_prompts_computes_them_apart(train: Runner, tmp_path: Path) -> None:
    """The run tests its own model with pictures, in which tokens of Gemma 3 see those after them."""
    folder = build_tiny_vlm(tmp_path / "gemma3", "gemma3")
    with pytest.warns(UserWarning, match="prompts are run once per response .* with pictures would change"):
        first, *_ = without_eval(train("run", model__name=str(folder), eval__frequency=0))
    assert first["policy/logprob_diff"] < 1e-5


def test_killed_and_resumed_run_is_the_uninterrupted_run(
    train: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"train__optim_batch_size": 4, "train__epochs": 2, "eval__frequency": 0}
    settings["train__checkpoint_frequency"] = 3
    graded = itertools.count(1)

    def kill(self: BareNumberReward, text: str, example: object) -> float:
        # In the second of two rounds of 16 responses.
        if next(graded) == 24:
            os.kill(os.getpid(), signal.SIGKILL)
        return len(text) % 5 / 4

    with monkeypatch.context() as patch:
        patch.setattr(BareNumberReward, "__call__", kill)
        process = multiprocessing.get_context("fork").Process(target=train, args=("broken",), kwargs=settings)
        process.start()
        process.join()
    assert process.exitcode == -signal.SIGKILL
    assert read(tmp_path / "broken/metrics.jsonl")[-1]["step"] == 8
    whole = train("whole", **settings)
    assert train("broken", resume="auto") == whole
    assert read(tmp_path / "broken/rollouts.jsonl") == read(tmp_path / "whole/rollouts.jsonl")


@pytest.mark.float32
def test_pieces_and_padding_change_nothing_but_rounding(train: Runner) -> None:
    settings = {"train__total_dialog_turns": 16, "optimizer__lr": 1e-4, "train_model__vision_tower": True}
    whole = train("whole", **settings)
    cut = train("cut", train__gradient_accumulation_steps=4)
    padded = train("padded", train_model__shared_prefix=False)
    recomputed = train(
        "recomputed", train_model__shared_prefix=True, train_model__gradient_checkpointing=True
    )
    for other in (cut, padded, recomputed):
        for name, value in without_eval(whole)[0].items():
            assert without_eval(other)[0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.float32
@pytest.mark.parametrize("trains_vision", [False, True])
def test_adapters_are_trained_where_they_shall_and_resumed(
    train: Runner, config: Config, tmp_path: Path, trains_vision: bool
) -> None:
    config.train_model.lora.rank, config.train_model.vision_tower = 2, trains_vision
    config.eval.frequency, config.optimizer.lr, config.train.optim_batch_size = 0, 3e-2, 8
    settings = {"policy__kl_coef": 0.1, "checkpoint__export_merged": True}
    whole = train("run", train__checkpoint_frequency=2, checkpoint__keep=9, **settings)
    first, _, third, last = without_eval(whole)
    assert first["kl/reference"] == pytest.approx(0.0, abs=1e-6) and last["kl/reference"] > 1e-5
    # The first step of a round has the weights that have sampled it.
    assert max(first["policy/logprob_diff"], third["policy/logprob_diff"]) < 1e-4
    adapters = load_file(tmp_path / "run/checkpoints/4/model/adapter_model.safetensors")
    moved = {name for name, tensor in adapters.items() if "lora_B" in name and tensor.any()}
    assert moved == {name for name in adapters if "lora_B" in name}
    assert any("vision_model" in name for name in moved) == trains_vision
    assert any("connector" in name for name in moved) == trains_vision
    assert train("run", resume=str(tmp_path / "run/checkpoints/2"), train__checkpoint_frequency=0) == whole
    merged = str(tmp_path / "run/checkpoints/4/merged")
    config.train_model.lora.rank, config.train.total_dialog_turns = 0, 16
    train("next", model__name=merged, resume=None, checkpoint__export_merged=False)


def test_rows_of_a_file_with_and_without_pictures(train: Runner, config: Config, tmp_path: Path) -> None:
    rows = [{"question": f"What is {number}?", "answer": "1", "images": []} for number in range(4)]
    for number in range(8):
        names = [f"{number}-{part}.png" for part in range(1 + number % 2)]
        for part, name in enumerate(names):
            picture(20 + 9 * number, 30, 10 * number + part).save(tmp_path / name)
        rows.append({"question": "How many?", "answer": str(len(names)), "images": names})
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.env.task_args = {}
    lines = train("run", env__dataset="jsonl", env__data_path=str(data), inference_model__max_model_len=512)
    assert len(lines) == 3
    rollouts = read(tmp_path / "run/rollouts.jsonl")
    assert {len(row["pictures"]) for row in rollouts} <= {0, 1, 2}
    assert all(row["prompt"].count("<image>") == len(row["pictures"]) for row in rollouts)
    # Each picture is stored once, as it is in the data.
    used = {name for row in rollouts for name in row["pictures"]}
    stored = {path.name: path.read_bytes() for path in (tmp_path / "run/pictures").iterdir()}
    held_out = read(tmp_path / "run/evaluations.jsonl")
    assert all(row["prompt"].count("<image>") == len(row["pictures"]) for row in held_out)
    used |= {name for row in held_out for name in row["pictures"]}
    assert stored.keys() == used and len(used) > 0
    assert set(stored.values()) <= {path.read_bytes() for path in tmp_path.glob("*.png")}


@pytest.fixture
def sft(config: Config, tmp_path: Path) -> Path:
    """Two steps on four solutions about no to two pictures, without answers. Returns the file of the rows."""
    config.train.method, config.env.repeats = TrainMethod.sft, 1
    config.policy.surrogate = Surrogate.log_likelihood
    config.policy.advantage_estimator = AdvantageEstimator.reward
    config.train.total_dialog_turns, config.reward.weights, config.env.task_args = 8, {}, {}
    config.env.dataset, config.env.data_path = "jsonl", str(tmp_path / "rows.jsonl")
    config.inference_model.max_model_len, config.inference_model.max_new_tokens = 512, 24
    rows = []
    for number in range(12):
        names = [f"{number}-{part}.png" for part in range(number % 3)]
        for part, name in enumerate(names):
            picture(20 + 9 * number, 30, 10 * number + part).save(tmp_path / name)
        rows.append({"question": f"How many? {number}", "solution": f"I see {len(names)}.", "images": names})
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return data


@pytest.mark.float32
def test_losses_of_solutions_are_those_of_the_plain_model(
    sft: Path, train: Runner, tmp_path: Path, tiny_vlm_dir: Path
) -> None:
    before, first, *_, last = train("run")
    processor = AutoProcessor.from_pretrained(tiny_vlm_dir)
    model = AutoModelForImageTextToText.from_pretrained(tiny_vlm_dir)

    def losses(row: dict[str, Any], pictures: list[Path]) -> torch.Tensor:
        answer = processor.tokenizer(row["response"] + "<|im_end|>", return_tensors="pt").input_ids[0]
        inputs = processor(
            text=row["prompt"] + row["response"] + "<|im_end|>",
            images=[Image.open(path) for path in pictures] or None,
            return_tensors="pt",
        )
        with torch.no_grad():
            logits = model(**inputs).logits[0, -len(answer) - 1 : -1]
        logits[:, model.config.image_token_id] = -torch.inf
        return F.cross_entropy(logits, answer, reduction="none")

    stored = tmp_path / "run/pictures"
    rows = [row for row in read(tmp_path / "run/rollouts.jsonl") if row["step"] == 1]
    assert len({len(row["pictures"]) for row in rows}) > 1
    expected = torch.cat([losses(row, [stored / name for name in row["pictures"]]) for row in rows])
    assert first["loss/total"] == pytest.approx(expected.mean().item(), rel=1e-5)
    lines = [json.loads(line) for line in sft.read_text().splitlines()]
    files = {str(line["question"]): [tmp_path / name for name in line["images"]] for line in lines}
    for row in read(tmp_path / "run/evaluations.jsonl")[: int(before["eval/num_problems"])]:
        shown = next(paths for question, paths in files.items() if f"{question}<" in row["prompt"])
        assert [(stored / name).read_bytes() for name in row["pictures"]] == [p.read_bytes() for p in shown]
        assert row["grade"] == pytest.approx(losses(row, shown).mean().item(), rel=1e-5)
    assert last["eval/loss"] < before["eval/loss"]


def test_solution_with_a_token_of_a_picture_is_refused(sft: Path, train: Runner) -> None:
    row = {"question": "How many?", "solution": "I see <image>.", "images": []}
    sft.write_text(f"{sft.read_text()}{json.dumps(row)}\n")
    assert len(train("run")) > 0
    with pytest.raises(DataError, match="has a token that stands for a picture"):
        train("broken", env__control_tokens_in_data=True)


def test_text_model_is_refused(train: Runner, tiny_model_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.pictures=true needs a model for pictures and text"):
        train("run", model__name=str(tiny_model_dir))


def test_model_without_processor_is_refused(train: Runner, tmp_path: Path, tiny_vlm_dir: Path) -> None:
    for file in tiny_vlm_dir.iterdir():
        if not file.name.startswith("processor"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match="processor for pictures"):
        train("run", model__name=str(tmp_path))


def test_pictures_that_are_too_large_for_the_context_are_refused(train: Runner) -> None:
    with pytest.raises(DataError, match=r"tokens with those of its 1 pictures, and at most 24 fit"):
        train("run", inference_model__max_model_len=30)


def test_an_age_of_zero_is_the_synchronous_run(
    train: Runner, train_async: AsyncRunner, tmp_path: Path
) -> None:
    """Pictures reach the workers and the reference of ``grpo-async.py``."""
    together = train("sync", policy__kl_coef=0.1)
    apart = train_async("async", collector__max_policy_age=0)
    own = [{k: v for k, v in line.items() if not k.startswith("workers/")} for line in apart]
    assert own == together
    assert read(tmp_path / "async/rollouts.jsonl") == read(tmp_path / "sync/rollouts.jsonl")


def test_group_that_waits_in_a_checkpoint_gets_its_pictures_back() -> None:
    tokenizer = tokenizer_of(build("idefics3")[1])
    stream = PromptStream([example_of(shown) for shown in SHOWN], seed=0, shuffle=False)
    env = GroupTextEnv(stream, tokenizer, RewardSet([], 0.0), num_envs=1, repeats=2, max_prompt_tokens=512)
    source = GroupSource(env, tokenizer, seed=0)
    groups = [source.new_group(number) for number in range(len(SHOWN))]
    assert all(group.pictures is not None and group.pictures.files for group in (groups[0], groups[2]))
    state = saved_groups.to_state([ScoredGroup(group, [], []) for group in groups])
    restored = [scored.group for scored in saved_groups.from_state(state)]
    assert all(group.pictures is None for group in restored)
    for group in restored:
        source.read_pictures(group)
    assert restored == groups


@pytest.mark.parametrize("key", ["train_model.vision_tower", "train_model.parallelism"])
def test_ranks_with_parts_of_a_model_for_pictures_are_refused(config: Config, key: str) -> None:
    config.train_model.num_devices = 2
    place(config, False, 2)
    if key == "train_model.vision_tower":
        config.train_model.vision_tower = True
    else:
        config.train_model.parallelism = Parallelism.fsdp2
    with pytest.raises(ConfigError, match=f"{key}=.*held whole, and its vision tower frozen; write {key}="):
        place(config, False, 2)


@pytest.mark.float32
def test_two_ranks_follow_the_run_of_one(
    config: Config, tmp_path: Path, repo_root: Path, tiny_vlm_dir: Path
) -> None:
    words = [
        "env.dataset=pictures",
        "env.task_args={kinds:[count,dice],size:48}",
        "env.answer_format=plain",
        "env.num_envs=4",
        "env.repeats=4",
        "model.pictures=true",
        f"model.name={tiny_vlm_dir}",
        "train_model.autocast=no",
        "inference_model.dtype=float32",
        "inference_model.backend=transformers",
        "inference_model.max_model_len=256",
        "inference_model.max_new_tokens=6",
        # A random model is never right.
        "reward.weights={closeness: 1.0, bare_number: 0.5}",
        "policy.kl_coef=0.1",
        "optimizer.lr=1e-3",
        "optimizer.eps=1e-2",
        "train.total_dialog_turns=32",
        "eval.num_problems=4",
        "logging.progress=false",
    ]
    lines = []
    for ranks in (1, 2):
        run_dir = tmp_path / str(ranks)
        more = [f"train_model.num_devices={ranks}", f"hydra.run.dir={run_dir}"]
        script = repo_root / "sota-implementations/grpo/grpo.py"
        done = run_script([script, *words, *more], ranks=ranks, cwd=repo_root)
        assert done.returncode == 0, done.stderr
        lines.append(without_eval(read(run_dir / "metrics.jsonl")))
    for line, two in zip(*lines, strict=True):
        assert two == pytest.approx(line, rel=1e-4, abs=1e-5)
