"""The small model of ``benchmarks.learning pictures`` reads its problems in few tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_calls import accept

from benchmarks import learning, small_vlm
from torchrl_grpo.data.picture_tasks import Generated
from torchrl_grpo.envs.chat import render
from torchrl_grpo.envs.solution_tokens import solutions
from torchrl_grpo.models.loading import load_tokenizer


@pytest.mark.slow
def test_prompts_and_solutions_are_short(tmp_path: Path) -> None:
    small_vlm.build(tmp_path, seed=0)
    (_, grpo) = learning.EXPERIMENTS["pictures"]["SFT, then GRPO"]
    cfg = accept(*grpo.words, f"model.name={tmp_path}")
    tokenizer = load_tokenizer(str(tmp_path), cfg.model)
    problems = [Generated(cfg.env, 0, "train", is_held_out=False)[number] for number in range(20)]
    for example in problems:
        _, tokens = render(tokenizer, example)
        assert tokens.count(tokenizer.convert_tokens_to_ids("<image>")) == 4
        assert len(tokens) <= 24
    for solution in solutions(tokenizer, problems, tokenizer.eos_token_id):
        assert len(solution.tokens) == 2
