"""Install the CUDA requirements into an empty environment, and import what imports without a GPU.

    .venv/bin/python scripts/check_cuda_install.py --python python3.12 --vllm 0.24

The environment takes about 10 GB and is deleted at the end. With ``--resolve`` nothing is installed: uv only
finds versions that fit together, for a Python that need not be there (``--python 3.13``).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAIN = "requirements_ifeval.txt"  # the one that holds all tasks
OVERRIDES = {"0.32": [], "0.24": ["--overrides", "requirements_vllm024.txt"]}
# Imports every module of the package, and each name of vLLM that it uses. None of it may need a GPU.
IMPORTS = """
import ast, importlib, importlib.metadata, pathlib, pkgutil
import torch, vllm, transformers, torchrl, tensordict, ray, peft, accelerate, datasets
import torchrl_grpo
from torchrl_grpo.inference import vllm_compat
modules = [one.name for one in pkgutil.walk_packages(torchrl_grpo.__path__, "torchrl_grpo.")]
modules = [name for name in modules if not name.endswith("__main__")]
for name in modules:
    importlib.import_module(name)
used = 0
for node in ast.walk(ast.parse(pathlib.Path(vllm_compat.__file__).read_text())):
    if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "vllm":
        for alias in node.names:
            try:
                importlib.import_module(f"{node.module}.{alias.name}")
            except ModuleNotFoundError:
                getattr(importlib.import_module(node.module), alias.name)
            used += 1
assert used > 15 and torch.version.cuda is not None and not torch.cuda.is_available()
packages = ("torch", "vllm", "transformers", "torchrl", "tensordict")
found = [f"{name} {importlib.metadata.version(name)}" for name in packages]
print(f"imported {len(modules)} modules and {used} names of vLLM: {', '.join(found)}")
"""


def uv(*arguments: str) -> None:
    """Run uv, which is in the environment of this interpreter.

    Raises:
        subprocess.CalledProcessError: uv fails.
    """
    subprocess.run([str(Path(sys.executable).with_name("uv")), *arguments], cwd=ROOT, check=True)


def install(python: str, overrides: list[str], folder: Path) -> None:
    """Install into a new environment in ``folder``, and import."""
    made = folder / "venv"
    uv("venv", "--quiet", "--python", python, str(made))
    interpreter = str(made / "bin/python")
    uv("pip", "install", "--quiet", "--python", interpreter, *overrides, "-r", MAIN)
    # A copy, because a build writes beside its sources.
    copy = folder / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("torchrl_grpo", "config", "docs"):
        shutil.copytree(ROOT / name, copy / name)
    uv("pip", "install", "--quiet", "--python", interpreter, "--no-deps", str(copy))
    # A GPU of this machine is hidden: the check is that none is needed. Elsewhere than in the checkout, the
    # installed package is imported.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    subprocess.run([interpreter, "-c", IMPORTS], cwd=folder, env=environment, check=True)


def main() -> None:
    """Check what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter; with --resolve also a version")
    parser.add_argument("--vllm", choices=sorted(OVERRIDES), default="0.32")
    parser.add_argument("--resolve", action="store_true", help="install nothing")
    parser.add_argument(
        "--folder", type=Path, help="where the environment is made; default: a temporary folder"
    )
    args = parser.parse_args()
    overrides = OVERRIDES[args.vllm]
    folder = Path(tempfile.mkdtemp(prefix="cuda-install-", dir=args.folder))
    try:
        if args.resolve:
            output = str(folder / "versions.txt")
            version = ["--python-version", args.python]
            uv("pip", "compile", "--quiet", *version, *overrides, MAIN, "--output-file", output)
        else:
            install(args.python, overrides, folder)
    finally:
        shutil.rmtree(folder)
    done = "resolved" if args.resolve else "installed and imported"
    print(f"Python {args.python}, vLLM {args.vllm}: {done}")


if __name__ == "__main__":
    main()
