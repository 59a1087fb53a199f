"""The small model of ``benchmarks.learning pictures`` reads its problems, and its command is accepted."""

from __future__ import annotations

from pathlib import Path

from cli_calls import accept

from benchmarks import learning, small_vlm
from torchrl_grpo.config.schema import EnvConfig, ModelConfig
from torchrl_grpo.data.picture_tasks import Generated
from torchrl_grpo.envs.chat import render
from torchrl_grpo.envs.solution_tokens import solutions
from torchrl_grpo.models.loading import load_tokenizer


def test_prompts_and_solutions_are_short(tmp_path: Path) -> None:
    small_vlm.build(tmp_path, seed=0)
    tokenizer = load_tokenizer(str(tmp_path), ModelConfig(name=str(tmp_path), pictures=True))
    env = EnvConfig(dataset="pictures", prompt_template=f"{{question}} {small_vlm.FORMAT}")
    env.task_args = {"kinds": ["count"], "size": 32}
    problems = [Generated(env, 0, "train", is_held_out=False)[number] for number in range(20)]
    for example in problems:
        _, tokens = render(tokenizer, example)
        assert tokens.count(tokenizer.convert_tokens_to_ids("<image>")) == 4
        assert len(tokens) + 12 <= 96
    for solution in solutions(tokenizer, problems, tokenizer.eos_token_id):
        assert small_vlm.in_tags(solution.text, None) == 1.0
        assert len(solution.tokens) <= 12
    assert small_vlm.in_tags("It is <answer>3</answer>", None) == 0.0


def test_command_of_the_experiment_is_accepted(tmp_path: Path) -> None:
    small_vlm.build(tmp_path, seed=0)
    (_, grpo) = learning.EXPERIMENTS["pictures"]["SFT, then GRPO"]
    assert accept(*grpo.words, f"model.name={tmp_path}").model.pictures
