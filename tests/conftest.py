"""What all tests share: a quiet offline environment, the two models, and where things are."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import tempfile
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

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
    # Ray gives its workers niceness 15. Beside two busy processes, such a worker takes a minute to start.
    RAY_worker_niceness="0",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    MPLBACKEND="Agg",
    # Without this, each process that compiles starts two more, which import torch.
    TORCHINDUCTOR_COMPILE_THREADS="1",
)
# With more threads than free cores, threads wait for each other at the end of every small product, and a test
# takes ten times as much of a core. The small matrices of tests gain nothing from threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

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
        "inference/test_vllm_pictures",
        "inference/test_vllm",
        "inference/test_vllm_server",
        "runs/test_slurm_runs",
        "inference/test_parallel_server",
        "inference/test_sglang_server",
        "docs/test_benchmarks",
        # Their processes are forks of one that has imported vLLM.
        "rewards/test_judge_server",
        "envs/test_torchrl_episodes",
    ),
}
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
    """Put ``PARTS`` first, then files of slow tests alone, so that short files fill up the end.

    Such a file takes up to four minutes. Begun last, it would leave the other processes idle.
    """
    order = {file: number for number, file in enumerate(PART_OF)}
    with_fast = {item.path for item in items if not item.get_closest_marker("slow")}
    items.sort(
        key=lambda item: (order.get(item.nodeid.partition("::")[0], len(order)), item.path in with_fast)
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collections, and keep what was imported and collected out of later ones.

    A fifth of the time to collect was for looking through the same objects again and again. Each run ends
    with two collections, which would take 0.3 s each. Even one here would take 1.2 s, and free no memory.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # At exit, the bindings of Triton print a page about each object that is never collected.
        atexit.register(gc.unfreeze)


_file: Path | None = None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin a file as if it were the first: no signal handler and no log of the files before."""
    global _file
    if item.path != _file:
        _file = item.path
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # What earlier files imported. Each run, and each lack of memory, collects garbage, and would look
        # through it for 0.3 s.
        gc.collect()
        gc.freeze()
        # Hydra sets up logging for the whole process.
        root = logging.getLogger()
        root.setLevel(logging.WARNING)
        root.handlers = [
            handler for handler in root.handlers if type(handler).__module__ == "_pytest.logging"
        ]


# Another number draws other formats; CI gives each commit its own.
TEST_SEED = os.environ.get("TEST_SEED", "0")


def pytest_report_header() -> str:
    return f"TEST_SEED={TEST_SEED} draws the number format of whole runs"


@pytest.fixture
def number_format(request: pytest.FixtureRequest) -> str:
    """``float32`` or ``bfloat16`` for a whole run, drawn from the test's name and ``TEST_SEED``.

    Tests that compare numbers to rounding say so with the marker ``float32``. Processors without fast
    products in bfloat16 compute in float32.
    """
    from processors import multiplies_in_bfloat16

    if request.node.get_closest_marker("float32") is not None or not multiplies_in_bfloat16():
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


@pytest.fixture(scope="session", autouse=True)
def _configurations_are_composed_once() -> Iterator[None]:
    from composed_once import compose_once  # which imports Hydra

    with pytest.MonkeyPatch.context() as patch:
        compose_once(patch)
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
