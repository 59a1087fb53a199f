"""Whole runs in this process, on a tiny random model and the transformers engine."""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import compiler_backend
from tiny_model import build_tiny_model
from tiny_runs import Runner, config, train, without_eval  # noqa: F401  fixtures
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from torchrl_grpo.checkpoints import checkpoint
from torchrl_grpo.config import Config
from torchrl_grpo.errors import CheckpointError, DataError, ModelError, TrainingStopped, UserError
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.observe import report
from torchrl_grpo.rewards.text import BareNumberReward
from torchrl_grpo.tools.verify_resume import read
from torchrl_grpo.training.job import run

pytestmark = pytest.mark.slow


def test_same_seed_same_numbers_other_seed_other_numbers(train: Runner, tmp_path: Path) -> None:
    first = train("a")
    assert first == train("b")
    assert read(tmp_path / "a/rollouts.jsonl") == read(tmp_path / "b/rollouts.jsonl")
    assert first != train("c", seed=1)
    assert len(first) == 5 and any(line["advantage/abs_mean"] > 0 for line in first[1:])


def test_evaluation_never_disturbs_training(train: Runner) -> None:
    often = train("often", eval__frequency=1, eval__pass_at_k=3)
    assert "eval/pass_at_3" in often[0]
    never = train("never", eval__frequency=0, eval__num_problems=6, eval__at_start=False, eval__pass_at_k=1)
    assert without_eval(often) == without_eval(never)


def test_threads_of_one_job_do_not_stay_for_the_next_of_a_sweep(train: Runner) -> None:
    train("first", train__total_dialog_turns=16)
    before = torch.get_num_threads()
    train("fewer", train__num_threads=before + 1)
    assert torch.get_num_threads() == before + 1
    train("last", train__num_threads=None)
    assert torch.get_num_threads() == before


def test_sleeping_engine_changes_no_number(train: Runner) -> None:
    awake = train("awake", train__total_dialog_turns=32)
    assert awake == train("asleep", inference_model__sleep=True)


