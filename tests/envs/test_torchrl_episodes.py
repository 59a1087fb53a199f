"""TorchRL's own environments as environments of episodes, by their names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked import preload_vllm
from forked_server import forked_processes
from one_host import OpenHost, one_host  # noqa: F401  a fixture
from tiny_runs import Runner, config, train  # noqa: F401  fixtures

from torchrl_grpo.config import Config
from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.episodes.torchrl_env import TorchRLEpisode
from torchrl_grpo.envs.episodes.types import Step
from torchrl_grpo.runtime import user_code
from torchrl_grpo.tools.verify_resume import read

# A process that imports TorchRL's chats imports vLLM.
pytestmark = pytest.mark.slow

# A chat in which every answer is counted and the third ends the episode.
OWN = '''
import torch
from torchrl.data.llm import History
from torchrl.envs import Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.data import Unbounded


class Count(Transform):
    """Pays for a question mark, and asks for more until there have been three answers."""

    def _step(self, tensordict, next_tensordict):
        prompt = next_tensordict["history"].prompt
        answers = [one.content for one in prompt[0].unbind(0) if one.role == "assistant"]
        next_tensordict["reward"] = torch.tensor([[float(answers[-1].endswith("?"))]])
        done = torch.tensor([[len(answers) == 3]])
        next_tensordict.update({"done": done, "terminated": done})
        if len(answers) < 3:
            more = History(role=["user"], content=[f"{len(answers)} of 3"], batch_size=[1])
            next_tensordict["history"].prompt = torch.cat([prompt, more.unsqueeze(0)], 1)
        return next_tensordict

    def transform_reward_spec(self, reward_spec):
        return Unbounded(shape=(1, 1))


def chat(system="Ask me."):
    return TransformedEnv(ChatEnv(system_prompt=system), Count())
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_a_chat_with_transforms_answers_until_it_is_done(file: Path) -> None:
    episode = TorchRLEpisode(user_code.load(f"{file}:chat", "env.environment")(system="Be curious."))
    question = {"role": "user", "content": "I saw something."}
    assert episode.reset(Example("x/1", [question])) == [
        {"role": "system", "content": "Be curious."},
        question,
    ]
    assert [episode.step(text) for text in ("What?", "I see.", "Why?")] == [
        Step([{"role": "user", "content": "1 of 3"}], 1.0, False),
        Step([{"role": "user", "content": "2 of 3"}], 0.0, False),
        Step([], 1.0, True),
    ]


def test_a_chat_that_says_nothing_ends_after_one_answer() -> None:
    from torchrl.envs.llm import ChatEnv

    episode = TorchRLEpisode(ChatEnv())
    episode.reset(Example("x/1", [{"role": "user", "content": "Hello"}]))
    assert episode.step("Hello.") == Step([], 0.0, True)


def test_a_batch_of_several_is_refused() -> None:
    from torchrl.envs.llm import ChatEnv

    with pytest.raises(ValueError, match=r"batch size \(2,\), and an episode has \(1,\)"):
        TorchRLEpisode(ChatEnv(batch_size=[2]))


def test_torchrl_s_countdown_trains(
    config: Config, train: Runner, tmp_path: Path, one_host: OpenHost
) -> None:
    config.env.dataset = "torchrl_grpo.envs.episodes.torchrl_env:problems"
    config.env.data_path, config.env.task_args = None, {"size": 20}
    config.env.environment = "torchrl.envs.llm:CountdownEnv"
    config.env.environment_args = {"num_count": 3}
    config.reward.weights = {}
    config.inference_model.max_model_len, config.inference_model.max_new_tokens = 800, 8
    preload_vllm()
    with forked_processes():
        # The run gets this one.
        one_host(config, [])
    lines = train("run", train__total_dialog_turns=16)
    rows = read(tmp_path / "run/rollouts.jsonl")
    assert len({row["prompt"] for row in rows}) == 4 and "Using the numbers [" in rows[0]["prompt"]
    assert lines[1]["episode/failed"] == 0 and lines[1]["episode/turns"] == 1
    assert all(0 <= row["reward"] <= 1 for row in rows)
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 1
