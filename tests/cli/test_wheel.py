"""The wheel: what is in it, and that its commands run from any folder without a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

from torchrl_grpo.runtime.config_dir import config_dir

pytestmark = pytest.mark.slow

# What an entry point of the wheel does. It says which package it ran, for the environment has another one.
ENTRY_POINT = """
import sys
from importlib.metadata import distribution
import torchrl_grpo
sys.stderr.write(f"{torchrl_grpo.__file__}\\n")
name, sys.argv[0] = sys.argv[1], f"/usr/bin/{sys.argv.pop(1)}"
(entry,) = distribution("torchrl-grpo").entry_points.select(group="console_scripts", name=name)
entry.load()()
"""

COMMANDS = (
    "grpo",
    "grpo-sft",
    "grpo-serve",
    "grpo-eval",
    "grpo-chat",
    "grpo-report",
    "grpo-doctor",
    "grpo-sweep",
)


@pytest.fixture(scope="module")
def wheel(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built offline from a copy: a build writes beside its sources."""
    copy = tmp_path_factory.mktemp("wheel") / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(repo_root / name, copy)
    for name in ("torchrl_grpo", "config", "tests"):
        shutil.copytree(repo_root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    words = [
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        "built",
        ".",
    ]
    done = subprocess.run([sys.executable, "-m", "pip", *words], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = (copy / "built").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The wheel unpacked, as pip puts it into site-packages."""
    folder = wheel.parent / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def _command(
    installed: Path, folder: Path, name: str, *words: str
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run an entry point in ``folder``; the result, and the package that ran."""
    done = subprocess.run(
        [sys.executable, "-c", ENTRY_POINT, name, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done, Path(done.stderr.partition("\n")[0])


def test_the_wheel_holds_the_package_the_yaml_files_and_its_data_alone(wheel: Path, repo_root: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    info = "torchrl_grpo-0.1.0.dist-info/"
    endings = {".py", ".jinja", ".html", ".css", ".js"}
    files = [file for file in (repo_root / "torchrl_grpo").rglob("*.*") if file.suffix in endings]
    package = {str(file.relative_to(repo_root)) for file in files}
    config = repo_root / "config"
    yaml = {f"torchrl_grpo/config/yaml/{path.relative_to(config)}" for path in config.rglob("*.yaml")}
    more = {"torchrl_grpo/py.typed", "torchrl_grpo/config/other_systems.tsv"}
    assert {name for name in names if not name.startswith(info)} == package | yaml | more
    assert f"{info}licenses/LICENSE" in names


def test_the_wheel_has_all_commands(installed: Path) -> None:
    parser = ConfigParser()
    parser.read(installed / "torchrl_grpo-0.1.0.dist-info" / "entry_points.txt")
    assert set(parser["console_scripts"]) == {"grpo-async", *COMMANDS}


@pytest.mark.parametrize("name", ["grpo", "grpo-async"])
def test_help_of_an_installed_command_names_the_command(installed: Path, tmp_path: Path, name: str) -> None:
    done, package = _command(installed, tmp_path, name, "--help")
    assert done.returncode == 0, done.stderr
    assert package.is_relative_to(installed)
    assert f"usage: {name} [--config-name NAME]" in done.stdout and "python" not in done.stdout
    assert "grpo_quickstart" in done.stdout and list(tmp_path.iterdir()) == []


def test_help_of_an_installed_command_points_to_files_that_exist(installed: Path, tmp_path: Path) -> None:
    done, _ = _command(installed, tmp_path, "grpo", "--help")
    named = [word.rstrip(".,;") for word in done.stdout.split() if word.startswith("/") or "config/" in word]
    assert {Path(name).name for name in named} == {"base.yaml", "yaml"}
    assert all((tmp_path / name).exists() for name in named)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_installed_command_says_its_own_version(installed: Path, tmp_path: Path, name: str) -> None:
    done, _ = _command(installed, tmp_path, name, "--version")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "torchrl-grpo 0.1.0"), done.stderr


def test_an_installed_command_composes_what_the_checkout_does(
    installed: Path, tmp_path: Path, repo_root: Path
) -> None:
    words = ["--config-name", "grpo_quickstart", "--cfg", "job", "policy=gspo", "env.repeats=4"]
    done, package = _command(installed, tmp_path, "grpo", *words)
    assert done.returncode == 0, done.stderr
    assert package.is_relative_to(installed) and list(tmp_path.iterdir()) == []
    script = subprocess.run(
        [sys.executable, str(repo_root / "sota-implementations/grpo/grpo.py"), *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(repo_root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert script.returncode == 0, script.stderr
    assert "repeats: 4" in done.stdout and done.stdout == script.stdout


def test_an_installed_command_reports_a_mistake_in_one_line(installed: Path, tmp_path: Path) -> None:
    done, _ = _command(installed, tmp_path, "grpo", "--config-name", "grpo_none")
    assert done.returncode == 2
    yaml = installed / "torchrl_grpo" / "config" / "yaml"
    assert f"error: --config-name=grpo_none: {yaml} has no such configuration" in done.stderr


def test_an_installed_command_knows_the_names_of_other_systems(installed: Path, tmp_path: Path) -> None:
    done, _ = _command(installed, tmp_path, "grpo", "--learning_rate", "1e-5")
    assert done.returncode == 2 and "write optimizer.lr=1e-5 instead" in done.stderr


def test_a_checkout_reads_its_own_folder(repo_root: Path) -> None:
    assert config_dir() == repo_root / "config"
