"""Names on the hub without a network: one line, without a request that is repeated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrl_grpo.runtime.rank_env import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


# Each command line in turn, in one process: importing what reads data sets takes three seconds of a core.
ALL = """
import json, sys
from torchrl_grpo.cli.commands import grpo

for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        grpo()
    except SystemExit as ended:
        print(ended.code, flush=True)
"""
MISTAKES = {
    ("model.name=nobody/nothing",): "model.name=nobody/nothing: the Hugging Face hub cannot",
    ("model.name=MODEL",): "cannot load openai/gsm8k (main) from the Hugging Face hub: it cannot",
    ("model.name=MODEL", "env.hub_name=me/mine"): "cannot load me/mine from the Hugging Face hub",
}


def test_a_name_on_a_hub_that_does_not_answer_is_one_line(tmp_path: Path, tiny_model_dir: Path) -> None:
    # Nothing listens there, so each request fails at once, and a client that repeats it says so.
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "0",
        "HF_DATASETS_OFFLINE": "0",
        "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}",
        "HF_HOME": str(tmp_path / "hub"),
        "PYTHONPATH": str(ROOT),
    }
    small = ("inference_model.backend=transformers", "inference_model.max_model_len=512")
    lines = [[*(word.replace("MODEL", str(tiny_model_dir)) for word in words), *small] for words in MISTAKES]
    done = subprocess.run(
        [sys.executable, "-c", ALL, json.dumps(lines)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert [line for line in done.stdout.splitlines() if line.isdigit()] == ["2"] * len(MISTAKES)
    for line, message in zip(done.stderr.splitlines(), MISTAKES.values(), strict=True):
        assert (
            line.startswith(f"error: {message}") and "Connection refused" in line and "does not have" in line
        )
