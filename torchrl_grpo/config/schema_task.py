"""The part of the schema that says what is trained on: problems, prompts, episodes and rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchrl_grpo.config.builtin import DATASETS, ENVIRONMENTS, REWARDS, TOOLS
from torchrl_grpo.config.keys import key
from torchrl_grpo.config.values import (
    AnswerFormat,
    NonNegativeFloat,
    OverlongPrompts,
    PositiveFloat,
    PositiveInt,
    ProblemSampling,
)


@dataclass
class EnvConfig:
    """The problems and how many of them a collection round takes."""

    dataset: str = key(
        "gsm8k",
        f"Source of the problems: {', '.join(DATASETS)}, or a function of your own, "
        "FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION.",
    )
    task: str | None = key(
        None,
        "The reasoning_gym task, e.g. chain_sum; null for every other dataset.",
        only_with="env.dataset=reasoning_gym",
    )
    task_args: dict[str, Any] = key(
        {},
        "Arguments of the reasoning_gym task, e.g. {max_terms: 3}, or of your own function in dataset. For "
        "dataset=pictures the kinds of pictures and their size in pixels, e.g. {kinds: [count, clock], "
        "size: 96}.",
    )
    task_size: PositiveInt = key(
        10_000,
        "Number of problems to generate for training, for reasoning_gym, pictures and composed IFEval "
        "prompts.",
    )
    data_path: str | None = key(
        None,
        "Read problems from this path instead of the hub: a JSONL, JSON or Parquet file, a folder of splits "
        "or a saved dataset.",
    )
    eval_data_path: str | None = key(
        None,
        "Read the held-out problems from this path; null reads them from eval_split.",
    )
    hub_name: str | None = key(
        None,
        "Name of the dataset on the Hugging Face hub; null means the dataset's usual one.",
    )
    hub_subset: str | None = key(
        None,
        "Configuration of the dataset on the hub; null means the dataset's usual one.",
    )
    train_split: str | None = key(None, "Split to train on; null means train.")
    eval_split: str | None = key(
        None,
        "Split of the held-out problems. null means a test or validation split, or part of the training "
        "split if there is none. If it names the training split, part of that split is held out.",
    )
    fields: dict[str, str] = key(
        {},
        "Columns of a jsonl dataset or of your own: question or messages (by default the first column of "
        "question, messages and prompt that there is), answer, solution for sft.py, identity, which is "
        "equal for rows that ask the same in other words, and with model.pictures images (by default the "
        "column images or image). Each is a column, a path into one, e.g. "
        "{question: item.text}, or a Jinja template, e.g. {question: '{{ title }}: {{ text }}'}.",
    )
    environment: str | None = key(
        None,
        "Environment in which a response is an episode of several turns: "
        f"{', '.join(ENVIRONMENTS)}, a class of your own, FILE.py:CLASS or PACKAGE.MODULE:CLASS, or an "
        "OpenEnv server, openenv:URL or openenv:COMMAND. null is one turn, unless there are tools.",
    )
    environment_args: dict[str, Any] = key({}, "Arguments of the environment.", only_with="env.environment")
    tools: list[str] = key(
        [],
        f"Tools that the model may call in a response: {', '.join(TOOLS)}, functions of your own, or "
        "servers of tools, mcp:URL or mcp:COMMAND, e.g. [calculator, my_tools.py:search]. A chat template "
        "that loses calls or their results is refused at the start.",
    )
    allowed_tools: list[str] = key(
        [],
        "Names of the tools that the model may call of those that mcp:... and openenv:... servers offer; [] "
        "means all of them.",
    )
    max_turns: PositiveInt = key(
        8, "With an environment or tools: largest number of the model's turns in a response."
    )
    max_turn_tokens: PositiveInt | None = key(
        None,
        "With an environment or tools: largest number of tokens of one turn of the model. A longer turn is "
        "cut off and ends the response. null leaves inference_model.max_new_tokens, which bounds the whole "
        "response.",
    )
    tool_timeout_s: PositiveFloat = key(
        10.0,
        "Seconds that one call of a tool or of an environment of your own may take before its process is "
        "stopped.",
    )
    max_tool_characters: PositiveInt = key(
        2_000, "Longest result of a tool, in characters. The rest is cut off."
    )
    mixture: list[dict[str, Any]] = key(
        [],
        "Several data sets in place of one, e.g. [{dataset: gsm8k, weight: 0.7}, {dataset: reasoning_gym, "
        "task: countdown, weight: 0.3}]. A part may have dataset, task, task_args, task_size, data_path, "
        "eval_data_path, hub_name, hub_subset, train_split, eval_split, fields, train_on_ifeval, "
        "shuffle_buffer, prompt_template, system_prompt, answer_format, control_tokens_in_data, reward (a "
        "mapping like the section reward), eval_reward, weight and name.",
    )
    num_envs: PositiveInt = key(8, "Prompts in one collection round.")
    repeats: PositiveInt = key(
        8,
        "Responses to each prompt: the group within which advantages are computed. At least 2, unless "
        "policy.advantage_estimator is reward or none.",
    )
    system_prompt: str | None = key(None, "System message before every question; null sends none.")
    prompt_template: str = key(
        "{question}",
        "Text of the user message; {question} is replaced by the question.",
    )
    answer_format: AnswerFormat = key(
        AnswerFormat.tags,
        "How a response gives its answer: tags expects <answer>...</answer>, plain expects the bare answer, "
        'equation expects anything that ends in "= answer".',
    )
    control_tokens_in_data: bool = key(
        False,
        "Let the text of a control token in the data set, such as <|im_end|>, become that token: for prompts "
        "that are rendered already, and for placeholders such as <image>. false keeps it ordinary text. This "
        "covers questions, messages, solutions, and the messages that an environment's reset returns, but "
        "never what its step or a tool returns.",
    )
    overlong_prompts: OverlongPrompts = key(
        OverlongPrompts.error,
        "What to do with a prompt that leaves no room for inference_model.max_new_tokens in max_model_len: "
        "error ends the run, drop skips the problem, truncate_left, truncate_right and truncate_middle cut "
        "the question at that place.",
    )
    shuffle: bool = key(
        True,
        "Draw training problems in an order that depends on the seed; false keeps the order of the file.",
    )
    shuffle_buffer: PositiveInt | None = key(
        None,
        "Rows of a stream that are read beyond those that the run draws; all of them are shuffled. With a "
        "number, a data set of the hub is streamed and an iterator of your own is not read to its end. null "
        "means 10000 for an iterable of your own that has no length and can be read again.",
    )
    sampling: ProblemSampling = key(
        ProblemSampling.uniform,
        "How training problems are drawn: uniform takes each once per epoch, pass_rate draws them by the "
        "share of right responses so far.",
    )
    pass_rate_bands: list[float] = key(
        [0.1, 0.9],
        "With sampling=pass_rate: the bounds between bands of pass rates.",
        only_with="env.sampling=pass_rate",
    )
    pass_rate_weights: list[float] = key(
        [0.2, 1.0, 0.2],
        "With sampling=pass_rate: the weight of a problem in each band, one more than there are bounds.",
        only_with="env.sampling=pass_rate",
    )
    unseen_weight: NonNegativeFloat = key(
        1.0,
        "With sampling=pass_rate: the weight of a problem that no group has answered.",
        only_with="env.sampling=pass_rate",
    )
    order_by: str | None = key(
        None,
        "Column by which training problems are sorted, smallest first, e.g. a difficulty. It needs "
        "shuffle=false. null keeps the order of the file.",
    )
    train_on_ifeval: bool = key(
        False,
        "Train on the prompts of the IFEval benchmark itself. Its accuracy then says nothing about new "
        "prompts.",
        only_with="env.dataset=ifeval",
    )


@dataclass
class RewardConfig:
    """The rewards and how they are run."""

    weights: dict[str, float] = key(
        {},
        "Weight of each reward in the sum, e.g. {gsm8k: 1.0, format: 0.2}; {} means the dataset's defaults. "
        f"Names: {', '.join(REWARDS)}.",
    )
    functions: dict[str, str] = key(
        {},
        "Rewards of your own by name, each FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION, e.g. "
        "{brevity: my_rewards.py:brevity}; judge, a model behind an endpoint; or hf:MODEL, a reward model "
        "of the hub or in a folder. docs/tasks_and_rewards.md describes functions, docs/judges.md models. "
        "One without a weight in reward.weights has weight 1, unless eval.reward names it beside other "
        "weights. Without reward.weights, the dataset's defaults do not apply.",
    )
    args: dict[str, Any] = key(
        {},
        "Arguments of the rewards in functions, by name, e.g. {brevity: {target: 50}}. docs/judges.md has "
        "those of judges and reward models.",
    )
    on_error: float = key(
        0.0,
        "Value of a reward that raises an error. The error is also counted and logged. A judge or reward "
        "model that fails counts as the mean of the group's other responses instead.",
    )
    timeout_s: PositiveFloat = key(
        5.0,
        "Seconds that one call of a checker or of a function of your own may take before its process is "
        "stopped.",
    )
    workers: PositiveInt = key(
        1,
        "Calls of each reward at a time. math_verify, reasoning_gym and each function of your own start this "
        "many processes. With 1, there is one call after the other.",
    )
    sandbox: bool = key(
        True,
        "Judge each answer of math_verify and reasoning_gym, which evaluate what the model writes, in a "
        "process without files, network and other processes. It needs Linux 5.13. Without it, code in an "
        "answer can do whatever your user may do. docs/security.md has the details.",
    )
