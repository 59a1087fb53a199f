"""From a question to chat messages: the template, the system prompt, and the request for an answer format.

With ``env.answer_format=tags`` and a default prompt (``env.prompt_template="{question}"``, no
``env.system_prompt``), a closing paragraph asks for ``<think>`` and ``<answer>`` tags. A custom template or
system prompt must describe the answer format itself, so nothing is added to it. With
``env.answer_format=plain`` or ``equation`` nothing is ever added.
"""

from __future__ import annotations

from torchrl_grpo.config.builtin import OF_PICTURES, dataset_kind
from torchrl_grpo.config.schema import EnvConfig
from torchrl_grpo.errors import ConfigError

PLAIN_TEMPLATE = "{question}"

#: Description of the content of the answer tags, by data set. ``ifeval`` is missing, because its prompts
#: already ask for a format; a data set that is missing never asks for tags.
_ANSWERS: dict[str, str] = {
    "gsm8k": "the final number only",
    "math": "the final answer only",
    "reasoning_gym": "the final answer only",
    "jsonl": "the final answer only",
    **dict.fromkeys(OF_PICTURES, "the final answer only"),
}


def messages(env: EnvConfig, dataset: str, question: str) -> list[dict[str, str]]:
    """Build the chat messages for a question.

    Args:
        env: configuration; ``prompt_template``, ``system_prompt`` and ``answer_format`` are read.
        dataset: data set name, which selects the text of the request for tags.
        question: text that replaces ``{question}``. Its own braces stay as they are.

    Returns:
        One user message, preceded by a system message if ``env.system_prompt`` is set.

    Raises:
        ConfigError: the template does not contain ``{question}``.
    """
    if PLAIN_TEMPLATE not in env.prompt_template:
        raise ConfigError(
            f"env.prompt_template={env.prompt_template!r} does not contain {{question}}; "
            "write {question} where the question belongs"
        )
    # replace() instead of format(), because templates and questions may contain other braces, as in LaTeX.
    content = env.prompt_template.replace(PLAIN_TEMPLATE, question)
    if asks_for_tags(env, dataset):
        content += (
            "\n\nThink step by step between <think> and </think>, then write "
            f"{_ANSWERS[dataset_kind(dataset)]} between <answer> and </answer>."
        )
    turns = [{"role": "user", "content": content}]
    if env.system_prompt is not None:
        turns.insert(0, {"role": "system", "content": env.system_prompt})
    return turns


def solution(env: EnvConfig, reasoning: str, answer: str, text: str | None = None) -> str:
    """Write a solution in the format that the prompt asks for.

    Args:
        env: configuration; ``answer_format`` is read.
        reasoning: steps to the answer, or an expression that equals it; may be empty.
        answer: the answer.
        text: the solution as the data set has it, for ``answer_format=plain``; None for the answer alone.
    """
    if env.answer_format == "tags":
        # Empty thoughts would be learned too.
        thoughts = f"<think>{reasoning}</think>" if reasoning else ""
        return f"{thoughts}<answer>{answer}</answer>"
    if env.answer_format == "equation":
        return f"{reasoning} = {answer}".strip()
    return answer if text is None else text


def frame(env: EnvConfig, dataset: str) -> tuple[str, str]:
    """Return the text before the first and after the last occurrence of the question in the user's turn."""
    content = messages(env, dataset, "\0")[-1]["content"]
    return content[: content.index("\0")], content[content.rindex("\0") + 1 :]


def trusted(env: EnvConfig, dataset: str) -> list[str] | None:
    """Return the texts of the configuration in its messages, as :class:`Example` has them."""
    if env.control_tokens_in_data:
        return None
    return [text for text in (env.system_prompt, *frame(env, dataset)) if text]


def asks_for_tags(env: EnvConfig, dataset: str) -> bool:
    """Whether the default request for tags is added to the questions of this data set."""
    untouched = env.prompt_template == PLAIN_TEMPLATE and env.system_prompt is None
    return env.answer_format == "tags" and untouched and dataset_kind(dataset) in _ANSWERS
