"""From a question to chat messages: the template, the system prompt, and the request for a format.

With ``env.answer_format=tags``, a prompt that is left at its defaults (``env.prompt_template="{question}"``,
no ``env.system_prompt``) gets one closing paragraph that asks for ``<think>`` and ``<answer>`` tags. Whoever
writes a template or a system prompt says there what the answer should look like: nothing is added then. With
``env.answer_format=plain`` or ``equation`` nothing is ever added.
"""

from __future__ import annotations

from torchrl_grpo.config.schema import EnvConfig
from torchrl_grpo.errors import ConfigError

PLAIN_TEMPLATE = "{question}"

#: What stands between the answer tags, by data set. A data set that is not here (ifeval) never asks for tags:
#: its prompts are themselves about format.
_ANSWERS: dict[str, str] = {
    "gsm8k": "the final number only",
    "math": "the final answer only",
    "reasoning_gym": "the final answer only",
    "jsonl": "the final answer only",
}


def messages(env: EnvConfig, dataset: str, question: str) -> list[dict[str, str]]:
    """The chat messages for a question.

    Args:
        env: ``prompt_template``, ``system_prompt`` and ``answer_format`` are read.
        dataset: the data set's name; it decides what the request for tags says.
        question: put in place of ``{question}``; its own braces stay as they are.

    Returns:
        One user message, after a system message when ``env.system_prompt`` is set.

    Raises:
        ConfigError: the template does not contain ``{question}``.
    """
    if PLAIN_TEMPLATE not in env.prompt_template:
        raise ConfigError(
            f"env.prompt_template={env.prompt_template!r} does not contain {{question}}; "
            "write {question} where the question belongs"
        )
    # replace(), not format(): templates and questions may hold other braces, as LaTeX does.
    content = env.prompt_template.replace(PLAIN_TEMPLATE, question)
    if asks_for_tags(env, dataset):
        content += (
            "\n\nThink step by step between <think> and </think>, then write "
            f"{_ANSWERS[dataset]} between <answer> and </answer>."
        )
    turns = [{"role": "user", "content": content}]
    if env.system_prompt is not None:
        turns.insert(0, {"role": "system", "content": env.system_prompt})
    return turns


def frame(env: EnvConfig, dataset: str) -> tuple[str, str]:
    """What stands before and after the question in the user's turn; where it stands twice, around both."""
    content = messages(env, dataset, "\0")[-1]["content"]
    return content[: content.index("\0")], content[content.rindex("\0") + 1 :]


def asks_for_tags(env: EnvConfig, dataset: str) -> bool:
    """Whether the default request for tags is added to the questions of this data set."""
    untouched = env.prompt_template == PLAIN_TEMPLATE and env.system_prompt is None
    return env.answer_format == "tags" and untouched and dataset in _ANSWERS
