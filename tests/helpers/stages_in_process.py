"""Training commands of ``make gpu-check`` inside the test's own process, on pretended GPUs.

The engine is that of transformers, the model and its round are tiny, and the memory in use is pretended: an
engine that is awake takes 0.2 GiB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from pretended_cuda import PretendedCuda

from torchrl_grpo.cli import checked_job
from torchrl_grpo.cli.compose import composer, open_free_form
from torchrl_grpo.config import Config
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.observe import report
from torchrl_grpo.rewards.text import BareNumberReward
from torchrl_grpo.runtime import hardware
from torchrl_grpo.runtime.config_dir import config_dir
from torchrl_grpo.runtime.hardware import Hardware
from torchrl_grpo.tools.gpu_check import runs
from torchrl_grpo.tools.gpu_check.runs import Context
from torchrl_grpo.training import job, loop

SMALL = (
    "inference_model.backend=transformers",
    "env.num_envs=2",
    "env.repeats=2",
    "inference_model.max_new_tokens=3",
    "train.total_dialog_turns=16",
    "train.checkpoint_frequency=4",
    "eval.num_problems=2",
    "eval.frequency=4",
    # A function of the user's starts processes.
    "reward.functions={}",
    "reward.weights={exact_match: 1.0, bare_number: 0.3}",
)


def machine(gpus: int, gib: float = 79.0) -> Hardware:
    return Hardware((gib,) * gpus, 200.0, ((9, 0),) * gpus)


class StagesInProcess:
    """Stands for the processes that stages start.

    Args:
        monkeypatch: of the test.
        do: function that is called with each composed configuration and its folder.

    Attributes:
        configs: all configurations.
        do: the same as the argument.
        gib: memory of all processes on the GPU while the engine sleeps.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, do: Callable[[Config, Path], object], gpus: int = 1
    ) -> None:
        self.configs: list[Config] = []
        self.gib = 0.5
        self.asleep = False
        self.do = do
        honest = TransformersEngine.sleep, TransformersEngine.wake

        def sleep(engine: TransformersEngine) -> None:
            honest[0](engine)
            self.asleep = True

        def wake(engine: TransformersEngine) -> None:
            honest[1](engine)
            self.asleep = False

        monkeypatch.setattr(TransformersEngine, "sleep", sleep)
        monkeypatch.setattr(TransformersEngine, "wake", wake)
        monkeypatch.setattr(loop, "cuda_in_use", self._in_use)
        monkeypatch.setattr(hardware, "present", lambda: machine(gpus))
        # Drawing takes as long as training.
        monkeypatch.setattr(report, "plot", lambda run_dir, grader: None)
        # A random model is never right; this tells its answers apart.
        monkeypatch.setattr(BareNumberReward, "__call__", lambda self, text, example: len(text) % 5 / 4)
        monkeypatch.setattr(runs, "call", self._call)

    def _in_use(self, name: str, device: Any) -> dict[str, float]:
        return {name: self.gib + 0.2 * (not self.asleep)}

    def _call(self, context: Context, name: str, command: Sequence[str]) -> str:
        words = [word for word in command[2:] if not word.startswith("--")]
        config_name = next(word for word in command if word.startswith("--config-name=")).partition("=")[2]
        sweeps = "--multirun" in command
        key = "hydra.sweep.dir=" if sweeps else "hydra.run.dir="
        folder = Path(next(word for word in words if word.startswith(key)).removeprefix(key))
        with composer(config_dir(), config_name) as tree:
            jobs = tree.jobs([open_free_form(word) for word in words], sweeps)
            for number, overrides in enumerate(jobs):
                node = tree.compose(overrides, number).node
                own = folder / str(number) if sweeps else folder
                (own / ".hydra").mkdir(parents=True)
                OmegaConf.save(node, own / ".hydra/config.yaml")
                self.configs.append(checked_job.resolve_job(node, lambda cfg: None))
                self.do(self.configs[-1], own)
        return ""


def run_pretended(cfg: Config, folder: Path) -> None:
    """Train on a pretended GPU."""
    with PretendedCuda():
        job.run(cfg, folder)
