"""Whole runs with adapters in this process: resumed, without a reference in memory, and exported."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Runner, config, train, without_eval  # noqa: F401  fixtures
from transformers import AutoModelForCausalLM

from torchrl_grpo.config import Config, parse
from torchrl_grpo.config.values import Dtype
from torchrl_grpo.errors import ConfigError, ModelError
from torchrl_grpo.models import loading, lora
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.rollout.log_prob_transform import LogProbScorer
from torchrl_grpo.tools.verify_resume import read
from torchrl_grpo.training.learner import Learner
from torchrl_grpo.training.session import Session

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def adapters(config: Config) -> None:
    config.train_model.lora.rank = 4
    config.optimizer.lr = 3e-2


@pytest.mark.float32
def test_a_run_with_adapters_moves_and_is_a_function_of_its_seed(train: Runner) -> None:
    first = train("a", policy__kl_coef=0.1)
    assert first == train("b")
    assert first != train("c", seed=1)
    assert first[1]["kl/reference"] == pytest.approx(0.0, abs=1e-6) and first[-1]["kl/reference"] > 1e-4
    assert all(line["publish/logprob_diff_max"] < 1e-3 for line in first[1:])


@pytest.mark.float32
def test_the_reference_is_the_base_and_not_a_second_model(
    train: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded: list[str] = []
    honest = loading.load_model

    def counted(source: str, *rest: Any, **options: Any) -> Any:
        loaded.append(source)
        return honest(source, *rest, **options)

    monkeypatch.setattr(loading, "load_model", counted)
    settings = {"policy__kl_coef": 0.1, "inference_model__temperature": 0.7, "train__total_dialog_turns": 32}
    with_base = without_eval(train("lora", **settings))
    assert len(loaded) == 1, "the engine imports its own name of it"
    # The same reference, loaded apart: nothing may differ but rounding.
    monkeypatch.setattr("torchrl_grpo.training.build.build_reference", apart)
    loaded.clear()
    with_copy = without_eval(train("copy"))
    assert len(loaded) == 2
    for line, other in zip(with_base, with_copy, strict=True):
        assert line["kl/reference"] == pytest.approx(other["kl/reference"], abs=1e-5)
        assert line["loss/total"] == pytest.approx(other["loss/total"], abs=1e-4)


def apart(cfg: Config, source: str, devices: Sequence[str], learner: Learner) -> LogProbScorer:
    model = loading.load_model(source, cfg.model, torch.device(devices[0]), torch.float32).requires_grad_(
        False
    )
    scorer = TokenScorer(
        model, cfg.inference_model.temperature, learner.autocast_dtype, learner.shares_prefix
    )
    return LogProbScorer(scorer, "reference", learner.make_budget())


@pytest.mark.float32
def test_checkpointing_and_sharing_change_nothing_but_rounding(train: Runner) -> None:
    plain = without_eval(train("whole", train__total_dialog_turns=32, policy__kl_coef=0.1))
    for shape in ("recomputed", "unshared"):
        changed = without_eval(
            train(
                shape,
                train_model__gradient_checkpointing=shape == "recomputed",
                train_model__shared_prefix=shape != "unshared",
            )
        )
        for line, other in zip(plain, changed, strict=True):
            assert line["loss/total"] == pytest.approx(other["loss/total"], abs=1e-4)


def test_a_resumed_run_is_the_uninterrupted_run_and_its_checkpoints_hold_adapters_only(
    train: Runner, config: Config, tmp_path: Path
) -> None:
    settings = {"train__optim_batch_size": 4, "train__total_dialog_turns": 32, "policy__kl_coef": 0.1}
    whole = train("run", train__checkpoint_frequency=3, checkpoint__keep=9, **settings)
    rollouts = read(tmp_path / "run/rollouts.jsonl")
    assert whole[-1]["step"] == 8
    folder = tmp_path / "run/checkpoints/3/model"
    assert {path.suffix for path in folder.iterdir()} >= {".safetensors", ".json"}
    assert not (folder / "config.json").exists() and not (folder.parent / "merged").exists()
    assert (folder / "adapter_model.safetensors").stat().st_size < 40_000
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1, "all may be read by the same people"
    # One that changed the run it was written in would be seen too.
    assert train("run", resume=str(folder.parent), train__checkpoint_frequency=0) == whole
    assert read(tmp_path / "run/rollouts.jsonl") == rollouts


@pytest.mark.float32
def test_adapters_and_merged_model_of_a_checkpoint_are_the_live_model(
    train: Runner, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft

    ids, live = torch.arange(3, 20)[None], []
    honest = Session.save

    def saves(self: Session) -> Path:
        with torch.no_grad():
            live.append(self.parts.learner.model(input_ids=ids).logits)
        return honest(self)

    monkeypatch.setattr(Session, "save", saves)
    settings = {"checkpoint__export_merged": True, "train__total_dialog_turns": 32}
    train("run", train__checkpoint_frequency=1, **settings)
    base = AutoModelForCausalLM.from_pretrained(config.model.name)
    with torch.no_grad():
        begun = base(input_ids=ids).logits
        for step, logits in zip((1, 2), live, strict=True):
            folder = tmp_path / f"run/checkpoints/{step}"
            merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
            assert {p.dtype for p in merged.parameters()} == {torch.float32}
            torch.testing.assert_close(merged(input_ids=ids).logits, logits, atol=1e-4, rtol=1e-4)
            named = peft.AutoPeftModelForCausalLM.from_pretrained(str(folder / "model"))
            torch.testing.assert_close(named(input_ids=ids).logits, logits, atol=1e-5, rtol=1e-5)
            assert float((logits - begun).abs().max()) > 0.01
    # A new run starts from the merged model, and is told of it when given the adapters.
    with pytest.raises(ModelError, match=rf"adapters for .* and no model; write model.name={folder}/merged"):
        train("refused", model__name=str(folder / "model"))
    lines = train("next", model__name=str(folder / "merged"), train__total_dialog_turns=16)
    assert lines[-1]["step"] == 1


def test_a_merged_model_of_a_base_in_bfloat16_is_exported_in_float32(
    train: Runner, config: Config, tmp_path: Path
) -> None:
    config.train_model.lora.base_dtype = Dtype("bfloat16")
    train("run", checkpoint__export_merged=True, train__total_dialog_turns=32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/2/merged")
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    start = AutoModelForCausalLM.from_pretrained(config.model.name)
    changed = {
        n
        for (n, p), q in zip(merged.named_parameters(), start.parameters(), strict=True)
        if float((p - q).norm() / q.norm()) > 0.003
    }
    assert len(changed) >= 10 and all("proj" in name for name in changed)


def test_a_missing_merged_model_is_said_to_be_missing(train: Runner, tmp_path: Path) -> None:
    train("run", train__total_dialog_turns=16)
    with pytest.raises(ModelError, match=r"write the folder of a merged model instead .*export_merged"):
        train("refused", model__name=str(tmp_path / "run/checkpoints/1/model"))


def test_an_unknown_layer_stops_the_run_with_one_line(train: Runner, config: Config) -> None:
    config.train_model.lora.target_modules = ["query"]
    with pytest.raises(ConfigError, match=r"target_modules=\[query\].*down_proj") as caught:
        train("run")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "keys,says",
    [
        ({"rank": -1}, "train_model.lora.rank=-1: it must be at least 0"),
        ({"rank": 4, "alpha": 0.0}, "train_model.lora.alpha=0.0: it must be greater than 0"),
        ({"rank": 4, "alpha": float("nan")}, "train_model.lora.alpha=nan: it must be finite"),
        ({"rank": 4, "target_modules": []}, "names no layer"),
        ({"rank": 4, "target_modules": ["q_proj", "all-linear"]}, "stands for every linear layer"),
        ({"rank": 4, "base_dtype": "int8"}, "auto, float32, bfloat16, float16"),
        ({"alpha": 16.0}, "is only read if train_model.lora.rank is not 0"),
        ({"target_modules": ["q_proj"]}, "is only read if train_model.lora.rank is not 0"),
        ({"base_dtype": "bfloat16"}, "is only read if train_model.lora.rank is not 0"),
        ({"ranks": 4}, "write train_model.lora.rank=4 instead"),
        ({"rank": "many"}, "train_model.lora.rank=many: it must be a whole number"),
        ({"target_modules": "q_proj"}, "a list of names in square brackets"),
    ],
)
def test_bad_adapter_keys_are_named(keys: dict[str, object], says: str) -> None:
    from omegaconf import OmegaConf

    with pytest.raises(ConfigError, match=re.escape(says)):
        parse(OmegaConf.create({"train_model": {"lora": keys}}))


@pytest.mark.parametrize(
    "node,says",
    [
        ({"refresh_frequency": 5}, "ref_model.refresh_frequency=5"),
        ({"dtype": "float32"}, "ref_model.dtype=float32"),
        ({"devices": [1]}, "ref_model.devices=[1]"),
        ({"num_devices": 2}, "ref_model.num_devices=2"),
    ],
)
def test_keys_of_a_reference_that_is_not_loaded_are_refused(node: dict[str, object], says: str) -> None:
    from omegaconf import OmegaConf

    settings = {"train_model": {"lora": {"rank": 4}}, "policy": {"kl_coef": 0.1}, "ref_model": node}
    with pytest.raises(
        ConfigError, match=re.escape(says) + ".*the reference is the model without its adapter"
    ):
        parse(OmegaConf.create(settings))
    parse(OmegaConf.create({**settings, "ref_model": {"devices": [0]}}))
    parse(OmegaConf.create({**settings, "ref_model": {"num_devices": 1}}))
    two = {"lora": {"rank": 4}, "num_devices": 2}
    parse(OmegaConf.create({**settings, "train_model": two, "ref_model": {"num_devices": 2}}))
    for devices in ([0], [0, 1]):
        parse(OmegaConf.create({**settings, "train_model": two, "ref_model": {"devices": devices}}))
    with pytest.raises(ConfigError, match="runs where the trainer does"):
        parse(OmegaConf.create({**settings, "train_model": two, "ref_model": {"devices": [1]}}))


def test_the_number_format_of_a_reference_that_is_not_loaded_is_that_of_the_base() -> None:
    from omegaconf import OmegaConf

    for quantization, held in (("none", "lora.base_dtype=auto"), ("nf4", "quantization=nf4")):
        trained = {"lora": {"rank": 4}, "quantization": quantization}
        settings = {"train_model": trained, "policy": {"kl_coef": 0.1}, "ref_model": {"dtype": "float32"}}
        with pytest.raises(ConfigError, match=f"that is held in train_model.{held};"):
            parse(OmegaConf.create(settings))


def test_merging_is_asked_for_only_where_there_is_something_to_merge() -> None:
    from omegaconf import OmegaConf

    with pytest.raises(
        ConfigError, match=r"export_merged=true: it is only read if train_model\.lora\.rank is not 0"
    ):
        parse(OmegaConf.create({"checkpoint": {"export_merged": True}}))
    assert lora.ALL_LINEAR == "all-linear"  # type: ignore[attr-defined]
