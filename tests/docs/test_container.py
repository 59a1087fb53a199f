"""The container file: what it copies is there, and its commands are those of the README."""

from __future__ import annotations

import json
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest
from containerfile import Instruction, read_instructions

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "launch/container/Dockerfile"
PAGE = ROOT / "docs/containers.md"


@pytest.fixture(scope="module")
def instructions() -> list[Instruction]:
    return read_instructions(FILE)


def named(instructions: list[Instruction], name: str) -> list[str]:
    return [one.text for one in instructions if one.name == name]


def ignored(path: str) -> bool:
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    parts = path.split("/")
    starts = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    for pattern in patterns:
        if not pattern or pattern.startswith("#"):
            continue
        anywhere = pattern.startswith("**/")
        # A pattern matches a path from the root, or what lies below it. Its star crosses no slash.
        if anywhere and any(fnmatch(part, pattern.removeprefix("**/")) for part in parts):
            return True
        if any(fnmatch(start, pattern) and start.count("/") == pattern.count("/") for start in starts):
            return True
    return False


def tracked() -> list[str]:
    return subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_everything_that_is_copied_is_there_and_sent(instructions: list[Instruction]) -> None:
    copies = [text.split() for text in named(instructions, "COPY")]
    assert len(copies) == 3
    for words in copies:
        for source in [word for word in words if not word.startswith("--")][:-1]:
            found = list(ROOT.glob(source)) if source != "." else [ROOT]
            assert found, source
            assert not any(ignored(str(path.relative_to(ROOT))) for path in found if path != ROOT), source


def test_the_image_has_the_checkout_and_nothing_else() -> None:
    assert [path for path in tracked() if ignored(path)] == []
    caches = (
        ".mypy_cache/x",
        ".cache/x",
        "torchrl_grpo/__pycache__/x.pyc",
        ".venv/bin/python",
        ".venv-sglang/x",
    )
    for path in (".git/config", ".env", ".netrc", "outputs/run/log", "wandb/x", "model.safetensors", *caches):
        assert ignored(path), path


def test_what_the_installation_depends_on_is_copied_before_it(instructions: list[Instruction]) -> None:
    before = []
    for one in instructions:
        if one.name == "RUN" and "scripts/setup.sh" in one.text:
            break
        if one.name == "COPY":
            before += [word for word in one.text.split()[:-1] if not word.startswith("--")]
    setup = (ROOT / "scripts/setup.sh").read_text()
    (checksum,) = re.findall(r"^checksum\(\).*?^\}", setup, re.S | re.M)
    needed = set(re.findall(r"[\w/]+\.(?:txt|toml|py|sh)\b", checksum))
    assert {"pyproject.toml", "setup.py", "requirements_common.txt"} <= needed
    for path in needed:
        assert any(fnmatch(path, source) or path.startswith(source) for source in before), path


def test_its_commands_are_those_of_the_readme(instructions: list[Instruction]) -> None:
    (command,) = named(instructions, "CMD")
    assert " ".join(json.loads(command)) in (ROOT / "README.md").read_text()
    # The set-up is what make calls, so the command finds it done.
    (setup,) = [text for text in named(instructions, "RUN") if "setup.sh" in text]
    assert "bash scripts/setup.sh" in setup and "bash scripts/setup.sh" in (ROOT / "Makefile").read_text()
    assert "ACCELERATOR=cpu" in named(instructions, "ENV")
    assert "ACCELERATOR=cuda" in named(read_instructions(FILE, {"ACCELERATOR": "cuda"}), "ENV")


def test_it_runs_as_nobody_special_and_holds_no_secret(instructions: list[Instruction]) -> None:
    assert named(instructions, "USER")[-1] == "1000"
    names = [text.partition("=")[0] for text in [*named(instructions, "ARG"), *named(instructions, "ENV")]]
    assert not any(word in name for name in names for word in ("KEY", "TOKEN", "SECRET", "PASSWORD"))


def test_the_page_names_its_arguments_and_files(instructions: list[Instruction]) -> None:
    page = PAGE.read_text()
    given = set(re.findall(r"--build-arg (\w+)=", page))
    declared = {text.partition("=")[0] for text in named(instructions, "ARG")}
    assert given and given <= declared
    builds = re.findall(r"docker build .*", page)
    for line in builds:
        assert f"-f {FILE.relative_to(ROOT)}" in line
    assert all(line.strip("# ") in page for line in FILE.read_text().splitlines() if "docker build" in line)
    (home,) = named(instructions, "WORKDIR")
    mounts = re.findall(r"-v \S+?:(/[\w/.-]+)", page)
    assert mounts
    made = " ".join(named(instructions, "RUN"))
    for mount in mounts:
        assert mount in made and mount.startswith(home.rpartition("/")[0])
