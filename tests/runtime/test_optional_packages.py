"""Packages that are installed and not used do not speak, and a launcher that starts too few is spoken of."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from torchrl_grpo.distributed import launch
from torchrl_grpo.runtime.optional_packages import quiet_unused

DEEPSPEED, BITSANDBYTES = "DeepSpeed", "bitsandbytes.backends.cpu.ops"


def heard(name: str, level: int) -> bool:
    """Whether a record of that level is passed on by a package's logger."""
    logger = logging.getLogger(name)
    record = logging.LogRecord(name, level, __file__, 1, "text", None, None)
    return logger.isEnabledFor(level) and bool(logger.filter(record))


@pytest.fixture(autouse=True)
def as_before() -> object:
    yield
    logging.getLogger("bitsandbytes").setLevel(logging.NOTSET)
    for log_filter in list(logging.getLogger(DEEPSPEED).filters):
        logging.getLogger(DEEPSPEED).removeFilter(log_filter)


def test_only_who_is_used_may_warn() -> None:
    quiet_unused(uses_deepspeed=False, uses_bitsandbytes=False)
    assert not heard(DEEPSPEED, logging.WARNING) and not heard(BITSANDBYTES, logging.WARNING)
    assert heard(DEEPSPEED, logging.ERROR) and heard(BITSANDBYTES, logging.ERROR)
    quiet_unused(uses_deepspeed=True, uses_bitsandbytes=True)
    assert heard(DEEPSPEED, logging.WARNING) and heard(BITSANDBYTES, logging.WARNING)
    quiet_unused(uses_deepspeed=False, uses_bitsandbytes=False)
    assert not heard(DEEPSPEED, logging.WARNING) and not heard(BITSANDBYTES, logging.WARNING)


@pytest.mark.slow
def test_deepspeed_is_imported_without_a_word() -> None:
    pytest.importorskip("deepspeed")
    code = (
        "from torchrl_grpo.runtime.optional_packages import quiet_unused\n"
        "quiet_unused(False, False)\n"
        "import deepspeed, logging; assert logging.getLogger('DeepSpeed').handlers"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "WARNING" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        ("python accelerate launch --num_processes 2 grpo.py", 2),
        ("accelerate launch --num-processes=3 grpo.py", 3),
        ("accelerate launch --num_processes 1 grpo.py", 1),
        ("accelerate launch grpo.py", 1),
        ("accelerate launch grpo.py --num_processes", 1),
        ("", 1),
        ("accelerate launch --config_file FILE grpo.py", 4),
        ("accelerate launch --config-file=FILE --num_processes 2 grpo.py", 2),
        ("accelerate launch --config_file nowhere.yaml grpo.py", 1),
    ],
)
def test_a_launcher_that_started_too_few_is_spoken_of(
    words: str, processes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "cpus.yaml"
    file.write_text("distributed_type: MULTI_CPU\nnum_processes: 4\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    monkeypatch.setattr(launch, "parent_argv", words.replace("FILE", str(file)).split)
    assert launch.missing_ranks_warning() is None, "no launcher"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    warning = launch.missing_ranks_warning()
    assert (warning is None) == (processes == 1)
    if warning is not None:
        assert (
            f"asked for {processes} processes" in warning
            and f"train_model.num_devices={processes}" in warning
        )
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert launch.missing_ranks_warning() is None
