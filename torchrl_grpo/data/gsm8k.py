"""GSM8K: math word problems. Each ``answer`` is a worked solution that ends in ``#### N``."""

from __future__ import annotations

import re

from torchrl_grpo.config import Config
from torchrl_grpo.config.schema import EnvConfig
from torchrl_grpo.data import problems, prompts
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.rows import columns, sources
from torchrl_grpo.errors import DataError

_CALCULATOR = re.compile(r"<<[^<>\n]*>>")
HUB = sources.Hub("openai/gsm8k", ("main",))


def load(cfg: Config) -> problems.Problems:
    """Load GSM8K from the hub or from ``env.data_path``; see :func:`torchrl_grpo.data.load`."""
    return problems.build(cfg, sources.resolve(cfg, HUB), example)


def example(row: sources.Row, env: EnvConfig, id: str) -> Example:
    """Convert a row to an example; ``truth`` is ``{"answer": "72"}``.

    Raises:
        DataError: a column is missing or not text, or the answer has nothing after ``####``.
    """
    question = columns.text(row, "question", "gsm8k")
    solution = columns.text(row, "answer", "gsm8k")
    _, mark, final = solution.rpartition("####")
    final = final.strip().replace(",", "")
    if not mark or not final:
        raise DataError(
            f"gsm8k: {row.where}: the answer has no '####' followed by a number: {solution[-80:]!r}; "
            "end the answer with '#### N', or read the file with env.dataset=jsonl"
        )
    # The marks of a calculator are no text that a model should write.
    reasoning = _CALCULATOR.sub("", solution[: solution.rindex("####")]).strip()
    text = f"{reasoning}\n#### {final}".strip()
    return Example(
        id,
        prompts.messages(env, "gsm8k", question),
        {"answer": final},
        solution=prompts.solution(env, reasoning, final, text),
        question=question,
    )
