r"""Competition mathematics (MATH). A row has ``problem`` and either ``answer`` or a boxed ``solution``."""

from __future__ import annotations

from torchrl_grpo.config import Config
from torchrl_grpo.config.schema import EnvConfig
from torchrl_grpo.data import problems, prompts
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.latex import last_boxed
from torchrl_grpo.data.rows import columns, sources
from torchrl_grpo.errors import DataError

HUB = sources.Hub(
    "EleutherAI/hendrycks_math",
    (
        "algebra",
        "counting_and_probability",
        "geometry",
        "intermediate_algebra",
        "number_theory",
        "prealgebra",
        "precalculus",
    ),
)


def load(cfg: Config) -> problems.Problems:
    """Load MATH from the hub or from ``env.data_path``; see :func:`torchrl_grpo.data.load`."""
    return problems.build(cfg, sources.resolve(cfg, HUB), example)


def example(row: sources.Row, env: EnvConfig, id: str) -> Example:
    r"""Convert a row to an example; ``truth`` is ``{"answer": latex}``.

    The answer is the column ``answer`` if there is one, else the last ``\boxed{}`` of ``solution``.

    Raises:
        DataError: a column is missing or not text, or the solution has no closed ``\boxed{}``.
    """
    question = columns.text(row, "problem", "math")
    text = row.values.get("solution")
    reasoning = text if isinstance(text, str) else ""
    if "answer" in row.values:
        answer = columns.answer(row, "answer", "math")
    elif "solution" in row.values:
        boxed = columns.text(row, "solution", "math")
        latex = last_boxed(boxed)
        if latex is None:
            raise DataError(
                f"math: {row.where}: the solution has no closed \\boxed{{}}: {boxed[-80:]!r}; "
                "box the final answer or give it in a column 'answer'"
            )
        answer = latex
    else:
        raise DataError(
            f"math: {row.where} has neither a column 'answer' nor 'solution'; its columns are "
            f"{', '.join(map(repr, row.values))}; add one of the two"
        )
    solution = prompts.solution(env, reasoning, answer, reasoning or None)
    messages = prompts.messages(env, "math", question)
    return Example(id, messages, {"answer": answer}, solution=solution, question=question)
