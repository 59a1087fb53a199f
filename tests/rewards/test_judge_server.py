"""A judge in a real vLLM server that the run starts, and ends with everything it has started."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked import ensure_running, preload_vllm
from forked_server import forked_processes

from torchrl_grpo.config import Config
from torchrl_grpo.data.example import Example
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.rewards.registry import build_reward_set

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLES = [Example("one", [{"role": "user", "content": "One?"}])] * 2


def config(model: Path, **args: Any) -> Config:
    cfg = Config()
    cfg.env.dataset, cfg.env.data_path = "jsonl", __file__
    cfg.reward.functions = {"quality": "judge"}
    own = {"model": str(model), "device": "cpu", "rubric": "It is long.", **args}
    cfg.reward.args = {"quality": own}
    return cfg


def test_the_run_starts_the_server_of_a_judge_and_ends_it(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is too small to judge, so its answer is one of those that the request allows."""
    cfg = config(
        tiny_model_dir,
        engine_args={"max_model_len": 1024, "kv_cache_memory_bytes": 2**24, "max_num_seqs": 4},
        request={"max_tokens": 32, "structured_outputs": {"choice": ['{"score": 7}', '{"score": 9}']}},
    )
    # It compiles nothing on a CPU, and a fork has to know that before it imports.
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    preload_vllm()
    ensure_running()
    mine = psutil.Process()
    before = set(mine.children(recursive=True))
    with forked_processes(), closing(build_reward_set(cfg, None, 2)) as rewards:
        started = set(mine.children(recursive=True)) - before
        scores = rewards.score(["Short.", "It is long, as you can see."], EXAMPLES)
    assert not any(score.errors for score in scores)
    assert {score.verdicts["quality"] for score in scores} <= {'{"score": 7}', '{"score": 9}'}
    assert all(score.parts["quality"] in (pytest.approx(6 / 9), pytest.approx(8 / 9)) for score in scores)
    _, alive = psutil.wait_procs(started, timeout=60)
    assert started and not alive


def test_a_server_that_does_not_start_ends_the_run_before_it_does(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a broken installation of vLLM, because importing a whole one takes ten seconds of a core."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise ImportError('a library of it is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"quality\.device=cpu: the judge's server ended while it started"):
        build_reward_set(config(tiny_model_dir))
