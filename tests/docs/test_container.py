"""The container file: what it copies is there, and its commands are those of the README."""

from __future__ import annotations

import json
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from containerfile import Instruction, read_instructions

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "launch/container/Dockerfile"
PAGE = ROOT / "docs/containers.md"
COMPOSE = ROOT / "launch/container/compose.yaml"


@pytest.fixture(scope="module")
def instructions() -> list[Instruction]:
    return read_instructions(FILE)


def named(instructions: list[Instruction], name: str) -> list[str]:
    return [instruction.text for instruction in instructions if instruction.name == name]


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
            paths = list(ROOT.glob(source)) if source != "." else [ROOT]
            assert paths, source
            assert not any(ignored(str(path.relative_to(ROOT))) for path in paths if path != ROOT), source


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
    for instruction in instructions:
        if instruction.name == "RUN" and "scripts/setup.sh" in instruction.text:
            break
        if instruction.name == "COPY":
            before += [word for word in instruction.text.split()[:-1] if not word.startswith("--")]
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


def test_the_compose_file_builds_this_image_with_the_options_of_the_page(
    instructions: list[Instruction],
) -> None:
    compose = yaml.safe_load(COMPOSE.read_text())
    page = PAGE.read_text()
    lines = re.findall(r"docker compose -f (\S+) run --rm (\w+)", page)
    assert {name for _, name in lines} == compose["services"].keys()
    assert {path for path, _ in lines} == {str(COMPOSE.relative_to(ROOT))}
    declared = {text.partition("=")[0] for text in named(instructions, "ARG")}
    mounts = dict(re.findall(r"-v torchrl-grpo-(\w+):(\S+)", page))
    for name, service in compose["services"].items():
        build = service["build"]
        assert (COMPOSE.parent / build["context"]).resolve() == ROOT
        assert ROOT / build["dockerfile"] == FILE
        assert build.get("args", {}).keys() <= declared
        assert dict(volume.split(":") for volume in service["volumes"]) == mounts and len(mounts) == 2
        assert mounts.keys() == compose["volumes"].keys()
        assert f"--shm-size={service['shm_size'].removesuffix('b')} " in page
        # Keys come from the shell, and are named on the page.
        assert all("=" not in variable and f"-e {variable}" in page for variable in service["environment"])
        assert service["profiles"] == [name]
    cuda = compose["services"]["cuda"]
    assert cuda["build"]["args"] == {"ACCELERATOR": "cuda"} and cuda["image"] == "torchrl-grpo:cuda"
    (device,) = cuda["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert all(
        line.strip("# ") in page for line in COMPOSE.read_text().splitlines() if "docker compose" in line
    )


def test_the_page_names_its_arguments_and_files(instructions: list[Instruction]) -> None:
    page = PAGE.read_text()
    documented = set(re.findall(r"--build-arg (\w+)=", page))
    declared = {text.partition("=")[0] for text in named(instructions, "ARG")}
    assert documented and documented <= declared
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
