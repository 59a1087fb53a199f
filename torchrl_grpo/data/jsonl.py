"""Any file of questions, with or without answers. ``env.fields`` names their columns."""

from __future__ import annotations

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks.data import check_fields, check_source
from torchrl_grpo.config.schema import EnvConfig
from torchrl_grpo.data import problems, prompts
from torchrl_grpo.data.example import Example, is_role
from torchrl_grpo.data.identity import conversation
from torchrl_grpo.data.rows import columns, fields, sources
from torchrl_grpo.errors import DataError


def load(cfg: Config) -> problems.Problems:
    """Load the rows of ``env.data_path`` or ``env.hub_name``; see :func:`torchrl_grpo.data.load`.

    Raises:
        ConfigError: neither is set, or ``env.fields`` has an unknown key.
    """
    check_source(cfg.env)
    check_fields(cfg.env)
    return problems.build(cfg, sources.resolve(cfg, sources.Hub("")), example)


def _field_names(row: sources.Row, env: EnvConfig) -> dict[str, str]:
    """Return the columns of a row's fields: of ``question`` or ``messages``, and those of ``env.fields``.

    Without these, the prompt is the first column of ``question``, ``messages`` and ``prompt`` that there is.
    """
    if env.fields.keys() & {"question", "messages"}:
        return env.fields
    column = next((name for name in ("question", "messages", "prompt") if name in row.values), "question")
    field = "messages" if isinstance(row.values.get(column), list) else "question"
    return {field: column, **env.fields}


def example(row: sources.Row, env: EnvConfig, id: str) -> Example:
    """Convert a row to an example; ``truth`` is ``{"answer": text}``, or empty.

    Without ``env.fields.answer``, the column ``answer`` is read if it has text or a number, and so is
    ``solution`` if it has text. A null answer or solution is none. ``env.fields.messages`` names a list
    of chat messages, which is the prompt as it is. A last message of the assistant is the solution, and
    no part of the prompt. Without any solution, the answer is one. ``env.fields.identity`` names what
    problems have in common that are the same in other words.

    Raises:
        ConfigError: a template of ``env.fields`` cannot be read.
        DataError: a column is missing, the question is not text, the messages are none, or the answer is
            neither text nor a number.
    """
    names = _field_names(row, env)
    truth = {}
    if "answer" in names:
        column = names["answer"]
        resolved = fields.resolve(row, column, "env.fields.answer")
        # Answers may be missing, so a null is none. Another column than the row has is a mistake.
        if column not in resolved.values or not columns.is_missing(resolved.values[column]):
            truth["answer"] = columns.answer(resolved, column, "jsonl")
    elif columns.is_answer(row.values.get("answer")):
        # Another value, such as a list, is for a reward of one's own.
        truth["answer"] = columns.answer(row, "answer", "jsonl")
    solution = _solution(row, env, names, truth)
    identity = ""
    if "identity" in names:
        column = names["identity"]
        identity = columns.answer(fields.resolve(row, column, "env.fields.identity"), column, "jsonl")
    if "messages" in names:
        column = names["messages"]
        turns = fields.resolve(row, column, "env.fields.messages").values.get(column)
        if isinstance(turns, list) and len(turns) > 1 and _is_message(turns[-1], "assistant"):
            *turns, last = turns
            if "solution" not in names:
                solution = last["content"]
        chat = _messages(turns, row, column)
        start = [{"role": "system", "content": env.system_prompt}] if env.system_prompt is not None else []
        return Example(
            id, [*start, *chat], truth, solution=solution, question=conversation(chat), identity=identity
        )
    column = names["question"]
    question = columns.text(fields.resolve(row, column, "env.fields.question"), column, "jsonl")
    messages = prompts.messages(env, env.dataset, question)
    return Example(id, messages, truth, solution=solution, question=question, identity=identity)


def _solution(row: sources.Row, env: EnvConfig, names: dict[str, str], truth: dict[str, str]) -> str:
    """Return the solution of a row in the format of the prompt; empty if there is none."""
    text = row.values.get("solution")
    if "solution" in names:
        column = names["solution"]
        resolved = fields.resolve(row, column, "env.fields.solution")
        if column not in resolved.values or not columns.is_missing(resolved.values[column]):
            text = columns.text(resolved, column, "jsonl")
    if not isinstance(text, str) or not text.strip():
        return prompts.solution(env, "", truth["answer"]) if "answer" in truth else ""
    if env.answer_format == "tags" and "<answer>" not in text and "answer" in truth:
        return prompts.solution(env, text, truth["answer"])
    return text


def _is_message(value: object, role: str | None = None) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        return False
    return is_role(value.get("role")) and role in (None, value["role"])


def _messages(value: object, row: sources.Row, column: str) -> list[dict[str, str]]:
    chat = value if isinstance(value, list) else []
    good = bool(chat) and all(map(_is_message, chat))
    if not good or chat[-1]["role"] != "user":
        raise DataError(
            f"jsonl: {row.where}: column {column!r} is {str(value)[:80]!r}, not a list of chat messages that "
            'ends with one of the user; write [{"role": "user", "content": ...}]'
        )
    return [{"role": message["role"], "content": message["content"]} for message in chat]