@pytest.mark.float32
def test_micro_batches_change_nothing_but_rounding(train: Runner) -> None:
    settings = {"train__total_dialog_turns": 16, "optimizer__lr": 1e-4, "eval__num_problems": 0}
    (whole,) = without_eval(train("whole", **settings))
    for pieces in (2, 4, 8):
        (cut,) = without_eval(train(f"{pieces}", train__gradient_accumulation_steps=pieces))
        for name, value in whole.items():
            assert cut[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_a_resumed_run_in_the_middle_of_a_round_is_the_uninterrupted_run(
    train: Runner, tmp_path: Path
) -> None:
    settings = {"train__optim_batch_size": 8, "train__epochs": 2, "train__total_dialog_turns": 32}
    whole = train("whole", train__checkpoint_frequency=0, **settings)
    train("broken", train__checkpoint_frequency=3, checkpoint__keep=9)
    broken = tmp_path / "broken"
    assert read(broken / "metrics.jsonl") == whole and whole[-1]["step"] == 8
    resumed = train("broken", resume=str(broken / "checkpoints/3"))
    assert resumed == whole
    for name in ("rollouts.jsonl", "evaluations.jsonl"):
        assert read(broken / name) == read(tmp_path / "whole" / name)
    # What lies after the step that was resumed is kept, but no longer taken for the newest.
    assert (broken / "checkpoints/6.set-aside").is_dir() and (broken / "checkpoints/8").is_dir()


def test_a_run_in_epochs_is_the_run_of_as_many_samples(
    train: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"optimizer__schedule": "linear", "train__checkpoint_frequency": 1, "checkpoint__keep": 9}
    whole = train("samples", train__total_dialog_turns=48, **settings)
    capsys.readouterr()
    # Half of the 24 problems that are not held out, not even in other words, 4 a round.
    lines = train("epochs", train__total_dialog_turns=None, train__num_epochs=0.5)
    assert lines == whole and whole[-1]["step"] == 3
    length_line = "length: 3 rounds of 4 problems x 4 samples, 3 optimizer steps, 12 of 24 problems"
    assert length_line in capsys.readouterr().err
    assert train("epochs", resume=str(tmp_path / "epochs/checkpoints/1")) == whole
    with pytest.raises(CheckpointError, match=r"started with train\.num_epochs=0\.5"):
        train("epochs", train__total_dialog_turns=48, train__num_epochs=None, resume="auto")


def test_a_resumed_run_reads_its_state_once_and_keeps_nothing_in_the_file(
    train: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train("run", train__total_dialog_turns=32, train__checkpoint_frequency=1, checkpoint__keep=9)
    loads: list[dict[str, Any]] = []
    load, save = torch.load, checkpoint.save

    def loading(path: Path, **options: Any) -> Any:
        loads.append({"name": path.name, **options})
        return load(path, **options)

    mapped: list[bool] = []

    def saving(*arguments: Any, **options: Any) -> Path:
        gc.collect()
        mapped.append("trainer.pt" in Path("/proc/self/maps").read_text())
        return save(*arguments, **options)

    monkeypatch.setattr(torch, "load", loading)
    monkeypatch.setattr(checkpoint, "save", saving)
    train("run", resume=str(tmp_path / "run/checkpoints/1"))
    assert loads == [{"name": "trainer.pt", "map_location": "cpu", "weights_only": True, "mmap": True}]
    # The file may be removed, or lie on another machine.
    assert mapped == [False]


@pytest.mark.float32
def test_a_run_goes_on_in_other_number_formats(train: Runner, tmp_path: Path) -> None:
    exact = train("run", train__checkpoint_frequency=2, checkpoint__keep=9)
    assert exact[-1]["publish/logprob_diff_mean"] < 1e-4
    # A scaler begins that the checkpoint does not know, and the bound of float32 is not for these.
    for autocast in ("fp16", "bf16"):
        rounded = train(
            "run",
            resume=str(tmp_path / "run/checkpoints/2"),
            train_model__autocast=autocast,
            inference_model__dtype="bfloat16",
        )
        assert rounded[-1]["publish/logprob_diff_mean"] > 1e-4 and rounded[-1]["step"] == exact[-1]["step"]


@pytest.mark.parametrize(
    "settings",
    [{}, {"train__optim_batch_size": 4, "train__total_dialog_turns": 32}],
    ids=["a step a round", "four"],
)
def test_publications_that_do_not_keep_to_rounds_resume_too(
    train: Runner, tmp_path: Path, settings: dict[str, Any]
) -> None:
    whole = train(
        "whole",
        train__weight_update_frequency=3,
        train__checkpoint_frequency=1,
        checkpoint__keep=99,
        eval__num_problems=0,
        **settings,
    )
    versions = [line["policy/version"] for line in whole if "policy/version" in line]
    for step in (1, 2, 3):
        assert train("whole", resume=str(tmp_path / f"whole/checkpoints/{step}")) == whole
    assert len(set(versions)) > 1
    # Without checkpoints in between publications are as rare as they were asked to be.
    rare = train("rare", resume=None, train__checkpoint_frequency=0)
    assert {line["policy/version"] % 3 for line in rare if "policy/version" in line} == {0}


def test_a_resumed_run_continues_its_coefficients_and_its_reference(train: Runner, tmp_path: Path) -> None:
    whole = train(
        "run",
        train__checkpoint_frequency=2,
        checkpoint__keep=9,
        policy__init_kl_coeff=0.1,
        policy__kl_target=1e-4,
        policy__kl_horizon=64,
        policy__entropy_target=100.0,
        policy__proximal="trainer",
        policy__correction="truncate",
        ref_model__refresh_frequency=1,
        ref_model__refresh_mix=0.5,
    )
    assert len({line["policy/kl_coef"] for line in whole[1:]}) == 4, "the coefficient should have moved"
    assert [line["policy/entropy_coef"] for line in whole[1:]] == pytest.approx([0.0, 0.005, 0.01, 0.015])
    assert train("run", resume=str(tmp_path / "run/checkpoints/2"), train__checkpoint_frequency=0) == whole


@pytest.mark.parametrize("name", ["adamw_8bit", "muon"])
def test_a_resumed_run_continues_its_optimizer(train: Runner, tmp_path: Path, name: str) -> None:
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    whole = train("run", optimizer__name=name, train__checkpoint_frequency=2, checkpoint__keep=9)
    assert train("run", resume=str(tmp_path / "run/checkpoints/2"), train__checkpoint_frequency=0) == whole
    with pytest.raises(CheckpointError, match=f"optimizer.name=adamw: .* started with optimizer.name={name}"):
        train("run", resume="auto", optimizer__name="adamw")


def test_resuming_a_run_that_has_ended_leaves_its_figures_and_starts_no_engine(
    train: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train("ended", train__total_dialog_turns=32, train__checkpoint_frequency=1)
    before = (tmp_path / "ended/summary.json").read_bytes()
    monkeypatch.delattr(TransformersEngine, "__init__")
    assert train("ended", resume="auto") == whole
    assert (tmp_path / "ended/summary.json").read_bytes() == before
    assert "after step 2 of 2; it has already ended" in capsys.readouterr().err


def test_a_summary_of_steps_that_are_taken_again_does_not_say_that_the_run_has_ended(
    train: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train("run", train__total_dialog_turns=32, train__checkpoint_frequency=1, checkpoint__keep=9)
    before = json.loads((tmp_path / "run/summary.json").read_text())

    def fail(*args: Any, **entries: Any) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(report, "summary", fail)
        with pytest.raises(RuntimeError, match="killed"):
            train("run", resume=str(tmp_path / "run/checkpoints/1"))
    assert (tmp_path / "run/checkpoints/2").is_dir() and not (tmp_path / "run/summary.json").exists()
    assert train("run", resume="auto") == whole
    after = json.loads((tmp_path / "run/summary.json").read_text())
    assert (after["steps"], after["accuracy_after"]) == (2, before["accuracy_after"])


def test_another_configuration_is_refused_before_the_data_are_read(train: Runner) -> None:
    train("run", train__total_dialog_turns=16, train__checkpoint_frequency=1)
    with pytest.raises(CheckpointError, match=r"env\.data_path=.*nowhere"):
        train("run", resume="auto", env__data_path="nowhere.jsonl")


@pytest.mark.parametrize("frequency", [0, 1])
def test_an_interrupted_run_says_what_continues_it(
    train: Runner,
    tmp_path: Path,
    frequency: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from torchrl_grpo.training.session import Session

    honest = Session.log

    def interrupt(self: Session, metrics: dict[str, float]) -> None:
        if self.counters.step == 2:
            raise KeyboardInterrupt
        honest(self, metrics)

    monkeypatch.setattr(Session, "log", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train("cut", train__checkpoint_frequency=frequency)
    error = capsys.readouterr().err
    assert (
        f"{tmp_path / 'cut'} has no checkpoint yet" in error
        if frequency == 0
        else f"resume={tmp_path / 'cut'}" in error
    )


def test_an_interrupt_that_a_library_swallows_ends_the_run_after_the_step(
    train: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchrl_grpo.training.session import Session

    honest, swallowed = Session.save, []

    def swallow(self: Session) -> Path:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            swallowed.append(self.counters.step)
        return honest(self)

    monkeypatch.setattr(Session, "save", swallow)
    with pytest.raises(KeyboardInterrupt):
        train("cut", train__checkpoint_frequency=2)
    assert swallowed == [2]
    assert [line["step"] for line in read(tmp_path / "cut/metrics.jsonl")] == [0, 1, 2]
    assert (tmp_path / "cut/checkpoints/2").is_dir()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def rounding_of(line: dict[str, Any]) -> float:
    """The divergence that rounding explains, in either number format.

    The estimate is about half the square of a difference of log-probabilities. Engine and trainer differ by
    as much as two computations do, or by the 1e-3 nats that the verification of weights allows float32.
    """
    return max(float(line["publish/logprob_diff_mean"]), 1e-3) ** 2


def test_the_reference_follows_the_policy_when_told_to(train: Runner) -> None:
    kept = train("kept", policy__kl_coef=0.1, optimizer__lr=1e-3)
    copied = train("copied", ref_model__refresh_frequency=1)
    assert kept[1:3] != copied[1:3]
    # The reference is the policy that the round is sampled from, so at the first step they are one.
    assert all(abs(line["kl/reference"]) <= rounding_of(line) for line in copied[1:])
    assert kept[-1]["kl/reference"] > rounding_of(kept[-1])


@pytest.mark.float32
def test_dropped_groups_leave_the_loss_and_its_denominators(
    train: Runner, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every group without a signal: no step changes the model, and none fails.
    monkeypatch.setattr(BareNumberReward, "__call__", lambda self, text, example: 0.5)
    lines = train("dropped", policy__constant_groups="drop", eval__frequency=1)
    assert [line["reward/constant_groups"] for line in lines[1:]] == [1.0] * 4
    assert all("loss/total" not in line and "optimizer/lr" in line for line in lines[1:])
    assert all(line["publish/logprob_diff_max"] < 1e-3 for line in lines[1:])


def test_refilling_trains_on_groups_with_a_signal_only(
    train: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Answers to "0 plus ..." and "1 plus ..." all earn the same: a third of the groups teaches nothing.
    def by_question(self: BareNumberReward, text: str, example: Any) -> float:
        question = example.messages[-1]["content"]
        return 0.5 if question.startswith(("0", "1")) else len(text) % 5 / 4

    monkeypatch.setattr(BareNumberReward, "__call__", by_question)
    kept = train("kept")
    assert max(line["reward/constant_groups"] for line in kept[1:]) > 0
    settings = {"train__checkpoint_frequency": 2, "checkpoint__keep": 9}
    filled = train("filled", policy__constant_groups="refill", policy__max_refills=9, **settings)
    assert [line["reward/constant_groups"] for line in filled[1:]] == [0.0] * 4
    assert any(line["rollout/refills"] > 0 for line in filled[1:])
    discarded = read(tmp_path / "filled/discarded.jsonl")
    trained = {row["group_id"] for row in read(tmp_path / "filled/rollouts.jsonl")}
    assert len(discarded) == 16 * sum(line.get("rollout/refills", 0) for line in filled)
    assert {row["discarded"] for row in discarded} <= {"all rewards are equal", "the round was full"}
    assert not trained & {row["group_id"] for row in discarded} and "advantage" not in discarded[0]
    resumed = train("filled", resume=str(tmp_path / "filled/checkpoints/2"), train__checkpoint_frequency=0)
    assert resumed == filled and read(tmp_path / "filled/discarded.jsonl") == discarded


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_kl_to_the_reference_starts_at_zero_and_grows(train: Runner, where: str) -> None:
    # Not at temperature 1, at which a reference scored at another than the sampling one would go unseen.
    lines = train(
        "kl",
        policy__kl_coef=0.1,
        policy__kl_in=where,
        policy__kl_estimator="k3",
        inference_model__temperature=0.7,
    )
    assert abs(lines[1]["kl/reference"]) <= rounding_of(lines[1])
    assert lines[-1]["kl/reference"] > rounding_of(lines[1])
    if where == "loss":
        assert lines[-1]["loss/total"] == pytest.approx(lines[-1]["loss/objective"] + lines[-1]["loss/kl"])


def test_without_a_coefficient_no_reference_model_is_loaded(
    train: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchrl_grpo.models import loading

    loaded: list[str] = []
    honest = loading.load_model

    def counting(source: str, *rest: Any, **options: Any) -> Any:
        loaded.append(source)
        return honest(source, *rest, **options)

    monkeypatch.setattr(loading, "load_model", counting)
    train("plain", train__total_dialog_turns=16)
    assert len(loaded) == 1
    train("kl", policy__kl_coef=0.1)
    assert len(loaded) == 3


def test_the_saved_model_is_the_trained_one(train: Runner, config: Config, tmp_path: Path) -> None:
    train("saved", train__checkpoint_frequency=2)
    folder = tmp_path / "saved/checkpoints/4/model"
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1, "all may be read by the same people"
    first, *_, last = read(tmp_path / "saved/metrics.jsonl")
    card = (folder / "README.md").read_text()
    before, after, low = first["eval/accuracy"], last["eval/accuracy"], last["eval/accuracy_low"]
    assert f"| accuracy by exact_match | {before:.3f} | {after:.3f} | {low:.3f} to " in card
    saved = AutoModelForCausalLM.from_pretrained(folder)
    start = AutoModelForCausalLM.from_pretrained(config.model.name)
    moved = [not torch.equal(a, b) for a, b in zip(saved.parameters(), start.parameters(), strict=True)]
    assert all(moved)


def test_fp16_with_its_scaler_trains_and_resumes(train: Runner, tmp_path: Path) -> None:
    whole = train("whole", train_model__autocast="fp16", train__checkpoint_frequency=2, checkpoint__keep=5)
    assert whole[-1]["optimizer/loss_scale"] > 0 and math.isfinite(whole[-1]["loss/total"])
    assert train("whole", resume=str(tmp_path / "whole/checkpoints/2")) == whole


@pytest.mark.float32
def test_gradient_checkpointing_trains_to_the_same_numbers(train: Runner) -> None:
    plain = without_eval(train("plain", train_model__shared_prefix=False, train__total_dialog_turns=32))
    recomputed = without_eval(
        train("recomputed", train_model__shared_prefix=True, train_model__gradient_checkpointing=True)
    )
    for line, other in zip(plain, recomputed, strict=True):
        assert line["loss/total"] == pytest.approx(other["loss/total"], abs=1e-4)


@pytest.mark.float32
def test_compiled_layers_train_to_the_same_numbers(train: Runner) -> None:
    plain = train("plain")
    counters.clear()
    # Layers share their code, so each part of one is compiled once, and nothing of a run compiles it anew.
    once = torch._dynamo.config.patch(error_on_recompile=True)
    with compiler_backend("aot_eager"), once, warnings.catch_warnings():
        warnings.filterwarnings("error", message="train_model.compile")
        compiled = train("compiled", train_model__compile=True)
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    for ours, theirs in zip(without_eval(compiled), without_eval(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("full", ["metrics.jsonl", "rollouts.jsonl"])
def test_a_full_disk_stops_the_run_with_one_clear_message_where_it_must(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    folder = tmp_path / "run"
    real = os.write

    def write(file: int, block: bytes | memoryview) -> int:
        if Path(f"/proc/self/fd/{file}").readlink().name == full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, block)

    monkeypatch.setattr(os, "write", write)
    if full == "rollouts.jsonl":
        # Only people read these lines.
        with pytest.warns(UserWarning, match=r"rollouts\.jsonl could not grow"):
            assert run(config, folder)["steps"] == 4
        assert (folder / full).read_bytes() == b""
        return
    with pytest.raises(
        TrainingStopped, match=r"No space left on device: .*metrics.jsonl.*make room"
    ) as raised:
        run(config, folder)
    assert str(raised.value).endswith(f"{folder} has no checkpoint yet to continue from")


def test_losses_that_are_not_finite_stop_the_run_and_keep_its_checkpoints(
    train: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchrl_grpo.objectives import surrogates

    honest = surrogates.clip
    calls: list[int] = []

    def fails_later(*args: Any) -> Any:
        calls.append(1)
        surrogate, mask = honest(*args)
        return (surrogate * float("nan") if len(calls) > 2 else surrogate), mask

    monkeypatch.setitem(surrogates.SURROGATES, "clip", fails_later)
    with pytest.raises(TrainingStopped, match=r"train\.max_skipped_steps=1"):
        train("nan", train__total_dialog_turns=128, train__max_skipped_steps=1, train__checkpoint_frequency=1)
    assert (tmp_path / "nan/checkpoints/2/manifest.json").exists()
    assert read(tmp_path / "nan/metrics.jsonl")[-1]["optimizer/skipped"] == 1


def mistakes(config: Config, tmp_path: Path) -> dict[str, tuple[dict[str, object], type[UserError], str]]:
    bare = build_tiny_model(tmp_path / "bare", chat_template=None)
    long = tmp_path / "long.jsonl"
    long.write_text(
        "".join(
            json.dumps({"question": f"{n} " + "word " * (10 if n else 300), "answer": str(n)}) + "\n"
            for n in range(30)
        )
    )
    return {
        "prompt longer than the context": (
            {"env__data_path": str(long)},
            DataError,
            r"tokens.*inference_model\.max_model_len",
        ),
        "longer than the model was built for": (
            {"inference_model__max_model_len": 2000},
            ModelError,
            r"inference_model\.max_model_len=2000.*write inference_model\.max_model_len=",
        ),
        "no chat template": ({"model__name": str(bare)}, ModelError, r"model\.chat_template"),
        "chat template file missing": (
            {"model__chat_template": "nowhere.jinja"},
            ModelError,
            r"model\.chat_template=nowhere\.jinja",
        ),
        "no such folder": (
            {"model__name": "./nowhere"},
            ModelError,
            r"model\.name=\./nowhere.*no such folder",
        ),
        "no model in the folder": ({"model__name": str(tmp_path)}, ModelError, r"no config\.json"),
        "unknown to the hub": ({"model__name": "nobody/nothing"}, ModelError, r"model\.name=nobody/nothing"),
        "nothing to resume": ({"resume": "auto"}, CheckpointError, r"resume=auto.*resume=null"),
    }


@pytest.mark.parametrize(
    "case",
    [
        "prompt longer than the context",
        "longer than the model was built for",
        "no chat template",
        "chat template file missing",
        "no such folder",
        "no model in the folder",
        "unknown to the hub",
        "nothing to resume",
    ],
)
def test_mistakes_are_one_clear_message(train: Runner, config: Config, tmp_path: Path, case: str) -> None:
    changes, kind, message = mistakes(config, tmp_path)[case]
    with pytest.raises(kind, match=message) as caught:
        train("run", **changes)
    assert len(str(caught.value).splitlines()) == 1


def test_a_resumed_run_with_other_numbers_is_refused(train: Runner, tmp_path: Path) -> None:
    train("run", train__checkpoint_frequency=2)
    with pytest.raises(CheckpointError, match=r"optimizer\.lr=0\.5.*optimizer\.lr=0\.01"):
        train("run", resume="auto", optimizer__lr=0.5)
