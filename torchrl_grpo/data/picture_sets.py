"""Questions about pictures on the hub: Geometry3K, and counting in CLEVR.

A row has ``images``, ``problem`` with ``<image>`` where a picture belongs, and ``answer``.
"""

from __future__ import annotations

from torchrl_grpo.config import Config
from torchrl_grpo.config.schema import EnvConfig
from torchrl_grpo.data import problems, prompts
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.rows import columns, sources

HUBS = {
    "geometry3k": sources.Hub("hiyouga/geometry3k"),
    "clevr_count": sources.Hub("BUAADreamer/clevr_count_70k"),
}


def load(cfg: Config) -> problems.Problems:
    """Load the data set from the hub or from ``env.data_path``; see :func:`torchrl_grpo.data.load`."""
    return problems.build(cfg, sources.resolve(cfg, HUBS[cfg.env.dataset]), example)


def example(row: sources.Row, env: EnvConfig, id: str) -> Example:
    """Convert a row to an example without its pictures; ``truth`` is ``{"answer": text}``.

    Raises:
        DataError: a column is missing, or the problem is not text.
    """
    question = columns.text(row, "problem", env.dataset)
    answer = columns.answer(row, "answer", env.dataset)
    return Example(
        id,
        prompts.messages(env, env.dataset, question),
        {"answer": answer},
        solution=prompts.solution(env, "", answer),
        question=question,
    )
