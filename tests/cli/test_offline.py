"""Names on the hub without a network: one line, without a request that is repeated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrl_grpo.runtime.rank_env import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.name=nobody/nothing"], "model.name=nobody/nothing: the Hugging Face hub cannot"),
        (["model.name=MODEL"], "cannot load openai/gsm8k (main) from the Hugging Face hub: it cannot"),
        (
            ["model.name=MODEL", "env.hub_name=me/mine"],
            "cannot load me/mine from the Hugging Face hub",
        ),
    ],
)
def test_a_name_on_a_hub_that_does_not_answer_is_one_line(
    words: list[str], message: str, tmp_path: Path, tiny_model_dir: Path
) -> None:
    # Nothing listens there, so each request fails at once, and a client that repeats it says so.
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "0",
        "HF_DATASETS_OFFLINE": "0",
        "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}",
        "HF_HOME": str(tmp_path / "hub"),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "sota-implementations/grpo/grpo.py")),
            *(word.replace("MODEL", str(tiny_model_dir)) for word in words),
            *("inference_model.backend=transformers", "inference_model.max_model_len=512"),
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {message}") and "Connection refused" in line and "does not have" in line
