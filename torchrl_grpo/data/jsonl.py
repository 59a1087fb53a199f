"""Any file of questions and answers. ``env.fields`` names their columns."""

from __future__ import annotations

from torchrl_grpo.config import Config
from torchrl_grpo.config.schema import EnvConfig
from torchrl_grpo.data import columns, problems, prompts, sources
from torchrl_grpo.data.example import Example
from torchrl_grpo.errors import ConfigError

_DEFAULT_FIELDS = {"question": "question", "answer": "answer"}


def load(cfg: Config) -> problems.Problems:
    """Load the rows of ``env.data_path`` or ``env.hub_name``; see :func:`torchrl_grpo.data.load`.

    Raises:
        ConfigError: neither is set, or ``env.fields`` has a key other than ``question`` and ``answer``.
    """
    if cfg.env.data_path is None and cfg.env.hub_name is None:
        raise ConfigError("env.dataset=jsonl needs a file: set env.data_path=FILE.jsonl (or env.hub_name)")
    field_names(cfg.env)
    return problems.build(cfg, sources.resolve(cfg, sources.Hub("")), example)


def field_names(env: EnvConfig) -> dict[str, str]:
    """Return the column names: ``{"question": COLUMN, "answer": COLUMN}``.

    Raises:
        ConfigError: ``env.fields`` has a key other than ``question`` and ``answer``.
    """
    unknown = sorted(set(env.fields) - set(_DEFAULT_FIELDS))
    if unknown:
        raise ConfigError(
            f"env.fields has unknown key(s) {', '.join(map(repr, unknown))}; write "
            "env.fields={question: COLUMN, answer: COLUMN}"
        )
    return _DEFAULT_FIELDS | env.fields


def example(row: sources.Row, env: EnvConfig, id: str) -> Example:
    """Convert a row to an example; ``truth`` is ``{"answer": text}``.

    Raises:
        ConfigError: ``env.fields`` has unknown keys.
        DataError: a column is missing, the question is not text, or the answer is neither text nor a number.
    """
    names = field_names(env)
    question = columns.text(row, names["question"], "jsonl")
    answer = columns.answer(row, names["answer"], "jsonl")
    return Example(id, prompts.messages(env, "jsonl", question), {"answer": answer})
