"""The script as a user calls it: help, --cfg, completion, and what it imports."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cli_calls import ROOT, SEEN, call, set_up
from omegaconf import DictConfig, OmegaConf

from torchrl_grpo.cli import commands
from torchrl_grpo.cli.compose import composer, write_override
from torchrl_grpo.config import parse
from torchrl_grpo.errors import ConfigError

SCRIPT = ROOT / "sota-implementations" / "grpo" / "grpo.py"


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return set_up(tmp_path, monkeypatch)


def script(*words: str, cwd: Path, importtime: bool = False) -> subprocess.CompletedProcess[str]:
    flags = ["-X", "importtime"] if importtime else []
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *flags, str(SCRIPT), *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def imported(stderr: str) -> set[str]:
    return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in stderr.splitlines() if "|" in line}


HEAVY = {"torch", "vllm", "transformers", "torchrl", "tensordict", "numpy", "datasets", "reasoning_gym"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["--cfg", "job"], 0),
        (["--cfg", "job", "--config-name", "grpo_quickstart"], 0),
        (["optimizer.lr=slow"], 2),
        (["env.repeats=1"], 2),
    ],
)
def test_answers_without_heavy_imports(workplace: Path, words: list[str], code: int) -> None:
    result = script(*words, cwd=workplace, importtime=True)
    assert result.returncode == code
    assert "torchrl_grpo" in imported(result.stderr), "the probe sees imports"
    assert imported(result.stderr) & HEAVY == set()
    assert list(workplace.iterdir()) == []


def test_help_needs_not_even_hydra(workplace: Path) -> None:
    result = script("--help", cwd=workplace, importtime=True)
    assert imported(result.stderr) & {"hydra", "omegaconf"} == set()


def test_help_text(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    text = capsys.readouterr().out
    promised = [
        "grpo_gsm8k",
        "grpo_ifeval",
        "grpo_quickstart",
        "env.dataset",
        "env.num_envs",
        "env.repeats",
        "model.name",
        "policy.kl_coef",
        "optimizer.lr",
        "optimizer.weight_decay",
        "train.total_dialog_turns",
        "train.checkpoint_frequency",
        "train.optim_batch_size",
        "train.gradient_accumulation_steps",
        "train_model.num_devices",
        "inference_model.gpu_memory_utilization",
        "inference_model.backend",
        "--multirun",
        "resume=auto",
    ]
    assert [word for word in promised if word not in text] == []
    assert "{" not in text.replace("'{question:q,answer:a}'", "").replace("'{gsm8k:1.0,format:0.2}'", "")


def test_examples_of_the_help_text_are_valid(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workplace / "problems.jsonl").write_text("")
    call("--help")
    lines = capsys.readouterr().out.split("examples:\n")[1].splitlines()
    assert len(lines) >= 5
    for line in lines:
        program, *words = shlex.split(line)[1:]
        assert program == "grpo.py"
        assert call("--cfg", "job", *words) == 0, line


@pytest.mark.slow
def test_the_help_text_of_sft_is_its_own(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (workplace / "problems.jsonl").write_text("")
    monkeypatch.setattr(sys, "argv", ["sft.py", "--help"])
    commands.sft()
    text = capsys.readouterr().out
    assert "supervised fine-tuning" in text.splitlines()[0]
    lines = text.split("examples:\n")[1].splitlines()
    assert len(lines) >= 5
    for line in lines:
        monkeypatch.setattr(sys, "argv", ["sft.py", "--cfg", "job", *shlex.split(line)[2:]])
        commands.sft()


def test_cfg_job_shows_what_a_run_would_get(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--cfg", "job", "optimizer.lr=0.5", "reward.weights.format=0.5") == 0
    node = OmegaConf.create(capsys.readouterr().out)
    assert isinstance(node, DictConfig)
    cfg = parse(node)
    assert (cfg.optimizer.lr, cfg.reward.weights) == (0.5, {"format": 0.5})
    assert call("--cfg", "job", "--package", "optimizer.betas") == 0
    assert capsys.readouterr().out == "- 0.9\n- 0.999\n"
    assert call("--cfg", "job", "-p", "optimiser") == 2  # codespell:ignore optimiser


@pytest.mark.parametrize(
    "words",
    [
        ["--cfg", "hydra"],
        ["--cfg", "all"],
        ["--info", "searchpath"],
        ["--hydra-help"],
        ["-sc", "install=bash"],
    ],
)
def test_options_of_hydra_still_work(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*words) == 0
    assert len(capsys.readouterr().out) > 100
    assert SEEN == []


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("env.data", ["env.data_path=", "env.dataset="]),
        ("policy=g", ["policy=grpo", "policy=gspo"]),
        ("env.dataset=ifeval train.ep", ["train.epochs="]),
    ],
)
def test_tab_completion(
    typed: str, offered: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", f"python grpo.py {typed}")
    assert call("-sc", "query=bash") == 0
    assert capsys.readouterr().out.split() == offered


@pytest.mark.slow
def test_bad_row_is_found_before_torch_is_imported(workplace: Path) -> None:
    rows = [f'{{"question": "{n}?", "answer": "#### {n}"}}' for n in range(300)]
    (workplace / "rows.jsonl").write_text("\n".join([*rows, '{"question": "x", "answer": "no mark"}']))
    words = ["env.data_path=rows.jsonl", "inference_model.backend=transformers"]
    result = script(*words, cwd=workplace, importtime=True)
    assert result.returncode == 2
    assert imported(result.stderr) & {"torch", "vllm", "transformers"} == set()
    (message,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "row 301 of rows.jsonl" in message and "####" in message
    assert not list(workplace.glob("outputs/*/*"))


@pytest.mark.slow
def test_mistake_through_the_script(workplace: Path) -> None:
    result = script("policy.kl_coeff=0.1", cwd=workplace)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "error: policy.kl_coeff=0.1: there is no key policy.kl_coeff; write policy.kl_coef=0.1 instead\n"
    )
    assert list(workplace.iterdir()) == []


def test_written_texts_are_composed_unchanged() -> None:
    marks = ["\\", "\\\\", "'", '"', "${", "{", "}", "\n", ",", "boxed"]
    texts = ["".join(chosen) for chosen in itertools.product(marks, repeat=2)]
    words = [
        write_override("env.system_prompt", "Answer in \\boxed{}."),
        write_override("inference_model.engine_args", {"texts": texts}),
    ]
    with composer(ROOT / "config", "grpo_gsm8k") as tree:
        (overrides,) = tree.jobs(words, sweep=False)
        node = tree.compose(overrides).node
        assert node.env.system_prompt == "Answer in \\boxed{}."
        assert list(node.inference_model.engine_args.texts) == texts


@pytest.mark.parametrize("text", ["it\\'s", 'say "{`a`$b', "[${a}\\"])
def test_an_unreadable_text_is_repeated_in_quotes_for_the_shell(text: str, workplace: Path) -> None:
    with composer(ROOT / "config", "grpo_gsm8k") as tree:
        with pytest.raises(ConfigError) as error:
            tree.jobs([f"env.system_prompt={text}"], sweep=False)
        written = re.search(r'write (".*") with the quotes', str(error.value))
        assert written is not None
        shell = subprocess.run(["sh", "-c", f"printf %s {written[1]}"], capture_output=True, check=True)
        ((override,),) = tree.jobs([shell.stdout.decode()], sweep=False)
        assert tree.compose([override]).node.env.system_prompt == text
