"""What all tests share: a quiet offline environment, the two models, and where things are."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import tempfile
import zlib
from pathlib import Path
from typing import Any

import composed_once
import frozen_heap
import pytest
from tiny_model import build_tiny_model

# Before anything imports torch, transformers or vllm; commands that tests start inherit it.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    DO_NOT_TRACK="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    MPLBACKEND="Agg",
    # Without this, each process that compiles starts two more, which import torch.
    TORCHINDUCTOR_COMPILE_THREADS="1",
)
# Each process of `make test` has its share of the cores. With more threads than cores, threads wait for each
# other at the end of every small product, and a test takes up to forty times as long. The small matrices of
# tests never gain from more than four threads.
_WORKERS = os.environ.get("PYTEST_XDIST_WORKER_COUNT")
_THREADS = str(max(1, min(4, (os.cpu_count() or 1) // int(_WORKERS or "1"))))
if _WORKERS:
    # Not a default: the process that starts the workers has chosen for itself below, and they inherit that.
    os.environ["OMP_NUM_THREADS"] = _THREADS
os.environ.setdefault("OMP_NUM_THREADS", _THREADS)

# In a shell's background a process begins with interrupts ignored, and so would those that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Files with real engines, which take gigabytes. The tests of a part run one after the other, in this order.
# The runs that train SmolLM2 are at the start of one part and at the end of the other, so that there is
# rarely more than one of them at a time.
PARTS = {
    "ray": ("rollout/test_async_ray", "planning/test_memory"),
    "engines": (
        "runs/test_integration",
        "inference/test_vllm_families",
        "inference/test_vllm",
        "inference/test_vllm_server",
        "runs/test_slurm_runs",
        "inference/test_parallel_server",
        "inference/test_sglang_server",
        "docs/test_benchmarks",
    ),
}
# Of what is left, the longest files first, so that no process is left with one when the others have ended.
LONG = tuple(
    f"tests/{name}.py"
    for name in (
        "distributed/test_ranks",
        "api/test_trainer",
        "runs/test_async_runs",
        "distributed/test_deepspeed",
        "runs/test_episode_runs",
        "runs/test_in_turn",
        "runs/test_training_runs",
        "runs/test_cli_runs",
        "cli/test_cli_mistakes",
        "models/test_compile",
        "runs/test_pretended_cuda_runs",
        "models/test_families",
        "weight_sync/test_publish",
        "runs/test_server_runs",
        "docs/test_notebooks",
        "rewards/test_rewards",
        "planning/test_devices",
        "config/test_config",
        "envs/test_torchrl_episodes",
        "weight_sync/test_lora_publish",
        "envs/test_episode_tokens",
        "config/test_presets",
        "envs/test_tools",
        "runs/test_sft_runs",
        "runtime/test_gpu_check",
    )
)
PART_OF = {f"tests/{name}.py": part for part, names in PARTS.items() for name in names}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Divide tests between the processes of ``make test``: by file, and by ``PARTS``."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return PART_OF.get(file, file)

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put ``PARTS`` first, which take longest and leave the rest to other processes, and then ``LONG``."""
    order = {file: number for number, file in enumerate((*PART_OF, *LONG))}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


# Collecting tests imports much and frees little.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage again, but not among modules and tests; and read configuration files once."""
    frozen_heap.start()
    composed_once.start()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Have a process of ``make test`` leave quickly. The process that started it has all results by then."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        atexit.register(_leave)


def _leave() -> None:
    """Do what libraries do at exit, but do not take the interpreter apart: with vLLM, that takes 7 s."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    os._exit(0)


_file: Path | None = None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin a file as if it were the first: no garbage of the files before, no signal handler of theirs."""
    global _file
    if item.path != _file:
        _file = item.path
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        frozen_heap.freeze_new_modules()


# Another number draws other formats; CI gives each commit its own.
TEST_SEED = os.environ.get("TEST_SEED", "0")


def pytest_report_header() -> str:
    return f"TEST_SEED={TEST_SEED} draws the number format of whole runs"


@pytest.fixture
def number_format(request: pytest.FixtureRequest) -> str:
    """``float32`` or ``bfloat16`` for a whole run, drawn from the test's name and ``TEST_SEED``.

    Tests that compare numbers to rounding say so with the marker ``float32``.
    """
    if request.node.get_closest_marker("float32") is not None:
        return "float32"
    return ("float32", "bfloat16")[zlib.crc32(f"{TEST_SEED} {request.node.nodeid}".encode()) % 2]


@pytest.fixture
def format_words(number_format: str) -> list[str]:
    """``number_format`` as words of a command line."""
    autocast = {"float32": "'no'", "bfloat16": "bf16"}[number_format]
    return [f"inference_model.dtype={number_format}", f"train_model.autocast={autocast}"]


@pytest.fixture(scope="session", autouse=True)
def _scratch_for_loggers() -> object:
    """Keep what W&B writes on the side out of the checkout and of the user's home."""
    with tempfile.TemporaryDirectory(prefix="torchrl-grpo-tests-") as folder:
        for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
            os.environ[name] = folder
        yield


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data(repo_root: Path) -> Path | None:
    """The folder with the full GSM8K and IFEval files beside the checkout, or None where there is none."""
    folder = repo_root.parent / "shared" / "data"
    return folder if folder.is_dir() else None


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A folder for one run, not made yet."""
    return tmp_path / "run"


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a chat template; do not write to it."""
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The real SmolLM2-135M-Instruct, converted once and cached; do not write to it."""
    from torchrl_grpo.models.smollm2 import prepare

    return prepare()


@pytest.fixture
def float64() -> object:
    """Everything that the test computes is in float64: it asserts equality up to ``rounding.EXACT``."""
    import rounding  # which imports torch

    with rounding.float64():
        yield
